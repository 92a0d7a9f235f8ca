"""A trace of some steps: what the devices and the host did, in time."""

import contextlib
from pathlib import Path
from typing import Any

import jax

from affinage.cluster.processes import Processes


class Profiler:
    """Traces `steps`, first and last, into `profile/`, for TensorBoard and Perfetto; of several processes each one."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self._first, self._last = steps or (0, 0)
        processes = Processes.current
        self._folder = folder / "profile" / (f"process-{processes.index}" if processes.count > 1 else "")
        self._running = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Enter this while a step is dispatched."""
        if not self._first <= step <= self._last:
            return contextlib.nullcontext()
        if not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would be an event
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            self._running = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def dispatched(self, step: int, values: Any) -> None:
        """Close the trace after its last step; `values` are ready when the devices are done with the step."""
        if self._running and step >= self._last:
            jax.block_until_ready(values)
            self.__exit__()

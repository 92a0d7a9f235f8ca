"""From the metrics of a step on the devices to a line in the file and on the screen, without stalling the devices."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from affinage.cluster.processes import Processes
from affinage.tracking import Trackers
from affinage.training.health import Health
from affinage.training.ledger import Ledger
from affinage.training.metrics import MetricsLog
from affinage.training.program import Program
from affinage.training.progress import StepDisplay
from affinage.training.readings import Readings

_STEPS_BETWEEN_PROBES = 100
_IN_FLIGHT = 2  # steps, so that the devices never wait for the host
_IN_FLIGHT_AT_MOST = 16  # where they are so short ...
_SECONDS_IN_FLIGHT = 0.1  # ... that they take no longer than this together


class Reporter:
    """Takes the metrics of every step while they are still being computed, and looks at them a little later.

    Few steps are in flight, so that memory and the reaction to signals stay bounded while the devices never wait for
    the host. Of short ones there are more, half of which are waited for at a time: to wake up for each costs a CPU that
    computes, too, up to a tenth of steps of 5 ms. Many hosts, which look at the same steps, keep to two. On a CPU that
    plays several devices none is: their collectives can deadlock when two steps share the threads.
    """

    def __init__(
        self,
        program: Program,
        metrics: MetricsLog,
        display: StepDisplay,
        ledger: Ledger,
        health: Health,
        start: int,
        trackers: Trackers,
    ) -> None:
        self._program, self._metrics, self._display, self._ledger = program, metrics, display, ledger
        self._health, self._trackers = health, trackers
        many_on_cpu = program.chip.name == "CPU" and program.mesh.size > 1
        self._ahead = 0 if many_on_cpu else _IN_FLIGHT
        self._adapts = not many_on_cpu and Processes.current.count == 1
        self._is_apart = program.chip.name != "CPU"  # values must be brought from the devices
        self._pending: deque[tuple[int, Mapping[str, jax.Array], float]] = deque()
        self._flops = program.flops_per_step
        self._peak = program.peak_flops
        self._clock_step = self._done = start
        self._clock = time.perf_counter()
        self._waited = 0.0  # seconds since the clock
        self._readings = Readings(program.mesh.local_devices)
        self._start, self._compute = start, 0.0  # seconds of a step

    def dispatched(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """A step was dispatched. Of one in a hundred it is measured how long the devices take by themselves."""
        if (step - self._start) % _STEPS_BETWEEN_PROBES == 2:
            jax.block_until_ready([pending for _, pending, _ in self._pending])
            before = time.perf_counter()
            jax.block_until_ready(metrics)
            self._compute = time.perf_counter() - before
            if self._adapts:
                fitting = int(_SECONDS_IN_FLIGHT / self._compute)
                self._ahead = min(max(fitting, _IN_FLIGHT), _IN_FLIGHT_AT_MOST)

    def training(self, step: int, metrics: Mapping[str, jax.Array], waited: float = 0.0) -> None:
        """Take the metrics of a step that was just dispatched, and the seconds that the next batch was waited for."""
        late = waited - self._compute
        if late > 0 and metrics["skipped"].is_ready():  # type: ignore[attr-defined]  # the devices had nothing left to do when the batch came
            self._ledger.move(late, "compute", "data")
        self._pending.append((step, metrics, waited))
        if len(self._pending) > self._ahead:
            left = max(self._ahead // 2, min(self._ahead, _IN_FLIGHT))
            while len(self._pending) > left:
                self._finish_oldest()

    def drain(self) -> None:
        """Wait for all steps in flight and write their lines."""
        while self._pending:
            self._finish_oldest()

    def rewind(self, step: int) -> None:
        """Forget all that came after a step."""
        self._pending.clear()
        self._metrics.cut(step)
        self._done = step
        self.restart_clock()

    def validation(self, step: int, scores: Mapping[str, Mapping[str, float]] | None) -> None:
        """Write the scores of a validation; None, given up, leaves no line."""
        if scores is not None:
            self._written({"step": step, "validation": scores})
            self._display.validation(step, scores)
        self.restart_clock()

    def evaluation(self, step: int, scores: Mapping[str, Any]) -> None:
        """Write the scores of benchmarks."""
        self._written({"step": step, "evaluation": scores})
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave the time since the last step out of the speed: it was spent on something else."""
        self._clock_step, self._clock = self._done, time.perf_counter()
        self._waited = 0.0

    def _finish_oldest(self) -> None:
        step, metrics, waited = self._pending.popleft()
        self._waited += waited
        # Waits for the step, too. A sick one has a line of its own whenever it happens.
        sick = any(_number(metrics[name]) for name in ("skipped", "spike") if name in metrics)
        self._done = step
        now = time.perf_counter()
        settings = self._program.job.settings
        if step % settings.log_every == 0 or step in (1, settings.steps) or sick:
            self._write(step, metrics, now)
        if sick:
            self._health.look(step, self._numbers(metrics))

    def _write(self, step: int, metrics: Mapping[str, jax.Array], now: float) -> None:
        steps = max(step - self._clock_step, 1)
        per_step, waited = (now - self._clock) / steps, self._waited / steps
        self._clock_step, self._clock, self._waited = step, now, 0.0
        row = {
            "step": step,
            **self._numbers(metrics),
            self._program.unit: step * self._program.units,
            f"{self._program.unit}_per_second": round(self._program.units / per_step, 1),
            "mfu": None if self._peak is None else self._flops / per_step / self._peak,
            "data_wait": round(waited, 6),
            "seconds": round(self._ledger.training, 3),
            **self._readings.read(),
        }
        self._written(row)
        self._display.training(self._metrics.rows[-1])

    def _written(self, row: Mapping[str, Any]) -> None:
        self._metrics.write(row)
        self._trackers.log(self._metrics.rows[-1])
        self._program.job.measured(self._metrics.rows[-1])

    def _numbers(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        if self._is_apart:
            for value in metrics.values():
                value.copy_to_host_async()  # of all before the first is waited for
        return {name: _number(value) for name, value in metrics.items()}


def _number(value: jax.Array) -> float:
    return float(np.asarray(value))  # takes a third of what float(value) does

"""A road of one stage, in which a host that is to be hurt stands still; for `gangs.py`."""

import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from affinage.pipeline.step import StepContext

RECIPE = Path(__file__).parents[1] / "tests" / "recipes" / "tiny.yaml"


class Job:
    """What this host is to do."""

    stage, host, hurt, begun = "", 0, {}, Path()

    @classmethod
    def stand_still(cls) -> None:
        """Be hurt as is said."""
        print(f"hurt in the {cls.stage}", flush=True)
        time.sleep(3600) if cls.hurt["by"] == "sleep" else os.kill(os.getpid(), cls.hurt["by"])


def walk(job: dict, host: int) -> int:
    """Walk the road; returns the exit status."""
    from affinage.config.load import load_recipe
    from affinage.config.runtime import RuntimeSettings
    from affinage.hardware import pulse
    from affinage.hardware.joining import joined
    from affinage.hardware.standstill import Standstill
    from affinage.pipeline.runner import PipelineRunner, Runs
    from affinage.pipeline.step import Step
    from affinage.stopping import OwnProcess

    folder = Path(job["folder"])
    Job.stage, Job.host, Job.hurt, Job.begun = job["stage"], host, job["hurt"], folder / "begun"
    runtime = RuntimeSettings(hang_timeout=job["hang_timeout"])
    pulse.SILENT_FOR_LONG = 3600.0  # seconds: it is the other host that is to leave, before this one's guard ends it
    road = [Step("it", work, {}, distributed=job["stage"] == "evaluation")]
    try:
        with OwnProcess(), pulse.guarded("road", runtime), joined() as hosts, Standstill("road", folder, runtime):
            runner = PipelineRunner(load_recipe(str(RECIPE)), Runs(folder / "runs"), road)
            if hosts.first:
                runner.run(Nobody())
            else:
                threading.Thread(target=_waits, daemon=True).start()
                runner.follow()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def work(context: StepContext) -> dict:
    """A stage that works for ever, on a host that is not hurt."""
    together = Job.stage == "evaluation"
    if together:
        _compute()
    if Job.hurt["host"] == Job.host:
        Job.stand_still()
    Job.begun.touch()
    while True:
        _compute() if together else sum(range(10_000))


def _compute() -> None:
    """With the devices of all hosts."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    spread = NamedSharding(Mesh(devices, "all"), PartitionSpec("all"))
    rows = jax.make_array_from_callback((len(devices),), spread, lambda at: np.ones(len(devices), np.float32)[at])
    jax.block_until_ready(jax.jit(jnp.sum)(rows))


def _waits() -> None:
    """The second host, which waits while the first makes data."""
    while not (Job.begun.exists() and Job.stage == "data" and Job.hurt["host"] == Job.host):
        time.sleep(0.01)
    Job.stand_still()


class Nobody:
    """Whom a runner tells how it goes."""

    def began(self, *_: object) -> None: ...

    def progressed(self, what: str) -> None: ...

    def measured(self, row: Any) -> None: ...

    def ended(self, *_: object) -> None: ...

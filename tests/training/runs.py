"""Small training runs in processes of their own, for tests that kill them or tell them to stop."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from waiting import PATIENCE, until

_PLACES = [str(folder) for folder in Path(__file__).parents[:2]]
_PROGRAM = f"import sys; sys.path[:0] = {_PLACES!r}; import runs; runs.be_run(sys.argv[1])"
_BEFORE_STEPS = ("start", "first batch", "compilation", "restore")  # there is nothing to save


class Run:
    """A run that was started. `log` is what it prints."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
        environment = os.environ | {"XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def until(self, true: Callable[[], object]) -> None:
        until(lambda: true() or self.process.poll() is not None)

    def said(self) -> str:
        return self.log.read_text()

    def steps(self) -> list[int]:
        """Those made."""
        return [int(line.split()[1]) for line in self.said().splitlines() if line.startswith("step ")]

    def wait(self) -> int:
        """Its exit status, negative if a signal ended it."""
        return self.process.wait(PATIENCE)


def start(folder: Path, steps: int, *, when: str = "", number: int = signal.SIGTERM) -> Run:
    """Start a run in a folder; in the phase `when` it sends itself a signal."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"folder": str(folder), "steps": steps, "when": when, "number": int(number)}
    return Run([sys.executable, "-c", _PROGRAM, json.dumps(job)], folder.with_suffix(".log"))


def finish(folder: Path, steps: int) -> None:
    run = start(folder, steps)
    assert run.wait() == 0, run.said()


def be_run(order: str) -> None:
    """The run itself, in its process, which ends here."""
    import traceback

    import tiny

    from affinage.config.recipe import CheckpointSettings, RuntimeSettings
    from affinage.errors import EXIT_PREEMPTED, Preempted
    from affinage.stopping import StopSignals
    from affinage.training import TrainJob, train

    class SlowFeed(tiny.RandomFeed):
        def iterate(self, number: int) -> Iterator[dict]:
            for batch in super().iterate(number):
                time.sleep(0.005)
                yield batch

    print("begun", flush=True)
    job, status = json.loads(order), 0
    if job["when"]:
        _signal_in(job["when"], job["number"])
    try:
        with StopSignals():
            train(
                TrainJob(
                    graph=tiny.graph(dropout=0.1, layers=1),
                    settings=tiny.settings(job["steps"], eval_every=7),
                    runtime=RuntimeSettings(checkpoint=CheckpointSettings(every_steps=5)),
                    mesh={"fsdp": 2},
                    seed=1,
                    feed=SlowFeed(),
                    folder=Path(job["folder"]),
                    validation={"held out": tiny.HeldOut()},
                    on_step=(lambda step, state: print("step", step, flush=True),),
                )
            )
    except Preempted as stopped:
        print(stopped)
        status = EXIT_PREEMPTED
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _signal_in(phase: str, number: int) -> None:
    """Have the first call of a phase's function send this process a signal, up to 20 ms later.

    The phase is not over before the signal came; where there is nothing to save, the process waits to be left.
    """
    from tiny import RandomFeed

    from affinage.checkpoint import CheckpointStore
    from affinage.hardware.devices import Hardware
    from affinage.training.evaluator import Evaluator
    from affinage.training.metrics import MetricLogger
    from affinage.training.trainer import Trainer

    place, name = {
        "start": (Hardware, "acquire"),
        "first batch": (RandomFeed, "batch"),
        "compilation": (Trainer, "compile_training"),
        "restore": (CheckpointStore, "restore_newest"),
        "step": (MetricLogger, "log"),
        "evaluation": (Evaluator, "validate"),
        "save": (CheckpointStore, "save"),
    }[phase]
    function, begun = getattr(place, name), threading.Event()

    def signal_now() -> None:
        print(f"signal in {phase}", flush=True)
        os.kill(os.getpid(), number)

    def with_signal(*args: object, **kwargs: object) -> object:
        if begun.is_set():
            return function(*args, **kwargs)
        begun.set()
        thread = threading.Timer(random.uniform(0.0, 0.02), signal_now)
        thread.start()
        result = function(*args, **kwargs)
        thread.join()
        if phase in _BEFORE_STEPS:
            time.sleep(3600)
        return result

    setattr(place, name, with_signal)

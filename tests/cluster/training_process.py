"""A small training in one or several processes, of `affinage launch`, that are killed or told to stop.

    python -m training_process JOB

is one of the processes. JOB is JSON: `folder`, `steps`, `settings`, `runtime`, `nonfinite` (steps whose last row has a
loss that is not finite), `pause` (seconds after each step), and of this start its number, `start`, and `hurt`: a
process, where it hurts itself (after a step, or in a phase), and a signal's number, or 0 if it sleeps.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tiny
from affinage.checkpoint import CheckpointStore
from affinage.cluster.launch import WorkerGroup, cpu_devices, start_processes, supervise
from affinage.cluster.processes import Processes, init_distributed
from affinage.errors import EXIT_PREEMPTED, Preempted
from affinage.hardware.devices import Hardware
from affinage.stopping import StopSignals, left_when_done
from affinage.training import train
from affinage.training.evaluator import Evaluator
from affinage.training.metrics import MetricLogger
from affinage.training.trainer import Trainer

DEVICES = 4  # of all processes together
BEFORE_STEPS = ("start", "first batch", "compilation", "restore")  # phases in which there is nothing to save


class Training:
    """Starts a training, see `affinage.cluster.launch.supervise`. `more` is of the job.

    `hurts`: what processes do to themselves, one for each start: process, step or phase, signal.
    """

    def __init__(self, folder: Path, steps: int, workers: int = 2, hurts: Sequence = (), **more: object) -> None:
        self.workers, self.folder, self.hurts, self.said, self.starts = workers, folder, list(hurts), [], 0
        self._job = {"folder": str(folder), "steps": steps, **more}

    def start(self, command: Sequence[str]) -> WorkerGroup:
        hurt = self.hurts[self.starts] if self.starts < len(self.hurts) else None
        job = json.dumps({**self._job, "hurt": hurt, "start": self.starts})
        self.starts += 1
        here, environment = Path(__file__).parent, os.environ | cpu_devices(DEVICES // self.workers)
        environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), environment.get("PYTHONPATH", "")])
        words = [sys.executable, "-m", "training_process", job]
        return start_processes(words, environment, self.workers, self.said.append)

    def run(self, failures: int = 0) -> int:
        """The exit status of `affinage launch`."""
        return supervise(self.start, [], max_failures=failures, say=self.said.append)

    def made(self, start: int, process: int) -> list[int]:
        """The steps that a process made in a start."""
        file = _made(self.folder, start, process)
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def newest(self) -> int:
        """The last step that is saved, or 0."""
        return max([0, *CheckpointStore(self.folder / "checkpoints").steps()])


def ended_alike(one: Path, other: Path, step: int) -> bool:
    """Whether two runs ended with the same state and curve, bit for bit."""
    first, second = (CheckpointStore(folder / "checkpoints").metadata(step) for folder in (one, other))
    same = bool(first.checksums) and first.checksums == second.checksums
    return same and tiny.curve(one) == tiny.curve(other) and len(tiny.curve(one)) > 1


def _made(folder: Path, start: int, process: int) -> Path:
    return folder.with_name(f"{folder.name}-{start}-{process}.steps")


class Feed(tiny.SickFeed):
    """Each process reads its own rows alone."""

    def iterate_part(self, number: int, part: int, parts: int) -> Iterator[dict]:
        share = self.rows // parts
        for batch in self.iterate(number):
            yield {name: array[part * share : (part + 1) * share] for name, array in batch.items()}


def main(job: dict) -> None:
    """Train as one of the processes that the environment names."""
    folder = Path(job["folder"])
    process, place, number = job["hurt"] or (None, None, 0)
    if isinstance(place, str):
        _signal_in(place, number)

    def on_step(step: int, state: object) -> None:
        index = Processes.current.index
        with _made(folder, job["start"], index).open("a") as file:
            print(step, file=file)
        time.sleep(job.get("pause", 0.005))
        if (index, step) == (process, place):
            os.kill(os.getpid(), number) if number else time.sleep(3600)

    how = {"graph": tiny.graph(dropout=0.1, layers=1), "mesh": {"data": 2, "fsdp": 2}, "initial_params": None}
    how |= {"feed": Feed(job.get("nonfinite", ())), "validation": {"held out": tiny.HeldOut()}, "eval_every": 7}
    training = tiny.job(folder, job["steps"], on_step, **how, **job.get("settings", {}), **job.get("runtime", {}))
    with StopSignals(), init_distributed(training.runtime.heartbeat_timeout):
        train(training)


def _signal_in(phase: str, number: int) -> None:
    """Have the first call of a phase's function send this process a signal, up to 20 ms later; a kill may come later.

    The phase is not over before another signal came; where there is nothing to save, the process waits to be left.
    """
    place, name = {
        "start": (Hardware, "acquire"), "first batch": (tiny.RandomFeed, "batch"), "step": (MetricLogger, "log"),
        "compilation": (Trainer, "compile_training"), "restore": (CheckpointStore, "restore_newest"),
        "evaluation": (Evaluator, "validate"), "save": (CheckpointStore, "save"),
    }[phase]  # fmt: skip
    function, begun, kills = getattr(place, name), threading.Event(), number == signal.SIGKILL

    def signal_now() -> None:
        print(f"signal in {phase}", flush=True)
        os.kill(os.getpid(), number)

    def with_signal(*args: object, **kwargs: object) -> object:
        if begun.is_set():
            return function(*args, **kwargs)
        begun.set()
        latest = (1.0 if phase in BEFORE_STEPS else 0.15) if kills else 0.02
        thread = threading.Timer(random.uniform(0.0, latest), signal_now)
        thread.start()
        result = function(*args, **kwargs)
        if not kills:
            thread.join()
            time.sleep(3600 if phase in BEFORE_STEPS else 0)
        return result

    setattr(place, name, with_signal)


if __name__ == "__main__":
    with left_when_done():
        try:
            main(json.loads(sys.argv[1]))
        except Preempted as stopped:
            print(stopped, flush=True)
            sys.exit(EXIT_PREEMPTED)

"""A small training in one or several processes, of `affinage launch`.

    python -m training_process JOB

is one of the processes. JOB is JSON: `folder`, `steps`, `settings`, `nonfinite` (steps whose last row has a loss that
is not finite), `pause` (seconds after each step) and `hurt`: for each start a process, the step after which it hurts
itself, and a signal's number, or 0 if it sleeps.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.metadata import compare
from affinage.cluster.launch import WorkerGroup, cpu_devices, start_processes, supervise
from affinage.cluster.processes import Processes, init_distributed
from affinage.errors import EXIT_PREEMPTED, Preempted
from affinage.stopping import StopSignals, left_when_done
from affinage.training import train
from curves import curve

DEVICES = 4  # of all processes together


class Training:
    """Starts a training, see `affinage.cluster.launch.supervise`. `more` is of the job.

    `hurts`: what processes do to themselves, one for each start: process, step, signal.
    """

    def __init__(
        self, folder: Path, steps: int, workers: int = 2, hurts: Sequence[tuple[int, int, int]] = (), **more: object
    ) -> None:
        self.workers, self.folder, self.hurts, self.said, self.starts = workers, folder, list(hurts), [], 0
        self._job = {"folder": str(folder), "steps": steps, **more}

    def start(self, command: Sequence[str]) -> WorkerGroup:
        hurt = self.hurts[self.starts] if self.starts < len(self.hurts) else None
        job = json.dumps({**self._job, "hurt": hurt, "start": self.starts})
        self.starts += 1
        here = Path(__file__).parent
        environment = os.environ | cpu_devices(DEVICES // self.workers)
        environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), environment.get("PYTHONPATH", "")])
        words = [sys.executable, "-m", "training_process", job]
        return start_processes(words, environment, self.workers, self.said.append)

    def run(self, failures: int = 0) -> int:
        """The exit status of `affinage launch`."""
        return supervise(self.start, [], max_failures=failures, say=self.said.append)

    def made(self, start: int, process: int) -> list[int]:
        """The steps that a process made in a start."""
        return [int(line) for line in _made(self.folder, start, process).read_text().splitlines()]


def ended_alike(one: Path, other: Path, step: int) -> bool:
    """Whether two runs ended with the same state and curve, bit for bit."""
    first, second = (CheckpointStore(folder / "checkpoints").metadata(step) for folder in (one, other))
    found = compare(first, second)["arrays"]
    same = bool(found["same"]) and not found["different"] and not found["only"]
    return same and curve(one) == curve(other) and len(curve(one)) > 1


def _made(folder: Path, start: int, process: int) -> Path:
    return folder.with_name(f"{folder.name}-{start}-{process}.steps")


class Feed(tiny.RandomFeed):
    """Not finite in the last row of the named steps, counted from 1; each process reads its own rows alone."""

    def __init__(self, nonfinite: Sequence[int] = ()) -> None:
        super().__init__()
        self._nonfinite = nonfinite

    def batch(self, step: int) -> dict[str, Any]:
        batch = super().batch(step)
        if step + 1 in self._nonfinite:
            batch["loss_mask"][-1] = math.nan
        return batch

    def iterate_part(self, number: int, part: int, parts: int) -> Iterator[dict]:
        share = self.rows // parts
        for batch in self.iterate(number):
            yield {name: array[part * share : (part + 1) * share] for name, array in batch.items()}


def main(job: dict) -> None:
    """Train as one of the processes that the environment names."""
    folder = Path(job["folder"])

    def on_step(step: int, state: object) -> None:
        index = Processes.current.index
        with _made(folder, job["start"], index).open("a") as file:
            print(step, file=file)
        time.sleep(job.get("pause", 0.0))
        process, at, number = job["hurt"] or (None, None, 0)
        if (index, step) == (process, at):
            os.kill(os.getpid(), number) if number else time.sleep(3600)

    training = tiny.job(
        folder,
        job["steps"],
        on_step,
        graph=tiny.graph(dropout=0.1, layers=1),
        mesh={"data": 2, "fsdp": 2},
        feed=Feed(job.get("nonfinite", ())),
        validation={"held out": tiny.HeldOut()},
        initial_params=None,
        eval_every=7,
        **job.get("settings", {}),
        **job.get("runtime", {}),
    )
    with StopSignals(), init_distributed(training.runtime.heartbeat_timeout):
        train(training)


if __name__ == "__main__":
    with left_when_done():
        try:
            main(json.loads(sys.argv[1]))
        except Preempted as stopped:
            print(stopped, flush=True)
            sys.exit(EXIT_PREEMPTED)

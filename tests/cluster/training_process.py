"""A small training in one or several processes, each forked from `warm_python`.

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

import numpy as np

from affinage.cluster.launch import WorkerGroup, cpu_devices, start_processes, supervise

DEVICES = 4  # of all processes together
ROWS, CONTEXT = 8, 16


class Training:
    """Starts a training, see `affinage.cluster.launch.supervise`.

    Args:
        python: what stands in a command for `python`.
        folder: of the run.
        steps: of the run.
        workers: how many share its devices.
        hurts: what processes do to themselves, one for each start: process, step, signal.
        more: of the job.
    """

    def __init__(
        self,
        python: Sequence[str],
        folder: Path,
        steps: int,
        workers: int = 2,
        hurts: Sequence[tuple[int, int, int]] = (),
        **more: object,
    ) -> None:
        self.workers, self.folder, self.hurts, self.said, self.starts = workers, folder, list(hurts), [], 0
        self._python, self._job = python, {"folder": str(folder), "steps": steps, **more}

    def start(self, command: Sequence[str]) -> WorkerGroup:
        hurt = self.hurts[self.starts] if self.starts < len(self.hurts) else None
        job = json.dumps({**self._job, "hurt": hurt, "start": self.starts})
        self.starts += 1
        here = Path(__file__).parent
        environment = os.environ | cpu_devices(DEVICES // self.workers)
        environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), environment.get("PYTHONPATH", "")])
        words = [*self._python, "-m", "training_process", job]
        return start_processes(words, environment, self.workers, self.said.append)

    def run(self, failures: int = 0) -> int:
        """The exit status of `affinage launch`."""
        return supervise(self.start, [], max_failures=failures, say=self.said.append)

    def made(self, start: int, process: int) -> list[int]:
        """The steps that a process made in a start."""
        return [int(line) for line in _made(self.folder, start, process).read_text().splitlines()]


def ended_alike(one: Path, other: Path, step: int) -> bool:
    """Whether two runs ended with the same state and curve, bit for bit."""
    from affinage.checkpoint import CheckpointStore
    from affinage.checkpoint.metadata import compare
    from curves import curve

    first, second = (CheckpointStore(folder / "checkpoints").metadata(step) for folder in (one, other))
    found = compare(first, second)["arrays"]
    same = bool(found["same"]) and not found["different"] and not found["only"]
    return same and curve(one) == curve(other) and len(curve(one)) > 1


def _made(folder: Path, start: int, process: int) -> Path:
    return folder.with_name(f"{folder.name}-{start}-{process}.steps")


class Feed:
    """Rows of noise, a function of the step alone, each with a loss mask of its own."""

    bytes = 1000  # of the batches that are held out

    def __init__(self, nonfinite: Sequence[int] = ()) -> None:
        self._nonfinite = nonfinite

    def batch(self, step: int) -> dict[str, Any]:
        draw = np.random.default_rng(step)
        mask = (draw.random((ROWS, CONTEXT)) < np.linspace(0.1, 1.0, ROWS)[:, None]).astype(np.float32)
        if step + 1 in self._nonfinite:
            mask[-1] = math.nan
        return {
            "tokens": draw.integers(0, 97, (ROWS, CONTEXT), np.int32),
            "segment_ids": np.zeros((ROWS, CONTEXT), np.int32),
            "positions": np.tile(np.arange(CONTEXT, dtype=np.int32), (ROWS, 1)),
            "loss_mask": mask,
            "rows": np.arange(ROWS, dtype=np.int32),
        }

    def iterate(self, number: int) -> Iterator[dict]:
        return self.iterate_part(number, 0, 1)

    def iterate_part(self, number: int, part: int, parts: int) -> Iterator[dict]:
        share = ROWS // parts
        for step in range(number, sys.maxsize):
            batch = self.batch(step)
            yield {name: array[part * share : (part + 1) * share] for name, array in batch.items()}

    def __iter__(self) -> Iterator[dict]:
        return iter([self.batch(10**6), self.batch(10**6 + 1)])


def main(job: dict) -> None:
    """Train as one of the processes that the environment names."""
    import tiny_graphs
    from affinage.cluster.processes import init_distributed
    from affinage.config.recipe import RuntimeSettings
    from affinage.config.training import PretrainSettings
    from affinage.model import parse
    from affinage.stopping import StopSignals
    from affinage.training import TrainJob, train

    settings = PretrainSettings.model_validate(
        {
            "steps": job["steps"],
            "batch_size": ROWS,
            "schedule": {"peak_lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 4},
            "eval_every": 7,
            "log_every": 1,
            **job.get("settings", {}),
        }
    )
    folder = Path(job["folder"])
    runtime = RuntimeSettings.model_validate({"checkpoint": {"every_steps": 5}, **job.get("runtime", {})})
    with StopSignals(), init_distributed(runtime.heartbeat_timeout) as processes:

        def on_step(step: int, state: object) -> None:
            with _made(folder, job["start"], processes.index).open("a") as file:
                print(step, file=file)
            time.sleep(job.get("pause", 0.0))
            process, at, number = job["hurt"] or (None, None, 0)
            if (processes.index, step) == (process, at):
                os.kill(os.getpid(), number) if number else time.sleep(3600)

        train(
            TrainJob(
                graph=parse(tiny_graphs.llama(layers=1, dropout=0.1)),
                settings=settings,
                runtime=runtime,
                mesh={"data": 2, "fsdp": 2},
                seed=1,
                feed=Feed(job.get("nonfinite", ())),
                folder=folder,
                validation={"held out": Feed()},
                on_step=(on_step,),
            )
        )


if __name__ == "__main__":
    from affinage.errors import EXIT_PREEMPTED, Preempted
    from affinage.stopping import left_when_done

    with left_when_done():
        try:
            main(json.loads(sys.argv[1]))
        except Preempted as stopped:
            print(stopped, flush=True)
            sys.exit(EXIT_PREEMPTED)

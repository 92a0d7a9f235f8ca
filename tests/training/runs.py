"""Small training runs in processes of their own, which start fast: each is forked from one that has imported all.

    python runs.py

reads jobs as JSON lines, and for each writes the process's number, then how it ended.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from affinage.checkpoint.mirror import Mirror


class Run:
    """A run that was started. `log` is what it says."""

    def __init__(self, nursery: "Nursery", pid: int, log: Path) -> None:
        self.pid, self.log, self._nursery = pid, log, nursery

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def steps(self) -> list[int]:
        return [int(line.split()[1]) for line in self.said().splitlines() if line.startswith("step ")]

    def wait(self) -> int:
        """Its exit status, negative if a signal ended it."""
        return self._nursery.answer()["status"]


class Nursery:
    """Starts runs, one at a time. Use it as a context manager."""

    def __init__(self, cache: Path) -> None:
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(cache),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def answer(self) -> dict:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def start(self, folder: Path, steps: int, *, when: str = "", number: int = signal.SIGTERM, **more: object) -> Run:
        """Start a run in a folder; in the phase `when` it sends itself a signal.

        `more`: `then`, a phase and the signal that comes in it as well; `remote`, the URL it is copied to; `settings`
        of the training; `hang`, after how many files that the copy does not go on.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)  # what an earlier run in the folder said
        job = {"folder": str(folder), "log": str(log), "steps": steps, "when": when, "number": int(number)}
        job |= more
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Run(self, self.answer()["pid"], log)

    def finish(self, folder: Path, steps: int, **more: object) -> str:
        """Run to the end; what it said."""
        run = self.start(folder, steps, **more)
        assert run.wait() == 0, run.said()
        return run.said()


def _main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from affinage.hardware.devices import prepare

    prepare()
    import tiny  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    from affinage.training import train  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            file = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os._exit(_train(job))
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _train(job: dict) -> int:
    """The run itself, in the forked process; returns its exit status."""
    import traceback

    import tiny

    from affinage.errors import EXIT_PREEMPTED, Preempted
    from affinage.stopping import OwnProcess
    from affinage.training import TrainJob, train

    class SlowFeed(tiny.RandomFeed):
        def iterate(self, start_step: int) -> Iterator[dict]:
            for batch in super().iterate(start_step):
                time.sleep(0.005)
                yield batch

    mirror = _mirror(job["remote"], Path(job["folder"]), job.get("hang")) if "remote" in job else None
    if job["when"]:
        _signal_in(job["when"], job["number"])
    if "then" in job:
        _signal_in(*job["then"])
    try:
        with OwnProcess():
            train(
                TrainJob(
                    graph=tiny.graph(dropout=0.1, layers=1),
                    settings=tiny.settings(job["steps"], validate_every=7, **job.get("settings", {})),
                    mesh={"fsdp": 2},
                    seed=1,
                    feed=SlowFeed(),
                    folder=Path(job["folder"]),
                    mirror=mirror,
                    validation={"held out": tiny.HeldOut()},
                    on_step=(lambda step, state: print("step", step, flush=True),),
                )
            )
    except Preempted as stopped:
        print(stopped, flush=True)
        return EXIT_PREEMPTED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _mirror(url: str, folder: Path, hang: int | None) -> "Mirror":
    """What copies the run, after it has brought here what is there."""
    from affinage.checkpoint.mirror import Mirror, bring_newest
    from affinage.checkpoint.remote import RemoteFolder

    bring_newest(url, folder, print)
    if hang is not None:
        put, left = RemoteFolder.put, iter(range(hang))

        def hanging(remote: RemoteFolder, file: Path, name: str) -> None:
            if next(left, None) is None:
                time.sleep(3600)
            put(remote, file, name)

        RemoteFolder.put = hanging  # type: ignore[method-assign]
    return Mirror(url, folder)


def _signal_in(phase: str, number: int) -> None:
    from phases import BEFORE_STEPS, in_phase

    def signal_now() -> None:
        print(f"signal in {phase}", flush=True)
        os.kill(os.getpid(), number)

    in_phase(phase, signal_now, lasts=phase in BEFORE_STEPS)  # where nothing is saved, it is not waited for


if __name__ == "__main__":
    _main()

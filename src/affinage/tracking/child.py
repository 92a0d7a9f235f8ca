"""A tracker in a process of its own: what its library prints, installs or waits for is nothing to the training."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import affinage
from affinage.tracking.tracker import Ending, TrackedRun


class Child:
    """Hands everything over to `python -m affinage.tracking`, one JSON line each way per call.

    The process has no terminal, is in no group that signals are sent to, and ends a while after this one, whichever
    way this one ends.

    Args:
        name: of the library.
        settings: its own, complete, JSON-able.
        patience: seconds for one answer; then the process is ended.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], *, patience: float = 120.0) -> None:
        self._name, self._settings, self._patience = name, dict(settings), patience

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        package = str(Path(affinage.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "affinage.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries print progress, and what they were told
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        return str(self._ask({"tracker": self._name, "settings": self._settings, "run": run.to_json()})["id"])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._ask({"step": step, "values": dict(values)})

    def finish(self, ending: Ending) -> None:
        """See `Tracker.finish`."""
        self._ask({"ending": ending})
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(self._patience)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise RuntimeError(f"the process of {self._name} has ended") from None
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            self._process.kill()
            raise TimeoutError(f"{self._name} has not answered for {self._patience:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} has ended")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

"""How busy this machine's TPUs are, asked of libtpu in a process of its own.

libtpu's `sdk.tpumonitoring` asks the runtime of whatever process computes on the chips, and holds Python's lock until
it is answered: for minutes where it looks in vain for the cloud that it is in. A thread of the training would stop it.
https://docs.cloud.google.com/tpu/docs/tpu-monitoring-library
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import affinage
from affinage.stopping import PARENT, PARENT_SIGNAL, die_with_parent

_METRIC = "duty_cycle_pct"  # a list of percentages in words, one for each chip
_STALE = 60.0  # seconds after which an answer says nothing of now
_TO_END = 5.0  # seconds
_NICE = 5  # behind the training


class DutyCycle:
    """The share of time in which the chips compute; what is read is the answer to the question before.

    The process is started here, and ends with this object or with this process.
    """

    def __init__(self) -> None:
        package = str(Path(affinage.__file__).parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, PARENT: str(os.getpid())}
        environment.pop(PARENT_SIGNAL, None)  # it has nothing to save
        self._process = subprocess.Popen(
            [sys.executable, "-m", "affinage.hardware.duty_cycle"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libtpu tells of every address where it found nothing
            env=environment,
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._answers, False)
        self._asked = False
        self._share, self._told = math.nan, -math.inf

    def read(self) -> float | None:
        """The mean over the chips, from 0 to 1; None where nothing was told lately. Waits for nothing.

        Raises:
            OSError: the process is gone.
        """
        answered = self._answered()
        if answered is not None:
            self._asked = False
            if answered:
                self._share, self._told = sum(answered) / 100 / len(answered), time.monotonic()
        if not self._asked:
            os.write(self._questions, b"\n")
            self._asked = True
        return self._share if time.monotonic() - self._told < _STALE else None

    def _answered(self) -> list[float] | None:
        """The percentages, in one short line that comes whole; None where there is no answer yet."""
        try:
            line = os.read(self._answers, 65536)
        except BlockingIOError:
            return None
        percentages: list[float] = json.loads(line or b"[]")
        return percentages


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that a broken driver does not let go
        process.wait(timeout=_TO_END)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _main() -> None:
    """Answer every line of standard input with a line of percentages, [] where libtpu tells none."""
    die_with_parent()
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from libtpu import sdk

    for _ in sys.stdin:
        found: list[float] = []
        with contextlib.suppress(Exception):  # the runtime may not answer yet
            found = [float(each) for each in sdk.tpumonitoring.get_metric(_METRIC).data()]
        answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    _main()

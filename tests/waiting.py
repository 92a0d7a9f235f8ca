"""Waiting for what another thread or process does: it polls, with a limit that a busy machine does not meet."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

PATIENCE = 300.0  # seconds
T = TypeVar("T")


def until(true: Callable[[], T], seconds: float = PATIENCE) -> T:
    """What a function returns once that is true."""
    late = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < late
        time.sleep(0.01)
    return found


def python(program: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a program of Python said, and how it ended."""
    how = {"capture_output": True, "text": True, "timeout": PATIENCE, **options}
    return subprocess.run([sys.executable, "-c", program, *words], **how)


def begun(program: str, *words: str, **options: object) -> subprocess.Popen[str]:
    """A program of Python, once it has said `ready`."""
    command = [sys.executable, "-c", program, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    assert process.stdout.readline() == "ready\n"
    return process

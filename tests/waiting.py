"""Waiting for what another thread or process does: it polls, with a limit that a busy machine does not meet."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 300.0  # seconds
T = TypeVar("T")


def until(true: Callable[[], T], seconds: float = PATIENCE) -> T:
    """What a function returns once that is true."""
    late = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < late
        time.sleep(0.01)
    return found

"""How fast this machine's processor multiplies and moves memory, measured: no datasheet says it of all its cores."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_SIDE = 1024
_FLOATS = 8 * 2**20  # 32 MB, more than most caches
_ROUNDS = 5


@cache
def measured_flops() -> float:
    """FLOP/s of a float32 product of 1,024 x 1,024 matrices by NumPy's BLAS: the best of a few; takes 0.2 s or so."""
    left = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), dtype=np.float32)
    return 2 * _SIDE**3 / _least(lambda: left @ left)


@cache
def measured_bandwidth() -> float:
    """Bytes/s read and written by one core that adds two arrays into a third: the best of a few; takes 0.1 s or so."""
    left, right = (np.ones(_FLOATS, np.float32) for _ in range(2))
    total = np.empty_like(left)
    return 3 * left.nbytes / _least(lambda: np.add(left, right, out=total))


def _least(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])

"""How fast this machine's processor multiplies and moves memory, measured: no datasheet says it of all its cores.

Seconds are the processor's own, so that what else runs on the machine hardly counts: the rates are those of idle cores.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import psutil
from threadpoolctl import threadpool_limits

_SIDE = 1024
_FLOATS = 8 * 2**20  # 32 MB, more than most caches
_ROUNDS = 5


@cache
def measured_flops() -> float:
    """FLOP/s of all cores in a float32 product of 1,024 x 1,024 matrices by NumPy's BLAS: the best of a few.

    One thread multiplies: several wait for each other by spinning, and beside other work that is most of their seconds.
    """
    left = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), dtype=np.float32)
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    with threadpool_limits(1, user_api="blas"):
        return 2 * _SIDE**3 / _least(lambda: left @ left) * cores


@cache
def measured_bandwidth() -> float:
    """Bytes/s read and written by one core that adds two arrays into a third: the best of a few."""
    left, right = (np.ones(_FLOATS, np.float32) for _ in range(2))
    total = np.empty_like(left)
    return 3 * left.nbytes / _least(lambda: np.add(left, right, out=total))


def _least(work: Callable[[], Any]) -> float:
    """The processor's seconds."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds[1:])

"""How fast this machine's processor multiplies and moves memory, measured: no datasheet covers all its cores.

Seconds are the processor's own, so that what else runs on the machine hardly counts: the rates are those of idle cores.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIDE = 2048
_FLOATS = 8 * 2**20  # 32 MB, more than most caches
_ROUNDS = 5


@cache
def measured_flops() -> float:
    """Return the FLOP/s of all cores in a float32 product of two square matrices as XLA compiles it."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        left = jnp.ones((_SIDE, _SIDE), jnp.float32)
        product = jax.jit(jnp.matmul)
        return 2 * _SIDE**3 / _best(lambda: product(left, left).block_until_ready()) * (os.cpu_count() or 1)


@cache
def measured_bandwidth() -> float:
    """Return the bytes/s that one core reads and writes when it adds two arrays into a third."""
    left, right, total = (np.ones(_FLOATS, np.float32) for _ in range(3))
    return 3 * left.nbytes / _best(lambda: np.add(left, right, out=total))


def _best(work: Callable[[], Any]) -> float:
    """Return the processor's seconds, of all threads together, in the best of some rounds."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds[1:])

"""How fast this machine's processor multiplies and moves memory, measured: no datasheet says it of all its cores.

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
    """FLOP/s of all cores in a float32 product of 2,048 x 2,048 matrices as XLA compiles it: the best of a few.

    NumPy's BLAS does not know every processor, and its threads spin while they wait for each other.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        left = jnp.ones((_SIDE, _SIDE), jnp.float32)
        product = jax.jit(jnp.matmul)
        return 2 * _SIDE**3 / _least(lambda: product(left, left).block_until_ready()) * (os.cpu_count() or 1)


@cache
def measured_bandwidth() -> float:
    """Bytes/s read and written by one core that adds two arrays into a third: the best of a few."""
    left, right = (np.ones(_FLOATS, np.float32) for _ in range(2))
    total = np.empty_like(left)
    return 3 * left.nbytes / _least(lambda: np.add(left, right, out=total))


def _least(work: Callable[[], Any]) -> float:
    """The processor's seconds, of all threads together."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds[1:])

"""How fast this machine's processor multiplies, measured: no datasheet says it for all its cores together."""

import time

import numpy as np

_SIZE = 1024
_ROUNDS = 5


def measured_flops() -> float:
    """FLOP/s of a float32 product of 1,024 x 1,024 matrices by NumPy's BLAS: the best of a few; takes 0.2 s or so."""
    left = np.random.default_rng(0).standard_normal((_SIZE, _SIZE), dtype=np.float32)
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - start)
    return 2 * _SIZE**3 / min(seconds[1:])

"""How the text kernels are compiled: once per machine, cached on disk, without holding the GIL."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with numba; the machine code is cached where a cache can be written."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return njit(nogil=True)(function)

"""Splash's masks, without looking at every pair of tokens.

Splash asks for the mask of every block of queries and keys, and JAX computes each from its positions: 40 s for rows of
131,072 tokens, at each of two times, before anything is compiled. All but those at an edge are all visible or all
hidden.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask, LocalMask, Mask
from jaxtyping import Bool


class _Band:
    """A query sees itself and the `reach` tokens before it."""

    reach: int

    def __getitem__(self, idx: tuple[slice, slice]) -> Bool[np.ndarray, "Q K"]:
        """The block of these queries and keys."""
        queries, keys = (part.indices(length) for part, length in zip(idx, self.shape))  # type: ignore[attr-defined]
        least, most = queries[0] - (keys[1] - 1), queries[1] - 1 - keys[0]  # tokens that a key stands before a query
        shape = (queries[1] - queries[0], keys[1] - keys[0])
        if most < 0 or least > self.reach:
            return _all_alike(shape, False)
        if least >= 0 and most <= self.reach:
            return _all_alike(shape, True)
        block: Bool[np.ndarray, "Q K"] = super().__getitem__(idx)  # type: ignore[misc]
        return block


class _Causal(_Band, CausalMask):
    def __init__(self, length: int) -> None:
        super().__init__((length, length))
        self.reach = length


class _Window(_Band, LocalMask):
    def __init__(self, length: int, window: int) -> None:
        super().__init__((length, length), (window - 1, 0), 0)
        self.reach = window - 1


def causal_mask(length: int, window: int | None) -> Mask:
    """Of rows so long; with a window a query sees as many tokens, itself among them."""
    return _Causal(length) if window is None else _Window(length, window)


@lru_cache(maxsize=8)
def _all_alike(shape: tuple[int, int], value: bool) -> Any:
    block = np.full(shape, value)
    block.setflags(write=False)
    return block

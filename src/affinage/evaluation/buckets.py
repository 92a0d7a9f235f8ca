"""Which lengths to compile for: every new shape costs a compilation, every padded token costs arithmetic."""

from collections.abc import Sequence

import numpy as np

MULTIPLE = 8  # of which every length is one, for the sake of the hardware


def bucket_lengths(lengths: Sequence[int], *, compile_tokens: float, longest: int) -> list[int]:
    """The ascending bucket lengths that make padded tokens plus compilations cheapest for these rows.

    `lengths` are those of the rows (tokens), `compile_tokens` is what one more compiled shape costs, said as the number
    of tokens that could be scored in the same time. Every bucket is a multiple of MULTIPLE, or `longest`, which no
    row exceeds; the last one holds the longest row. Exact, by dynamic programming over the distinct lengths.
    """
    if not lengths:
        return []
    rounded = np.minimum(-(-np.asarray(lengths) // MULTIPLE) * MULTIPLE, longest)
    sizes, counts = np.unique(rounded, return_counts=True)
    rows_before = np.concatenate([[0], np.cumsum(counts)])
    best, first = np.zeros(len(sizes) + 1), np.zeros(len(sizes), int)
    for last, size in enumerate(sizes):
        costs = best[: last + 1] + (rows_before[last + 1] - rows_before[: last + 1]) * size + compile_tokens
        first[last] = costs.argmin()  # the bucket of `size` takes over the sizes from here on
        best[last + 1] = costs.min()
    buckets, last = [], len(sizes) - 1
    while last >= 0:
        buckets.append(int(sizes[last]))
        last = first[last] - 1
    return buckets[::-1]


def round_up(value: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that is at least `value`."""
    return next(size for size in sizes if size >= value)

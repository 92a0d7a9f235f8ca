"""Rows that begin alike: what they share is computed once, then all their ends at once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from affinage.evaluation.buckets import bucket_lengths
from affinage.evaluation.rows import Row
from affinage.generation.shapes import power_of_two

_SHORTEST = 8  # shared tokens, below which two passes cost more than they save


@dataclass(frozen=True)
class Family:
    """Rows that have all tokens but their last `scored` in common, which are `shared`."""

    shared: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def longest(self) -> int:
        """Tokens in the longest end."""
        return max(row.scored for row in self.rows)


@dataclass(frozen=True)
class FamilyBatch:
    """Families padded to one shape: shared [B, S], lengths [B], and their ends [B*C, T], of `scored` [B*C] tokens.

    The ends of a family follow one another; those that it lacks are one token of padding and None in `rows`.
    """

    rows: tuple[Row | None, ...]
    shared: Int[np.ndarray, "B S"]
    lengths: Int[np.ndarray, "B"]
    ends: Int[np.ndarray, "N T"]
    scored: Int[np.ndarray, "N"]
    candidates: Int[np.ndarray, "N K"]


def find_families(rows: Sequence[Row]) -> tuple[list[Family], list[Row], int]:
    """Families of at most C rows, the rows that are in none, and C: what most families have."""
    alike: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault(row.tokens[: len(row.tokens) - row.scored], []).append(row)
    sizes = Counter(len(some) for shared, some in alike.items() if len(some) > 1 and len(shared) >= _SHORTEST)
    if not sizes:
        return [], list(rows), 1
    size = max(sizes, key=lambda count: (sizes[count] * count, count))
    families: list[Family] = []
    alone: list[Row] = []
    for shared, some in alike.items():
        if len(some) == 1 or len(shared) < _SHORTEST:
            alone += some
            continue
        some = sorted(some, key=lambda row: row.scored)  # so that ends of like length are padded to one another
        for start in range(0, len(some), size):
            part = tuple(some[start : start + size])
            if len(part) == 1:
                alone += part
            else:
                families.append(Family(shared, part))
    return families, alone, size


def batch_families(
    families: Sequence[Family], size: int, batch: int, *, context: int, compile_tokens: float, pad: int, multiple: int
) -> list[FamilyBatch]:
    """Batches of `batch` ends, of few shapes, the longest first. `multiple`: of which the number of families is one."""
    together = max(1, min(batch // size, power_of_two(len(families))))
    together = -(-together // multiple) * multiple
    batches: list[FamilyBatch] = []
    below = 0
    longest_ends = [family.longest for family in families]
    for end in bucket_lengths(longest_ends, compile_tokens=compile_tokens / size, longest=context):
        of_end = [family for family in families if below < family.longest <= end]
        below = end
        under = 0
        lengths = [len(family.shared) for family in of_end]
        for length in bucket_lengths(lengths, compile_tokens=compile_tokens, longest=context):
            inside = sorted(
                (family for family in of_end if under < len(family.shared) <= length),
                key=lambda family: (-len(family.shared), family.shared),
            )
            under = length
            width = power_of_two(max(len(row.candidates) for family in inside for row in family.rows))
            batches += [
                _pad(inside[start : start + together], together, size, (length, end, width), pad)
                for start in range(0, len(inside), together)
            ]
    return sorted(batches, key=lambda one: -one.shared.size - one.ends.size)


def _pad(families: Sequence[Family], together: int, size: int, shape: tuple[int, int, int], pad: int) -> FamilyBatch:
    length, end, width = shape
    shared, lengths = np.full((together, length), pad, np.int32), np.ones(together, np.int32)
    ends, scored = np.full((together * size, end), pad, np.int32), np.ones(together * size, np.int32)
    candidates = np.zeros((together * size, width), np.int32)
    rows: list[Row | None] = [None] * (together * size)
    for index, family in enumerate(families):
        shared[index, : len(family.shared)], lengths[index] = family.shared, len(family.shared)
        for at, row in enumerate(family.rows, index * size):
            rows[at] = row
            ends[at, : row.scored], scored[at] = row.tokens[len(row.tokens) - row.scored :], row.scored
            candidates[at, : len(row.candidates)] = row.candidates
    return FamilyBatch(tuple(rows), shared, lengths, ends, scored, candidates)

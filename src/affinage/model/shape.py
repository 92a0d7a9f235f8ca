"""Shapes of values in a graph, symbolic in batch and sequence, so that nothing is allocated to know them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

BATCH = "B"  # rows of a batch
SEQUENCE = "S"  # tokens of a row


class ShapeMismatch(ValueError):
    """A node was given an input it has no rule for; the message says what it expected."""


@dataclass(frozen=True)
class Shape:
    """Dimensions (`B` and `S` are symbols) and whether the elements are integers, floats or a scalar loss."""

    dims: tuple[int | str, ...]
    dtype: Literal["int", "float"] = "float"

    @property
    def width(self) -> int:
        """The last dimension, which must be known."""
        if not self.dims or not isinstance(self.dims[-1], int):
            raise ShapeMismatch(f"expected an input whose last dimension is its width, got {self}")
        return self.dims[-1]

    def bind(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The dimensions with the symbols replaced, for instance by `{"B": 4, "S": 2048}`."""
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.dims)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Number of elements at these sizes of the symbols."""
        return prod(self.bind(sizes))

    def __str__(self) -> str:
        return "[" + ", ".join(str(d) for d in self.dims) + "]" + (" int" if self.dtype == "int" else "")


TOKENS = Shape((BATCH, SEQUENCE), "int")


def sequence_of(width: int) -> Shape:
    """Shape of a vector of this width at every token: [B, S, width]."""
    return Shape((BATCH, SEQUENCE, width))


def expect_sequence(x: Shape) -> int:
    """Width of an input that must be [B, S, width] floats."""
    if len(x.dims) != 3 or x.dims[:2] != (BATCH, SEQUENCE) or x.dtype != "float":
        raise ShapeMismatch(f"expected an input [B, S, width], got {x}")
    return x.width

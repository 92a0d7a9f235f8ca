"""Declarations of parameters: shape, logical axes and first values, before any array exists."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

# A nested dict with arrays, declarations, axes ... at its leaves. Values differ by use, the nesting does not.
PyTree: TypeAlias = dict[str, Any]
Axes: TypeAlias = tuple[str | None, ...]  # the logical axis of every dimension


@dataclass(frozen=True)
class ParamSpec:
    """One array of a node: its shape, the logical axis of every dimension, and its first values."""

    shape: tuple[int, ...]
    axes: Axes
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02  # of the normal; GPT-2's and Llama's value
    residual: bool = False  # the last projection before a residual sum: std is divided by sqrt(2 * layers) (GPT-2)
    decay: bool = True  # whether weight decay applies: yes for matrices and embeddings, no for norms and biases
    inputs: tuple[int, ...] = ()  # of a hidden layer's matrix, the dimensions that its input is multiplied along
    used: int | None = None  # of the entries along the axis `experts`, how many multiply a token; None: all

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def active(self) -> int:
        """Number of elements that one token uses."""
        return self.size if self.used is None else self.size // self.shape[self.axes.index("experts")] * self.used

    @property
    def outputs(self) -> tuple[int, ...]:
        """Of a hidden layer's matrix, the dimensions of its output; the others count layers and experts."""
        besides = {*self.inputs, *(i for i, axis in enumerate(self.axes) if axis in ("layers", "experts"))}
        return tuple(i for i in range(len(self.shape)) if i not in besides) if self.inputs else ()

    def stacked(self, layers: int) -> "ParamSpec":
        """The same for `layers` copies along a new first axis."""
        inputs = tuple(axis + 1 for axis in self.inputs)
        return replace(self, shape=(layers, *self.shape), axes=("layers", *self.axes), inputs=inputs)

    def draw(self, key: PRNGKeyArray, layers: int, dtype: jnp.dtype) -> Array:
        """First values, drawn in float32 and rounded once to `dtype`."""
        if self.init != "normal":
            return jnp.full(self.shape, float(self.init == "ones"), dtype)
        std = self.std / (2 * layers) ** 0.5 if self.residual else self.std
        return (std * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)


def map_parameters(function: Callable[[tuple[str, ...], ParamSpec], Any], tree: Mapping[str, Any]) -> PyTree:
    """Replaces every declaration in a tree by `function(path, declaration)`."""

    def walk(path: tuple[str, ...], node: Any) -> Any:
        if isinstance(node, ParamSpec):
            return function(path, node)
        return {name: walk((*path, name), child) for name, child in node.items()}

    result: PyTree = walk((), tree)
    return result


def parameters_in(tree: Mapping[str, Any]) -> list[ParamSpec]:
    """All declarations in a tree, in order."""
    found: list[ParamSpec] = []
    map_parameters(lambda _, parameter: found.append(parameter), tree)
    return found

"""Low-rank adapters beside the matrices of a graph (LoRA: Hu et al., 2021, arXiv:2106.09685).

A matrix W [inputs, outputs] gets A [inputs, rank] and B [rank, outputs]: it maps x to x W + alpha / rank * (x A) B. B
begins at zero, so the adapted model begins as the model. The matrices of a mixture's experts have no adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from affinage.config.training import LoraSettings
from affinage.errors import UserError
from affinage.model.layer import ParamSpec, PyTree

if TYPE_CHECKING:
    from affinage.model.graph import Graph

LORA_A, LORA_B = "lora_a", "lora_b"
Path = tuple[str, ...]


@dataclass(frozen=True)
class Adapters:
    """The adapters that settings require, beside the matrices of a graph; a UserError for a target it does not have."""

    graph: "Graph"
    settings: LoraSettings

    def __post_init__(self) -> None:
        known, targets = sorted({path[-1] for path in self._matrices}), self.settings.target_modules
        for name in () if targets == "all" else targets:
            if name not in known:
                fix = f"There are: {', '.join(known)}."
                raise UserError(f"there is no matrix `{name}` for an adapter", where="lora.target_modules", fix=fix)

    @cached_property
    def _matrices(self) -> dict[Path, ParamSpec]:
        """The matrices of hidden layers by the paths they stand in."""
        declared: dict[Path, ParamSpec] = flatten_dict(self.graph.parameters)
        hidden = {path: matrix for path, matrix in declared.items() if path[-1] == "kernel" and matrix.inputs}
        return {path[:-1]: matrix for path, matrix in hidden.items() if "experts" not in matrix.axes}

    @cached_property
    def targets(self) -> tuple[Path, ...]:
        """The paths of the matrices that get an adapter."""
        names = self.settings.target_modules
        return tuple(path for path in self._matrices if names == "all" or path[-1] in names)

    @property
    def depth(self) -> int:
        """As of the graph."""
        return self.graph.depth

    @cached_property
    def parameters(self) -> PyTree:
        """Declarations of A and B, where the matrices are in the graph's; split over a mesh as the matrix is."""
        return unflatten_dict({path: self._declared(self._matrices[path]) for path in self.targets})

    def _declared(self, matrix: ParamSpec) -> PyTree:
        layers, inputs, rank = int(matrix.axes[0] == "layers"), matrix.inputs, self.settings.r  # one stack, or none

        def dims(values: tuple[Any, ...], which: tuple[int, ...]) -> tuple[Any, ...]:
            return tuple(values[i] for i in which)

        into, out = (*range(layers), *inputs), matrix.outputs
        a_shape, a_axes = (*dims(matrix.shape, into), rank), (*dims(matrix.axes, into), None)
        b_shape = (*matrix.shape[:layers], rank, *dims(matrix.shape, out))
        b_axes = (*matrix.axes[:layers], None, *dims(matrix.axes, out))
        # The variance of PyTorch's own initialization of a linear layer, which the paper's code and PEFT take.
        std = (3 * prod(dims(matrix.shape, inputs))) ** -0.5
        a = ParamSpec(a_shape, a_axes, std=std, inputs=tuple(range(layers, layers + len(inputs))))
        return {LORA_A: a, LORA_B: ParamSpec(b_shape, b_axes, init="zeros", inputs=(layers,))}

    def beside(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The tree that the graph is applied to, with the adapters beside the matrices and the scale in them."""
        scale = self.settings.alpha / self.settings.r
        return self._changed(weights, adapters, lambda _, w, a, b: {"kernel": w, LORA_A: a, LORA_B: b * scale})

    def merged(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The weights with the adapters added to them, in float32 and then in the weights' own dtype."""
        scale, product = self.settings.alpha / self.settings.r, partial(jnp.tensordot, axes=1, precision="highest")

        def add(matrix: ParamSpec, *arrays: Any) -> PyTree:
            of_layers = jax.vmap(product) if matrix.axes[0] == "layers" else product
            kernel, a, b = (array.astype(jnp.float32) for array in arrays)
            return {"kernel": (kernel + scale * of_layers(a, b)).astype(arrays[0].dtype)}

        return self._changed(weights, adapters, add)

    def _changed(self, weights: PyTree, adapters: PyTree, change: Callable[..., PyTree]) -> PyTree:
        arrays, trained = flatten_dict(weights, keep_empty_nodes=True), flatten_dict(adapters)
        for path in self.targets:
            if path[0] in weights:
                three = arrays[*path, "kernel"], trained[*path, LORA_A], trained[*path, LORA_B]
                arrays |= {(*path, name): array for name, array in change(self._matrices[path], *three).items()}
        return unflatten_dict(arrays)

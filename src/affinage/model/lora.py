"""Low-rank adapters beside the matrices of a graph (LoRA: Hu et al., 2021, arXiv:2106.09685).

A matrix W [inputs, outputs] gets A [inputs, rank] and B [rank, outputs]: it maps x to x W + alpha / rank * (x A) B. B
begins at zero, so the adapted model begins as the model. The matrices of a mixture's experts have no adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from affinage.config.training import LoraSettings
from affinage.errors import UserError
from affinage.model.parameter import ParamSpec, PyTree, map_parameters

if TYPE_CHECKING:
    from affinage.model.graph import Graph

LORA_A, LORA_B = "lora_a", "lora_b"
LORA_SITE = "lora_site"  # keeps the masks of dropout apart; in trees that the graph is applied to, where there is any
_FIRST_SITE = 100  # after those of the blocks
Path = tuple[str, ...]


@dataclass(frozen=True)
class Adapters:
    """The adapters that settings require, beside the matrices of a graph.

    Raises:
        UserError: for a target that is no matrix of the graph.
    """

    graph: "Graph"
    settings: LoraSettings

    def __post_init__(self) -> None:
        known, targets = sorted({path[-1] for path in self._matrices}), self.settings.target_modules
        unknown = [] if targets == "all" else [name for name in targets if name not in known]
        if unknown or not known:
            raise UserError(
                f"there is no matrix `{unknown[0]}` for an adapter" if unknown else "no matrix can have an adapter",
                where="lora.target_modules",
                fix=f"There are: {', '.join(known)}." if known else "Leave out `lora`.",
            )

    @cached_property
    def _matrices(self) -> dict[Path, ParamSpec]:
        """The matrices of hidden layers by the paths they stand in."""
        matrices: dict[Path, ParamSpec] = {}

        def note(path: Path, parameter: ParamSpec) -> None:
            if path[-1] == "kernel" and parameter.inputs and "experts" not in parameter.axes:
                matrices[path[:-1]] = parameter

        map_parameters(note, self.graph.parameters)
        return matrices

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
        tree: PyTree = {}
        for path in self.targets:
            _put(tree, path, self._declared(self._matrices[path]))
        return tree

    def _declared(self, matrix: ParamSpec) -> PyTree:
        layers, inputs, rank = _layers(matrix), matrix.inputs, self.settings.r

        def dims(which: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
            return tuple(matrix.shape[i] for i in which), tuple(matrix.axes[i] for i in which)

        (stack, stack_axes), (out, out_axes) = dims(layers), dims(matrix.outputs)
        into, into_axes = dims((*layers, *inputs))
        # The variance of PyTorch's own initialization of a linear layer, which the paper's code and PEFT take.
        std = (3 * prod(dims(inputs)[0])) ** -0.5
        contracted = tuple(range(len(layers), len(layers) + len(inputs)))
        a = ParamSpec((*into, rank), (*into_axes, None), std=std, inputs=contracted)
        b = ParamSpec((*stack, rank, *out), (*stack_axes, None, *out_axes), init="zeros", inputs=(len(layers),))
        return {LORA_A: a, LORA_B: b}

    def beside(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The tree that the graph is applied to, with the adapters beside the matrices and the scale in them.

        Both trees may have some of the nodes only, the same ones.
        """
        scale = self.settings.alpha / self.settings.r

        def with_adapter(path: Path, site: int, matrix: PyTree, adapter: PyTree) -> PyTree:
            pair = {LORA_A: adapter[LORA_A], LORA_B: adapter[LORA_B] * scale}
            if self.settings.dropout:
                layers = matrix["kernel"].shape[: len(_layers(self._matrices[path]))]
                pair[LORA_SITE] = jnp.full(layers, _FIRST_SITE + site, jnp.int32)
            return matrix | pair

        return self._changed(weights, adapters, with_adapter)

    def merged(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The weights with the adapters added to them, in float32 and then in the weights' own dtype."""
        scale = self.settings.alpha / self.settings.r

        def product(a: Any, b: Any) -> Any:
            return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)

        def add(path: Path, site: int, matrix: PyTree, adapter: PyTree) -> PyTree:
            of_layers = jax.vmap(product) if _layers(self._matrices[path]) else product
            a, b, kernel = (array.astype(jnp.float32) for array in (adapter[LORA_A], adapter[LORA_B], matrix["kernel"]))
            return matrix | {"kernel": (kernel + scale * of_layers(a, b)).astype(matrix["kernel"].dtype)}

        return self._changed(weights, adapters, add)

    def _changed(self, weights: PyTree, adapters: PyTree, change: Callable[..., PyTree]) -> PyTree:
        tree = jax.tree.map(lambda leaf: leaf, weights)  # new dicts, the same arrays
        for site, path in enumerate(self.targets):
            if path[0] in weights:
                _put(tree, path, change(path, site, _at(weights, path), _at(adapters, path)))
        return tree


def _layers(matrix: ParamSpec) -> tuple[int, ...]:
    """The dimensions, one or none, along which the matrices of layers lie side by side."""
    return tuple(i for i, axis in enumerate(matrix.axes) if axis == "layers")


def _at(tree: PyTree, path: Path) -> PyTree:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: PyTree, path: Path, value: PyTree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value

"""Low-rank adapters beside the matrices of a graph (LoRA: Hu et al., 2021, arXiv:2106.09685).

A matrix W [inputs, outputs] gets A [inputs, rank] and B [rank, outputs]: it maps x to x W + alpha / rank * (x A) B. B
begins at zero, so the adapted model begins as the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from affinage.errors import UserError
from affinage.model.parameter import Parameter, Tree, map_parameters
from affinage.recipe.tuning import LoraSettings

if TYPE_CHECKING:
    from affinage.model.graph import Graph

LORA_A, LORA_B = "lora_a", "lora_b"
LORA_SITE = "lora_site"  # tells the masks of dropout apart; in trees that the graph is applied to, where there is any
_FIRST_SITE = 100  # after those of the blocks


@dataclass(frozen=True)
class Adapters:
    """The adapters that settings ask for, beside the matrices of a graph.

    Raises:
        UserError: a target that is no matrix of the graph.
    """

    graph: "Graph"
    settings: LoraSettings

    def __post_init__(self) -> None:
        names = {path[-2] for path in self._matrices}
        targets = self.settings.targets
        unknown = [] if targets == "all" else [name for name in targets if name not in names]
        if unknown or not names:
            raise UserError(
                f"there is no matrix called `{unknown[0]}`" if unknown else "the model has no matrix for an adapter",
                where="lora.targets",
                fix=f"There are: {', '.join(sorted(names))}." if names else "Leave out `lora`.",
            )

    @cached_property
    def _matrices(self) -> dict[tuple[str, ...], Parameter]:
        """The matrices of hidden layers that every token is multiplied by, by their paths."""
        found: dict[tuple[str, ...], Parameter] = {}

        def note(path: tuple[str, ...], parameter: Parameter) -> None:
            if path[-1] == "kernel" and parameter.inputs and "experts" not in parameter.axes:
                found[path] = parameter

        map_parameters(note, self.graph.parameters)
        return found

    @cached_property
    def targets(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the matrices that get an adapter."""
        wanted = self.settings.targets
        return tuple(path[:-1] for path in self._matrices if wanted == "all" or path[-2] in wanted)

    @property
    def depth(self) -> int:
        """As of the graph."""
        return self.graph.depth

    @cached_property
    def parameters(self) -> Tree:
        """Declarations of A and B, where the matrices are in the graph's; split over a mesh as the matrix is."""
        tree: Tree = {}
        for path in self.targets:
            _put(tree, path, self._declared(self._matrices[(*path, "kernel")]))
        return tree

    def _declared(self, matrix: Parameter) -> Tree:
        stacked = [i for i, axis in enumerate(matrix.axes) if axis == "layers"]
        inputs, outputs, rank = matrix.inputs, matrix.outputs, self.settings.rank

        def of(which: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
            return tuple(matrix.shape[i] for i in which), tuple(matrix.axes[i] for i in which)

        (layers, layer_axes), (wide, wide_axes), (out, out_axes) = of(tuple(stacked)), of(inputs), of(outputs)
        first = len(layers)
        return {
            # The variance of PyTorch's own initialisation of a linear layer, which the paper's code and PEFT take.
            LORA_A: Parameter(
                (*layers, *wide, rank),
                (*layer_axes, *wide_axes, None),
                std=(3 * prod(wide)) ** -0.5,
                inputs=tuple(range(first, first + len(wide))),
            ),
            LORA_B: Parameter((*layers, rank, *out), (*layer_axes, None, *out_axes), init="zeros", inputs=(first,)),
        }

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.settings.alpha / self.settings.rank

    def beside(self, weights: Tree, adapters: Tree) -> Tree:
        """The tree that the graph is applied to, with the adapters beside the matrices and the scale in them."""

        def with_adapter(site: int, matrix: Tree, adapter: Tree) -> Tree:
            told = {**matrix, LORA_A: adapter[LORA_A], LORA_B: adapter[LORA_B] * self.scale}
            if self.settings.dropout:
                layers = matrix["kernel"].shape[: self._stacked(site)]
                told[LORA_SITE] = jnp.full(layers, _FIRST_SITE + site, jnp.int32)
            return told

        return self._changed(weights, adapters, with_adapter)

    def merged(self, weights: Tree, adapters: Tree) -> Tree:
        """The weights with the adapters added to them, in float32 and then in the weights' own dtype."""

        def add(site: int, matrix: Tree, adapter: Tree) -> Tree:
            a, b = (adapter[name].astype(jnp.float32) for name in (LORA_A, LORA_B))
            product = _per_layer(self._stacked(site))(a, b)
            kernel = matrix["kernel"]
            return {**matrix, "kernel": (kernel.astype(jnp.float32) + self.scale * product).astype(kernel.dtype)}

        return self._changed(weights, adapters, add)

    def _stacked(self, site: int) -> int:
        return int("layers" in self._matrices[(*self.targets[site], "kernel")].axes)

    def _changed(self, weights: Tree, adapters: Tree, change: Callable[[int, Tree, Tree], Tree]) -> Tree:
        tree = jax.tree.map(lambda leaf: leaf, weights)  # new dicts, the same arrays
        for site, path in enumerate(self.targets):
            _put(tree, path, change(site, _at(weights, path), _at(adapters, path)))
        return tree


def _per_layer(stacked: int) -> Callable[[Any, Any], Any]:
    def product(a: Any, b: Any) -> Any:
        return jnp.tensordot(a, b, axes=1, precision="highest")

    return jax.vmap(product) if stacked else product


def _at(tree: Tree, path: tuple[str, ...]) -> Tree:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: Tree, path: tuple[str, ...], value: Tree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value

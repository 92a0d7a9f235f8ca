"""Low-rank adapters beside the matrices of a graph (LoRA: Hu et al., 2021, arXiv:2106.09685).

A matrix W [inputs, outputs] gets A [inputs, rank] and B [rank, outputs]: it maps x to x W + alpha / rank * (x A) B. B
begins at zero, so the adapted model begins as the model. Of a mixture every expert's matrix gets a pair of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from affinage.config.tuning import LoraSettings
from affinage.errors import UserError
from affinage.model.parameter import ParamSpec, PyTree, map_parameters

if TYPE_CHECKING:
    from affinage.model.graph import Graph

LORA_A, LORA_B = "lora_a", "lora_b"
LORA_SITE = "lora_site"  # tells the masks of dropout apart; in trees that the graph is applied to, where there is any
_FIRST_SITE = 100  # after those of the blocks
# What transformers, and so PEFT, config the same matrices.
_THEIRS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
_THEIRS |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_STACKED = ("layers", "experts")  # axes along which matrices lie side by side


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
        targets = self.settings.target_modules
        unknown = [] if targets == "all" else [name for name in targets if name not in names]
        if unknown or not names:
            raise UserError(
                f"there is no matrix called `{unknown[0]}`" if unknown else "the model has no matrix for an adapter",
                where="lora.target_modules",
                fix=f"There are: {', '.join(sorted(names))}.{_in_our_words(unknown)}" if names else "Leave out `lora`.",
            )
        if not self.targets:
            experts = ", ".join(sorted(names))
            raise UserError(
                "all matrices of the model are experts', which get an adapter by their names only",
                where="lora.target_modules",
                fix=f"Name those that are to have one: target_modules=[{experts}].",
            )
        if self.settings.dropout and self.of_experts:
            names = {path[-1] for path in self.of_experts}
            raise UserError(
                "adapters of experts have no dropout: its masks would depend on where a token's expert lies",
                where="lora.dropout",
                fix=f"Set it to 0, or leave {', '.join(sorted(names))} out of `target_modules`.",
            )

    @cached_property
    def _matrices(self) -> dict[tuple[str, ...], ParamSpec]:
        """The matrices of hidden layers by their paths; a mixture's experts have one together."""
        found: dict[tuple[str, ...], ParamSpec] = {}

        def note(path: tuple[str, ...], parameter: ParamSpec) -> None:
            if path[-1] == "kernel" and parameter.inputs:
                found[path] = parameter

        map_parameters(note, self.graph.parameters)
        return found

    @cached_property
    def targets(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the matrices that get an adapter; experts' do if they are named."""
        wanted = self.settings.target_modules
        return tuple(
            path[:-1]
            for path, matrix in self._matrices.items()
            if (path[-2] in wanted if wanted != "all" else "experts" not in matrix.axes)
        )

    @cached_property
    def of_experts(self) -> tuple[tuple[str, ...], ...]:
        """Those of `targets` that are experts'."""
        return tuple(path for path in self.targets if "experts" in self._matrices[(*path, "kernel")].axes)

    @property
    def depth(self) -> int:
        """As of the graph."""
        return self.graph.depth

    @cached_property
    def parameters(self) -> PyTree:
        """Declarations of A and B, where the matrices are in the graph's; split over a mesh as the matrix is."""
        tree: PyTree = {}
        for path in self.targets:
            _put(tree, path, self._declared(self._matrices[(*path, "kernel")]))
        return tree

    def _declared(self, matrix: ParamSpec) -> PyTree:
        stacked = [i for i, axis in enumerate(matrix.axes) if axis in _STACKED]
        inputs, outputs, rank = matrix.inputs, matrix.outputs, self.settings.r

        def of(which: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
            return tuple(matrix.shape[i] for i in which), tuple(matrix.axes[i] for i in which)

        (copies, copy_axes), (wide, wide_axes), (out, out_axes) = of(tuple(stacked)), of(inputs), of(outputs)
        first = len(copies)
        return {
            # The variance of PyTorch's own initialisation of a linear layer, which the paper's code and PEFT take.
            LORA_A: ParamSpec(
                (*copies, *wide, rank),
                (*copy_axes, *wide_axes, None),
                std=(3 * prod(wide)) ** -0.5,
                inputs=tuple(range(first, first + len(wide))),
                used=matrix.used,
            ),
            LORA_B: ParamSpec(
                (*copies, rank, *out), (*copy_axes, None, *out_axes), init="zeros", inputs=(first,), used=matrix.used
            ),
        }

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.settings.alpha / self.settings.r

    def beside(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The tree that the graph is applied to, with the adapters beside the matrices and the scale in them.

        Both trees may have some of the nodes only, the same ones.
        """

        def with_adapter(site: int, matrix: PyTree, adapter: PyTree) -> PyTree:
            told = {**matrix, LORA_A: adapter[LORA_A], LORA_B: adapter[LORA_B] * self.scale}
            if self.settings.dropout:
                layers = matrix["kernel"].shape[: self._stacked(site)]
                told[LORA_SITE] = jnp.full(layers, _FIRST_SITE + site, jnp.int32)
            return told

        return self._changed(weights, adapters, with_adapter)

    def merged(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The weights with the adapters added to them, in float32 and then in the weights' own dtype."""

        def add(site: int, matrix: PyTree, adapter: PyTree) -> PyTree:
            a, b = (adapter[name].astype(jnp.float32) for name in (LORA_A, LORA_B))
            product = _per_copy(self._stacked(site))(a, b)
            kernel = matrix["kernel"]
            return {**matrix, "kernel": (kernel.astype(jnp.float32) + self.scale * product).astype(kernel.dtype)}

        return self._changed(weights, adapters, add)

    def _stacked(self, site: int) -> int:
        return sum(axis in _STACKED for axis in self._matrices[(*self.targets[site], "kernel")].axes)

    def _changed(self, weights: PyTree, adapters: PyTree, change: Callable[[int, PyTree, PyTree], PyTree]) -> PyTree:
        tree = jax.tree.map(lambda leaf: leaf, weights)  # new dicts, the same arrays
        for site, path in enumerate(self.targets):
            if path[0] not in weights:
                continue
            _put(tree, path, change(site, _at(weights, path), _at(adapters, path)))
        return tree


def _per_copy(stacked: int) -> Callable[[Any, Any], Any]:
    def product(a: Any, b: Any) -> Any:
        return jnp.tensordot(a, b, axes=1, precision="highest")

    for _ in range(stacked):
        product = jax.vmap(product)
    return product


def _at(tree: PyTree, path: tuple[str, ...]) -> PyTree:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: PyTree, path: tuple[str, ...], value: PyTree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _in_our_words(theirs: list[str]) -> str:
    known = [f"`{name}` is `{_THEIRS[name]}` here" for name in theirs if name in _THEIRS]
    return f" {', '.join(known)}." if known else ""

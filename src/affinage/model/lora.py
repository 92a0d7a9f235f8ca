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

from affinage.config.training import LoraSettings
from affinage.errors import UserError
from affinage.model.parameter import ParamSpec, PyTree, map_parameters

if TYPE_CHECKING:
    from affinage.model.graph import Graph

LORA_A, LORA_B = "lora_a", "lora_b"
LORA_SITE = "lora_site"  # keeps the masks of dropout apart; in trees that the graph is applied to, where there is any
_FIRST_SITE = 100  # after those of the blocks
# What transformers, and so PEFT, call the same matrices.
_THEIRS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
_THEIRS |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
Path = tuple[str, ...]


def _stacked(matrix: ParamSpec) -> tuple[int, ...]:
    """The dimensions along which matrices lie side by side."""
    return tuple(i for i, axis in enumerate(matrix.axes) if axis in ("layers", "experts"))


@dataclass(frozen=True)
class Adapters:
    """The adapters that settings ask for, beside the matrices of a graph.

    Raises:
        UserError: a target that is no matrix of the graph, or experts' with dropout.
    """

    graph: "Graph"
    settings: LoraSettings

    def __post_init__(self) -> None:
        known, targets = sorted({path[-1] for path in self._matrices}), self.settings.target_modules
        unknown = [] if targets == "all" else [name for name in targets if name not in known]
        if unknown or not known:
            ours = [f" `{name}` is `{_THEIRS[name]}` here." for name in unknown if name in _THEIRS]
            raise UserError(
                f"there is no matrix called `{unknown[0]}`" if unknown else "the model has no matrix for an adapter",
                where="lora.target_modules",
                fix=f"There are: {', '.join(known)}.{''.join(ours)}" if known else "Leave out `lora`.",
            )
        if not self.targets:
            raise UserError(
                "all matrices of the model are experts', which get an adapter by their names only",
                where="lora.target_modules",
                fix=f"Name those that are to have one: target_modules=[{', '.join(known)}].",
            )
        if self.settings.dropout and self.of_experts:
            names = ", ".join(sorted({path[-1] for path in self.of_experts}))
            raise UserError(
                "adapters of experts have no dropout: its masks would depend on where a token's expert lies",
                where="lora.dropout",
                fix=f"Set it to 0, or leave {names} out of `target_modules`.",
            )

    @cached_property
    def _matrices(self) -> dict[Path, ParamSpec]:
        """The matrices of hidden layers by the paths they stand in; a mixture's experts have one together."""
        found: dict[Path, ParamSpec] = {}

        def note(path: Path, parameter: ParamSpec) -> None:
            if path[-1] == "kernel" and parameter.inputs:
                found[path[:-1]] = parameter

        map_parameters(note, self.graph.parameters)
        return found

    @cached_property
    def targets(self) -> tuple[Path, ...]:
        """The paths of the matrices that get an adapter; experts' do if they are named."""
        names = self.settings.target_modules
        found = self._matrices.items()
        return tuple(p for p, m in found if (p[-1] in names if names != "all" else "experts" not in m.axes))

    @cached_property
    def of_experts(self) -> tuple[Path, ...]:
        """Those of `targets` that are experts'."""
        return tuple(path for path in self.targets if "experts" in self._matrices[path].axes)

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
        copies, rank, used = _stacked(matrix), self.settings.r, matrix.used

        def of(which: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
            return tuple(matrix.shape[i] for i in which), tuple(matrix.axes[i] for i in which)

        (first, first_axes), (wide, wide_axes), (out, out_axes) = of(copies), of(matrix.inputs), of(matrix.outputs)
        inputs = tuple(range(len(first), len(first) + len(wide)))
        # The variance of PyTorch's own initialization of a linear layer, which the paper's code and PEFT take.
        a = ParamSpec((*first, *wide, rank), (*first_axes, *wide_axes, None), std=(3 * prod(wide)) ** -0.5,
                      inputs=inputs, used=used)  # fmt: skip
        b = ParamSpec((*first, rank, *out), (*first_axes, None, *out_axes), init="zeros", inputs=inputs[:1], used=used)
        return {LORA_A: a, LORA_B: b}

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.settings.alpha / self.settings.r

    def beside(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The tree that the graph is applied to, with the adapters beside the matrices and the scale in them.

        Both trees may have some of the nodes only, the same ones.
        """

        def with_adapter(path: Path, site: int, matrix: PyTree, adapter: PyTree) -> PyTree:
            pair = {LORA_A: adapter[LORA_A], LORA_B: adapter[LORA_B] * self.scale}
            if self.settings.dropout:
                layers = matrix["kernel"].shape[: len(_stacked(self._matrices[path]))]
                pair[LORA_SITE] = jnp.full(layers, _FIRST_SITE + site, jnp.int32)
            return matrix | pair

        return self._changed(weights, adapters, with_adapter)

    def merged(self, weights: PyTree, adapters: PyTree) -> PyTree:
        """The weights with the adapters added to them, in float32 and then in the weights' own dtype."""

        def add(path: Path, site: int, matrix: PyTree, adapter: PyTree) -> PyTree:
            def product(a: Any, b: Any) -> Any:
                return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)

            for _ in _stacked(self._matrices[path]):
                product = jax.vmap(product)
            a, b, kernel = (array.astype(jnp.float32) for array in (adapter[LORA_A], adapter[LORA_B], matrix["kernel"]))
            return matrix | {"kernel": (kernel + self.scale * product(a, b)).astype(matrix["kernel"].dtype)}

        return self._changed(weights, adapters, add)

    def _changed(self, weights: PyTree, adapters: PyTree, change: Callable[..., PyTree]) -> PyTree:
        tree = jax.tree.map(lambda leaf: leaf, weights)  # new dicts, the same arrays
        for site, path in enumerate(self.targets):
            if path[0] in weights:
                _put(tree, path, change(path, site, _at(weights, path), _at(adapters, path)))
        return tree


def _at(tree: PyTree, path: Path) -> PyTree:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: PyTree, path: Path, value: PyTree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value

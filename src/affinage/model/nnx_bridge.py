"""A graph as a Flax NNX module, and back: for NNX's transformations, optimizers and checkpoints.

The plain tree of parameters stays the contract of this package. Each node becomes a submodule whose leaves are
`nnx.Param`, with the logical axes of the arrays as their sharding names.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from affinage.model.apply_config import ApplyConfig
from affinage.model.forward import Outputs, apply, logical_axes
from affinage.model.graph import Graph
from affinage.model.parameter import PyTree


class GraphModule(nnx.Module):
    """A graph with its parameters, `nodes`: {node name: nested dict of nnx.Param}; calling it applies the graph."""

    def __init__(self, graph: Graph, nodes: Mapping[str, Any]) -> None:
        self.graph = nnx.static(graph)
        self.nodes = nnx.data(dict(nodes))

    def __call__(self, batch: Mapping[str, Array], config: ApplyConfig | None = None) -> Outputs:
        """Values of the graph's nodes, see `affinage.model.apply`."""
        return apply(self.graph, from_nnx(self), batch, config or ApplyConfig())


def to_nnx(graph: Graph, params: PyTree, mesh: Mesh | None = None) -> GraphModule:
    """The module of a graph with these parameters, whose arrays are shared, not copied.

    The metadata `logical_axes` of each nnx.Param names the dimensions of its array. With a `mesh` the shardings that
    the parameters have on it become theirs in NNX, too.
    """

    def param(array: Array, axes: tuple[str | None, ...]) -> Any:
        spec = array.sharding.spec if isinstance(array.sharding, jax.sharding.NamedSharding) else ()
        sharding: dict[str, Any] = {} if mesh is None else {"out_sharding": tuple(spec), "mesh": mesh}
        return nnx.Param(array, logical_axes=axes, **sharding)

    return GraphModule(graph, jax.tree.map(param, params, logical_axes(graph)))


def from_nnx(module: GraphModule) -> PyTree:
    """The plain tree of a module's parameters, for `apply`, checkpoints and exports."""
    tree: PyTree = jax.tree.map(
        lambda leaf: leaf[...], module.nodes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    return tree

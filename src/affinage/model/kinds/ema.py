"""Branches that no gradient reaches: a copy of other nodes that follows them slowly, and the stop itself."""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

import jax
from jaxtyping import Array
from pydantic import BeforeValidator, Field, PrivateAttr
from typing_extensions import override

from affinage.model.kind import Context, Cost, NodeKind, node_kind
from affinage.model.node import Node
from affinage.model.parameter import Tree, stacked
from affinage.model.repeat import apply_node
from affinage.model.shape import Shape


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


@node_kind("ema_copy")
class EmaCopy(NodeKind):
    """The nodes of a chain, applied with an exponential moving average of their parameters (BYOL's target network).

    After every update average = decay * average + (1 - decay) * parameter, beginning with the parameters themselves.
    """

    of: Annotated[tuple[str, ...], BeforeValidator(_one_or_more, json_schema_input_type=str | tuple[str, ...])] = Field(
        min_length=1
    )
    """Nodes, first to last."""
    decay: float = Field(default=0.99, ge=0, le=1)
    """Kept per step; BYOL: 0.996 over 1,000 epochs, less for short runs."""
    _copied: tuple[Node, ...] = PrivateAttr(default=())
    constant = True

    @override
    def bind(self, nodes: Mapping[str, Node]) -> Self:
        for name in self.of:
            if name not in nodes:
                raise ValueError(f"of: `{name}` is not a node")
            kind = nodes[name].kind
            if len(kind.takes) != 1 or kind.shares or isinstance(kind, EmaCopy):
                raise ValueError(f"of: `{name}` is a {kind.kind_name}, which cannot be copied")
        bound = self.model_copy()
        bound._copied = tuple(nodes[name] for name in self.of)
        return bound

    @property
    @override
    def average_decay(self) -> float:
        return self.decay

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        return self._chain(inputs[0])[-1]

    @override
    def averages(self, inputs: tuple[Shape, ...]) -> Tree:
        tree: Tree = {}
        for node, given in zip(self._copied, self._chain(inputs[0])[:-1], strict=True):
            if own := node.kind.parameters((given,)):
                tree[node.name] = own if node.repeat is None else stacked(own, node.repeat)
        return tree

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Array:
        if context.averages is None:
            raise ValueError("a graph with moving averages is applied with them: Call(averages=...)")
        (x,) = inputs
        x = jax.lax.stop_gradient(x)
        for node in self._copied:
            key = None if context.key is None else jax.random.fold_in(context.key, zlib.crc32(node.name.encode()))
            within = replace(context, key=key, cache=None, averages=None)
            x = apply_node(node, context.averages.get(node.name, {}), (x,), within).value
        return x

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        given = self._chain(inputs[0])[:-1]
        costs = [node.kind.cost((x,), sizes) * node.layers for node, x in zip(self._copied, given, strict=True)]
        return replace(sum(costs, Cost()), of_input=0)

    def _chain(self, x: Shape) -> list[Shape]:
        """Shapes before and after every copied node."""
        shapes = [x]
        for node in self._copied:
            shapes.append(node.kind.shape((shapes[-1],)))
        return shapes


@node_kind("stop_gradient")
class StopGradient(NodeKind):
    """The value itself, as a constant for whatever is trained."""

    constant = True

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        return inputs[0]

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Any:
        return jax.lax.stop_gradient(inputs[0])

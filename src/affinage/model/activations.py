"""What a training step keeps of the forward pass for the backward pass, known by tracing shapes alone.

Kept is what JAX's differentiation hands from one pass to the other and is no parameter: intermediate values, and a
node's inputs where the gradient reads them. Copies of the weights in the compute dtype are among them, and so are masks
and rotary tables, once for all layers of a node. Nodes that no gradient goes through keep nothing. XLA may keep less,
by computing cheap values again, never more.

    none    every such value
    block   of a repeated node only the input of every layer (`Call.remat = jax.checkpoint`); of other nodes as in none
    full    of every node its inputs alone, a repeated node's layers included
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal as Constant

from affinage.model.call import Call
from affinage.model.graph import Graph
from affinage.model.kind import Context, Result
from affinage.model.node import Node
from affinage.model.parameter import Parameter, Tree, map_parameters
from affinage.model.shape import BATCH, SEQUENCE

Policy = Literal["none", "block", "full"]
POLICIES: tuple[Policy, ...] = ("none", "block", "full")


@dataclass(frozen=True)
class NodeActivations:
    """Bytes of one node, all its layers together."""

    name: str
    kept: int  # from the forward to the backward pass
    recomputed: int  # at once in the backward pass, on top: one layer's values (block) or all of the node's (full)


@dataclass(frozen=True)
class _Residuals:
    inputs: int  # bytes of the inputs
    inputs_read: int  # of these, what the gradient reads
    shared: int  # the same for all layers
    own: int  # of one layer

    def of(self, layers: int) -> int:
        """Of so many layers."""
        return layers * (self.inputs_read + self.own) + self.shared


class _Given(NamedTuple):
    """What a node is applied to, as shapes."""

    params: Tree
    shared: Tree | None
    averages: Tree | None
    inputs: tuple[Any, ...]


def activations(
    graph: Graph, batch: int, context: int, policy: Policy, *, dtype: Any = jnp.bfloat16, platform: str = "tpu"
) -> tuple[NodeActivations, ...]:
    """Bytes for `batch` rows of `context` tokens, with float32 weights computed with in `dtype`; allocates nothing."""
    call = Call(compute_dtype=jnp.dtype(dtype), platform=platform, key=jax.random.key(0))
    arrays = batch_shapes(graph, batch, context)
    values: dict[str, Any] = {name: arrays[name] for name, _ in graph.inputs}
    found = []
    for node in graph.nodes:
        given = _Given(
            params=_abstract(node.kind.parameters(graph.input_shapes(node))),
            shared=_abstract(graph.parameters[node.kind.shares]) if node.kind.shares else None,
            averages=_abstract(graph.averages[node.name]) if node.name in graph.averages else None,
            inputs=tuple(values[name] for name in node.inputs),
        )
        values[node.name] = jax.eval_shape(partial(_value, node, call), given, arrays)
        if node.name in graph.differentiated:
            moving = tuple(name in graph.differentiated for name in node.inputs)
            found.append(_by_policy(node, policy, partial(_residuals, node, call, moving, given, arrays)))
        else:
            found.append(NodeActivations(node.name, 0, 0))
    return tuple(found)


def _by_policy(node: Node, policy: Policy, residuals: Callable[..., _Residuals]) -> NodeActivations:
    plain = residuals()
    if policy == "full":
        return NodeActivations(node.name, plain.inputs, plain.of(node.layers) - plain.inputs_read)
    if policy == "block" and node.repeat is not None:
        return NodeActivations(node.name, residuals(remat=jax.checkpoint).of(node.layers), plain.own)
    return NodeActivations(node.name, plain.of(node.layers), 0)


def batch_shapes(graph: Graph, batch: int, context: int) -> dict[str, Any]:
    """The arrays of a batch, as shapes: the graph's inputs and what the feed gives beside them."""
    sizes, dtypes = {BATCH: batch, SEQUENCE: context}, {"float": jnp.float32, "int": jnp.int32}
    arrays = {name: jax.ShapeDtypeStruct(shape.bind(sizes), dtypes[shape.dtype]) for name, shape in graph.inputs}
    arrays["rows"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if "tokens" in arrays:
        arrays |= dict.fromkeys(("segment_ids", "positions"), arrays["tokens"])
        arrays["loss_mask"] = jax.ShapeDtypeStruct((batch, context), jnp.float32)
    return arrays


def _value(node: Node, call: Call, given: _Given, arrays: Mapping[str, Any]) -> Any:
    context = Context(call, arrays, key=call.key, shared=given.shared, averages=given.averages)
    prepared = node.kind.prepare(given.inputs, context)
    return _result(node, given, replace(context, prepared=prepared)).value


def _result(node: Node, given: _Given, context: Context) -> Result:
    result = node.kind.apply(given.params, given.inputs, context)
    return result if isinstance(result, Result) else Result(result)


def _residuals(
    node: Node,
    call: Call,
    moving: tuple[bool, ...],
    given: _Given,
    arrays: Mapping[str, Any],
    remat: Callable[..., Any] = lambda function: function,
) -> _Residuals:
    """Of one layer; `moving` says which inputs a gradient is due to: nothing is kept for that of a constant."""

    def passes(given: _Given, arrays: Mapping[str, Any]) -> Any:
        due = _Given(given.params, given.shared, None, tuple(x for x, moves in zip(given.inputs, moving) if moves))
        leaves, structure = jax.tree.flatten(due)
        context = Context(call, arrays, key=call.key, averages=given.averages)
        prepared = node.kind.prepare(given.inputs, context)

        def forward(leaves: list[Any]) -> Any:
            params, shared, _, moved = jax.tree.unflatten(structure, leaves)
            rest = iter(moved)
            inputs = tuple(next(rest) if moves else x for x, moves in zip(given.inputs, moving, strict=True))
            within = replace(context, shared=shared, prepared=prepared)
            result = _result(node, _Given(params, shared, given.averages, inputs), within)
            return result.value, result.losses

        return prepared, jax.vjp(remat(forward), leaves)[1]

    traced, shapes = jax.make_jaxpr(passes, return_shape=True)(given, arrays)
    weights = len(jax.tree.leaves(given[:-1]))
    first_array = len(jax.tree.leaves(given))
    return _sort(traced.jaxpr, weights, first_array, len(jax.tree.leaves(shapes[0])))


def _sort(jaxpr: Any, parameters: int, first_array: int, prepared: int) -> _Residuals:
    """Tells apart what the backward pass is handed, by where it comes from."""
    inputs = jaxpr.invars[parameters:first_array]
    alike = {v for v in jaxpr.outvars[:prepared] if not isinstance(v, Constant)} | {*jaxpr.invars[first_array:]}
    weights = {*jaxpr.invars[:parameters], *jaxpr.constvars}
    handed = {v for v in jaxpr.outvars[prepared:] if not isinstance(v, Constant)} - weights
    return _Residuals(
        inputs=sum(map(_bytes, inputs)),
        inputs_read=sum(_bytes(variable) for variable in inputs if variable in handed),
        shared=sum(map(_bytes, handed & alike)),
        own=sum(map(_bytes, handed - alike - {*inputs})),
    )


def _bytes(variable: Any) -> int:
    dtype = variable.aval.dtype
    return prod(variable.aval.shape) * (0 if jnp.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize)


def _abstract(declared: Tree) -> Tree:
    def shape(_: tuple[str, ...], parameter: Parameter) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(parameter.shape, jnp.float32)

    return map_parameters(shape, declared)

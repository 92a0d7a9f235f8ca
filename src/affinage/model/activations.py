"""What a training step keeps of the forward pass for the backward pass, known by tracing shapes alone.

Kept is what JAX's differentiation hands from one pass to the other and is no parameter: intermediate values, and a
node's inputs where the gradient reads them. Copies of the weights in the compute dtype are among them, and so are masks
and rotary tables, once for all layers of a node. XLA may keep less, by computing cheap ones again, never more.

    none    every such value
    block   of a repeated node only the input of every layer (`Call.remat = jax.checkpoint`); of other nodes as in none
    full    of every node its inputs alone, a repeated node's layers included
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Literal as Constant

from affinage.model.call import Call
from affinage.model.graph import Graph
from affinage.model.kind import Context, Result
from affinage.model.node import Node
from affinage.model.parameter import Parameter, Tree, map_parameters

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


def activations(
    graph: Graph, batch: int, context: int, policy: Policy, *, dtype: Any = jnp.bfloat16, platform: str = "tpu"
) -> tuple[NodeActivations, ...]:
    """Bytes for `batch` rows of `context` tokens, with float32 weights computed with in `dtype`; allocates nothing."""
    call = Call(compute_dtype=jnp.dtype(dtype), platform=platform, key=jax.random.key(0))
    rows = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    arrays = {"tokens": rows, "segment_ids": rows, "positions": rows}
    arrays["loss_mask"] = jax.ShapeDtypeStruct((batch, context), jnp.float32)
    values: dict[str, Any] = {name: arrays[name] for name, _ in graph.inputs}
    found = []
    for node in graph.nodes:
        values[node.name], residuals = _trace(graph, node, values, arrays, call)
        found.append(_by_policy(node, residuals, policy))
    return tuple(found)


def _by_policy(node: Node, found: _Residuals, policy: Policy) -> NodeActivations:
    everything = node.layers * (found.inputs_read + found.own) + found.shared
    if policy == "none" or (policy == "block" and node.repeat is None):
        return NodeActivations(node.name, everything, 0)
    if policy == "block":
        return NodeActivations(node.name, node.layers * found.inputs + found.shared, found.own)
    return NodeActivations(node.name, found.inputs, everything - found.inputs_read)


def _trace(
    graph: Graph, node: Node, values: Mapping[str, Any], arrays: Mapping[str, Any], call: Call
) -> tuple[Any, _Residuals]:
    """The node's value as shapes, and the residuals of one of its layers."""
    inputs = tuple(values[name] for name in node.inputs)
    own = _abstract(node.kind.parameters(graph.input_shapes(node)))
    shared = _abstract(graph.parameters[node.kind.shares]) if node.kind.shares else None
    given = (own, shared, inputs)
    value: Any = None

    def passes(given: Any, arrays: Mapping[str, Any]) -> Any:
        nonlocal value
        leaves, structure = jax.tree.flatten(given)
        differentiable = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        context = Context(call, arrays, key=call.key, shared=given[1])
        prepared = node.kind.prepare(given[2], context)

        def forward(floats: list[Any]) -> Any:
            rest = iter(floats)
            filled = [next(rest) if flag else leaf for leaf, flag in zip(leaves, differentiable, strict=True)]
            params, lent, x = jax.tree.unflatten(structure, filled)
            result = node.kind.apply(params, x, replace(context, shared=lent, prepared=prepared))
            result = result if isinstance(result, Result) else Result(result)
            return result.value, result.losses

        floats = [leaf for leaf, flag in zip(leaves, differentiable, strict=True) if flag]
        (out, _), pullback = jax.vjp(forward, floats)
        value = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), out)
        return prepared, pullback

    traced, shapes = jax.make_jaxpr(passes, return_shape=True)(given, arrays)
    parameters = len(jax.tree.leaves((own, shared)))
    first_array = len(jax.tree.leaves(given))
    return value, _sort(traced.jaxpr, parameters, first_array, len(jax.tree.leaves(shapes[0])))


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

"""What a training step keeps of the forward pass for the backward pass, known by tracing shapes alone.

Kept is what JAX's differentiation hands from one pass to the other and is no parameter: intermediate values, and a
node's inputs where the gradient reads them. Copies of the weights in the compute dtype are among them, and so are masks
and rotary tables, once for all layers of a node that is compiled as a loop. Nodes that no gradient goes through keep
nothing. A value that several nodes hand over is counted for the first. XLA may keep less, by computing cheap values
again, never more.

    none    every such value
    dots    of every layer its input and the results of its matrix products with weights
    block   of every layer its input alone
    full    of every node its inputs alone, the layers of a repeated node included
    by name of every layer its input and the values named, on the device or in the host's memory

Other than in `full`, nodes that are not repeated keep what they do in `none`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from affinage.config.parallel import Remat, RematPreset
from affinage.model.call import Call
from affinage.model.graph import Graph
from affinage.model.kinds.preference import REFERENCE, PreferenceLoss
from affinage.model.module import abstract_averages, abstract_params, apply_part
from affinage.model.node import Node
from affinage.model.parameter import Tree
from affinage.model.remat import with_remat
from affinage.model.scans import parts_of_scan
from affinage.model.shape import BATCH, SEQUENCE

POLICIES: tuple[RematPreset, ...] = ("none", "dots", "block", "full")
_CUTS = frozenset({"split", "squeeze", "slice"})  # take a layer's weights from those of all layers
_WRAPPERS = frozenset({"scan", "jit", "pjit", "closed_call", "shard_map", "checkpoint", "remat2"})
_VIEWS = _CUTS | {"name", "reshape"}  # of a value that is there: nothing is computed


@dataclass(frozen=True)
class NodeActivations:
    """Bytes of one node, all its layers together."""

    name: str
    kept: int  # from the forward to the backward pass, on the device
    offloaded: int  # the same, in the host's memory
    recomputed: int  # at once in the backward pass, on top: of one layer, and in `full` of the node around its layers


def activations(
    graph: Graph, batch: int, context: int, remat: Remat, *, dtype: Any = jnp.bfloat16, platform: str = "tpu"
) -> tuple[NodeActivations, ...]:
    """Bytes for `batch` rows of `context` tokens, with float32 weights computed with in `dtype`; allocates nothing.

    Raises:
        UserError: for activations to be offloaded where the platform has no other memory.
    """
    call = with_remat(Call(compute_dtype=jnp.dtype(dtype), platform=platform, key=jax.random.key(0)), remat)
    again: dict[str, int] = {}

    def passes(weights: Any, arrays: Mapping[str, Any]) -> list[Any]:
        params, averages = weights
        values = {name: arrays[name] for name, _ in graph.inputs}
        handed: list[Any] = []
        for node in graph.nodes:
            function, due = _of_node(graph, node, params, values, arrays, replace(call, averages=averages))
            if node.name in graph.differentiated:
                (values[node.name], losses), backward = jax.vjp(function, *due)
                handed.append(backward)
                linear = jax.make_jaxpr(backward)((values[node.name], losses)).jaxpr
                again[node.name] = _recomputed(linear, linear.invars)
            else:
                values[node.name], _ = function(*due)
                handed.append(None)
        return handed

    weights = (abstract_params(graph), abstract_averages(graph))
    traced, shapes = jax.make_jaxpr(passes, return_shape=True)(weights, batch_shapes(graph, batch, context))
    counted = _weights(traced.jaxpr, len(jax.tree.leaves(weights)))
    results = iter(traced.jaxpr.outvars)
    found = []
    for node, shape in zip(graph.nodes, shapes, strict=True):
        own = {v for v in islice(results, len(jax.tree.leaves(shape))) if isinstance(v, Var)} - counted
        counted |= own
        away = {variable for variable in own if _on_host(variable)}
        sizes = (sum(map(_bytes, own - away)), sum(map(_bytes, away)))
        found.append(NodeActivations(node.name, *sizes, again.get(node.name, 0)))
    return tuple(found)


def batch_shapes(graph: Graph, batch: int, context: int) -> dict[str, Any]:
    """The arrays of a batch, as shapes: the graph's inputs and what the feed gives beside them."""
    sizes, dtypes = {BATCH: batch, SEQUENCE: context}, {"float": jnp.float32, "int": jnp.int32}
    arrays = {name: jax.ShapeDtypeStruct(shape.bind(sizes), dtypes[shape.dtype]) for name, shape in graph.inputs}
    arrays["rows"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if "tokens" in arrays:
        arrays |= dict.fromkeys(("segment_ids", "positions"), arrays["tokens"])
        arrays["loss_mask"] = jax.ShapeDtypeStruct((batch, context), jnp.float32)
    if isinstance(graph[graph.loss].kind, PreferenceLoss):
        (answers,) = graph[graph.loss].inputs
        documents = graph.shapes[answers].bind(sizes)[1]
        arrays[REFERENCE] = jax.ShapeDtypeStruct((batch, documents), jnp.float32)
    return arrays


def _of_node(
    graph: Graph, node: Node, params: Tree, values: Mapping[str, Any], arrays: Mapping[str, Any], call: Call
) -> tuple[Callable[..., Any], tuple[Tree, Mapping[str, Any]]]:
    """A node as a function of its weights and of those inputs that a gradient is due to, and these."""
    read = {name: params[name] for name in (node.name, node.kind.shares) if name in params}
    moving = {name: values[name] for name in node.inputs if name in graph.differentiated}

    def function(read: Tree, moving: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        part = apply_part(graph, (node.name,), read, {**values, **moving}, arrays, call)
        return part.values[node.name], part.losses

    return function, (read, moving)


def _weights(jaxpr: Jaxpr, count: int) -> set[Var]:
    """The first `count` arguments, and each layer's part of them."""
    found = {*jaxpr.invars[:count], *jaxpr.constvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name in _CUTS and found.issuperset(equation.invars):
            found.update(equation.outvars)
    return found


def _recomputed(jaxpr: Jaxpr, due: Collection[Var], again: bool = False) -> int:
    """Bytes that a backward pass computes anew and holds until it reads them, in the layer where they are most.

    They are what checkpoints compute of values handed over, without `due`, which comes from the loss, for operations
    that need both.
    """
    from_loss, anew, needed = set(due), set[Var](), set[Var]()
    handed = {*jaxpr.constvars, *jaxpr.invars} - from_loss
    inside = 0
    for equation in jaxpr.eqns:
        read = {atom for atom in equation.invars if isinstance(atom, Var)}
        if not from_loss.isdisjoint(read):
            from_loss.update(equation.outvars)
            needed |= read & anew
            inner = _inner(equation)
            if inner is not None:
                reads_due = [isinstance(atom, Var) and atom in from_loss for atom in equation.invars]
                for turned in _carried(equation):
                    reads_due[turned] = True
                inner_due = {variable for variable, reads in zip(inner.invars, reads_due, strict=True) if reads}
                checkpointed = "differentiated" in equation.params
                inside = max(inside, _recomputed(inner, inner_due, again or checkpointed))
        elif equation.primitive.name in _VIEWS and handed.issuperset(read):
            handed.update(equation.outvars)
        elif not (handed | anew).isdisjoint(read):
            anew.update(equation.outvars)
    return inside + (sum(map(_bytes, needed)) if again else 0)


def _inner(equation: Any) -> Jaxpr | None:
    """The program that an operation runs with its own arguments."""
    inner = equation.params.get("jaxpr") if equation.primitive.name in _WRAPPERS else None
    return getattr(inner, "jaxpr", inner)


def _carried(equation: Any) -> range:
    """Which arguments a loop passes from turn to turn."""
    if equation.primitive.name != "scan":
        return range(0)
    constants, carries = parts_of_scan(equation.params)
    return range(constants, constants + carries)


def _on_host(variable: Var) -> bool:
    aval: Any = variable.aval
    return bool(aval.memory_space == jax.memory.Space.Host)


def _bytes(variable: Var) -> int:
    aval: Any = variable.aval
    return prod(aval.shape) * (0 if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else aval.dtype.itemsize)

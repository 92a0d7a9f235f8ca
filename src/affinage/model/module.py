"""A graph as functions of a parameter tree."""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from affinage.model.call import Call, Loss, Outputs
from affinage.model.graph import Graph
from affinage.model.kind import Context, Result
from affinage.model.node import Node
from affinage.model.parameter import Parameter, Tree, map_parameters
from affinage.model.repeat import apply_node, unstack


class Declared(Protocol):
    """What declares parameters: a graph, or the adapters beside its matrices."""

    @property
    def parameters(self) -> Tree:
        """Declarations of all parameters."""
        ...

    @property
    def depth(self) -> int:
        """See `Graph.depth`."""
        ...


def abstract_params(graph: Declared, dtype: Any = jnp.float32) -> Tree:
    """Shapes and dtypes of all parameters as a nested dict of jax.ShapeDtypeStruct; allocates nothing."""
    return map_parameters(lambda _, p: jax.ShapeDtypeStruct(p.shape, dtype), graph.parameters)


def logical_axes(graph: Declared) -> Tree:
    """The logical axis of every dimension of every parameter, as a tree of tuples."""
    return map_parameters(lambda _, p: p.axes, graph.parameters)


def decayed(graph: Declared) -> Tree:
    """Whether weight decay applies, as a tree of bools: True for matrices and embeddings, not for norms and biases."""
    return map_parameters(lambda _, p: p.decay, graph.parameters)


def matrices(graph: Declared) -> Tree:
    """For every hidden layer's matrix (dimensions of its input, of its output); None for all other parameters."""
    return map_parameters(lambda _, p: (p.inputs, p.outputs) if p.inputs else None, graph.parameters)


def init_params(graph: Declared, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Tree:
    """First values of all parameters; each depends on the key and its own name only. Can be jitted and sharded."""

    def draw(path: tuple[str, ...], parameter: Any) -> Array:
        return parameter.draw(_named_key(key, "/".join(path)), graph.depth, jnp.dtype(dtype))

    return map_parameters(draw, graph.parameters)


def init_cache(graph: Graph, batch: int, length: int, dtype: Any = jnp.float32, *, platform: str | None = None) -> Tree:
    """An empty cache for `length` tokens of `batch` rows: {node name: {array name: [layers, batch, ...]}}.

    Where layers are not scanned on the platform (default: this one), it is a tuple of such {array name: [1, batch,
    ...]}, one for each layer, which a step writes in place and reads without a copy.
    """

    def empty(layers: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        return {name: jnp.zeros((layers, *shape), dtype) for name, shape in shapes.items()}

    cache: Tree = {}
    for node in graph.nodes:
        if shapes := node.kind.cache(graph.input_shapes(node), batch, length):
            scanned = node.repeat is None or node.scans(platform or jax.default_backend())
            cache[node.name] = (
                empty(node.layers, shapes) if scanned else tuple(empty(1, shapes) for _ in range(node.layers))
            )
    return cache


def one_by_one(graph: Graph, params: Tree) -> Tree:
    """The parameters as `apply` takes them, too, with those of each layer apart where layers are not scanned.

    A loop around `apply`, over the tokens that are generated, then need not take them apart in every turn. They are
    copies.
    """
    repeated = {node.name: node for node in graph.nodes if node.repeat is not None}
    return {
        name: unstack(tree, repeated[name].layers)
        if name in repeated and not repeated[name].scans(jax.default_backend())
        else tree
        for name, tree in params.items()
    }


def apply(graph: Graph, params: Tree, batch: Mapping[str, Array], call: Call) -> Outputs:
    """Values of the graph's nodes for a batch, up to `call.until` or the loss.

    `batch` holds the graph's inputs, and beside `tokens` int32 [B, S] optionally `segment_ids` and `positions`
    int32 [B, S], `loss_mask` float32 [B, S] and `rows` int32 [B]; without them a row is one document and every
    token counts. With `parents` int32 [B, S] a token sees the segment of that number, too.
    With `call.cache` the tokens continue its rows: they are written at their `positions` (a negative one marks padding)
    and see all earlier slots of their row.
    """
    given = {name: batch[name] for name, _ in graph.inputs if name in batch}
    part = apply_part(graph, graph.needed_for(call.until or graph.loss), params, given, batch, call)
    values = part.values
    if part.losses and isinstance(values.get(graph.loss), Loss):
        loss = values[graph.loss]
        values = {**values, graph.loss: replace(loss, sum=loss.sum + sum(part.losses) * loss.count)}
    return Outputs(values, part.cache, part.metrics)


@dataclass(frozen=True)
class Part:
    """What some of a graph's nodes made: values by node (and those given), and by-products.

    Attributes:
        values: by the name of the node.
        cache: as `Outputs.cache`.
        metrics: name -> (sum, count).
        losses: means per token that the training loss is to be raised by, times its count.
    """

    values: dict[str, Any]
    cache: Tree | None
    metrics: dict[str, tuple[Array, Array]]
    losses: list[Array]


def apply_part(
    graph: Graph,
    names: Collection[str],
    params: Tree,
    given: Mapping[str, Any],
    batch: Mapping[str, Array],
    call: Call,
) -> Part:
    """Values of the named nodes, in the graph's order, from those that are `given`; see `apply`."""
    values: dict[str, Any] = dict(given)
    cache: Tree | None = None if call.cache is None else dict(call.cache)
    metrics: dict[str, tuple[Array, Array]] = {}
    losses: list[Array] = []
    narrowing = None if call.at is None else graph.narrowing(names)
    for node in graph.nodes:
        if node.name not in names:
            continue
        at = call.at if node.name == narrowing else None
        with jax.named_scope(node.name):  # by which profiles and plans know what a program's operations are for
            result = _apply_node(graph, node, params, values, batch, replace(call, at=at))
        values[node.name] = result.value
        losses += [total / jnp.maximum(count, 1.0) for total, count in result.losses.values()]
        for name, (total, count) in result.metrics.items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + total, before[1] + count)
        own = result.cache or result.caches
        if cache is not None and own is not None:
            cache[node.name] = own
    return Part(values, cache, metrics, losses)


def _apply_node(
    graph: Graph, node: Node, params: Tree, values: Mapping[str, Any], batch: Mapping[str, Array], call: Call
) -> Result:
    context = context_of(node, params, batch, call)
    own, inputs = params.get(node.name, {}), tuple(values[name] for name in node.inputs)
    if node.repeat is not None and call.platform == "gpu" and not node.scans(call.platform):
        own = _cast_matrices(own, graph.parameters.get(node.name, {}), call.compute_dtype)
    if not call.remat_nodes:
        return apply_node(node, own, inputs, context)

    def parts(own: Tree, shared: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        result = apply_node(node, own, inputs, replace(context, shared=shared))
        return result.value, result.cache, result.losses, result.metrics

    return Result(*jax.checkpoint(parts)(own, context.shared, inputs))


def _cast_matrices(params: Tree, declared: Tree, dtype: Any) -> Tree:
    """The parameters with all layers' matrices in the compute dtype, so that each layer's is a slice and no copy."""

    def cast(name: str, value: Any) -> Any:
        parameter = declared.get(name)
        if isinstance(value, dict):
            return _cast_matrices(value, parameter or {}, dtype)
        return value.astype(dtype) if isinstance(parameter, Parameter) and parameter.inputs else value

    return {name: cast(name, value) for name, value in params.items()}


def context_of(node: Node, params: Tree, batch: Mapping[str, Array], call: Call) -> Context:
    """What a node of a graph sees when it is applied; `params` are the graph's, for those that it shares."""
    shared = node.kind.shares
    cache = None if call.cache is None else call.cache.get(node.name)
    return Context(
        call=call,
        batch=batch,
        key=None if call.key is None else _named_key(call.key, node.name),
        cache=None if isinstance(cache, tuple) else cache,
        caches=cache if isinstance(cache, tuple) else None,
        shared=params[shared] if shared else None,
        at=call.at,
    )


def _named_key(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    return jax.random.fold_in(key, zlib.crc32(name.encode()))

"""A graph as functions of a tree of parameters."""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import checkpoint_policies as policies
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from affinage.model.apply_config import NAMED, ApplyConfig, PyTree
from affinage.model.graph import Graph, Node
from affinage.model.layer import BATCH, SEQUENCE, Batch, LayerContext, Loss, Pairs, ParamSpec, Result
from affinage.model.layers.embedding import Unembed
from affinage.model.layers.losses import REFERENCE, PreferenceLoss
from affinage.model.lora import Adapters

Declared = Graph | Adapters  # what declares parameters


def abstract_params(graph: Declared, dtype: Any = jnp.float32) -> PyTree:
    """Shapes and dtypes of all parameters as a nested dict of jax.ShapeDtypeStruct; allocates nothing."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), graph.parameters)


def logical_axes(graph: Declared) -> PyTree:
    """The logical axis of every dimension of every parameter, as a tree of tuples."""
    return jax.tree.map(lambda p: p.axes, graph.parameters)


def decayed(graph: Declared) -> PyTree:
    """Whether weight decay applies, as a tree of bools: True for matrices and embeddings, not for norms and biases."""
    return jax.tree.map(lambda p: p.decay, graph.parameters)


def init_params(graph: Declared, key: PRNGKeyArray, dtype: Any = jnp.float32) -> PyTree:
    """First values of all parameters; each depends on the key and its own name only. Can be jitted and sharded."""

    def draw(path: Any, parameter: ParamSpec) -> Array:
        if parameter.init != "normal":
            return jnp.full(parameter.shape, float(parameter.init == "ones"), dtype)
        std = parameter.std / (2 * graph.depth) ** 0.5 if parameter.residual else parameter.std
        own = jax.random.fold_in(key, zlib.crc32("/".join(part.key for part in path).encode()))
        return (std * jax.random.normal(own, parameter.shape, jnp.float32)).astype(dtype)  # rounded once

    return jax.tree_util.tree_map_with_path(draw, graph.parameters)


def init_cache(graph: Graph, batch: int, length: int, dtype: Any = jnp.float32) -> PyTree:
    """An empty cache for `length` tokens of `batch` rows: {node name: {array name: [layers, batch, ...]}}.

    Where layers are not scanned, a tuple of [1, batch, ...] for each layer, which a step writes in place.
    """
    cache: PyTree = {}
    for node in graph.nodes:
        if shapes := node.layer.cache(node.takes, batch, length):
            apart = node.repeat is not None and not node.scans(jax.default_backend())
            layers, copies = (1, node.layers) if apart else (node.layers, 1)
            arrays = [{name: jnp.zeros((layers, *dims), dtype) for name, dims in shapes.items()} for _ in range(copies)]
            cache[node.name] = tuple(arrays) if apart else arrays[0]
    return cache


def for_decoding(graph: Graph, params: PyTree, dtype: Any) -> PyTree:
    """The parameters as decoding reads them for every token: matrices in the compute dtype, and layers apart where they
    are not scanned. `apply` takes them as well, and its results are the same."""
    apart = {node.name: node.layers for node in graph.nodes if node.repeat and not node.scans(jax.default_backend())}
    tree = {name: _cast_matrices(own, graph.parameters.get(name, {}), dtype) for name, own in params.items()}
    last = graph[graph.logits].layer
    if isinstance(last, Unembed):
        name, key = (last.shares, "embedding") if last.shares else (graph.logits, "kernel")
        tree[name] = tree[name] | {key: tree[name][key].astype(dtype)}
    return {name: _unstack(own, apart[name]) if name in apart else own for name, own in tree.items()}


def batch_shapes(graph: Graph, batch: int, context: int) -> dict[str, Any]:
    """The graph's inputs and what the data loader yields beside them, as trees of `jax.ShapeDtypeStruct`."""
    sizes, dtypes = {BATCH: batch, SEQUENCE: context}, {"float": jnp.float32, "int": jnp.int32}
    arrays = {name: jax.ShapeDtypeStruct(shape.bind(sizes), dtypes[shape.dtype]) for name, shape in graph.inputs}
    arrays["rows"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if "tokens" in arrays:
        arrays |= dict.fromkeys(("segment_ids", "positions"), arrays["tokens"])
        arrays["loss_mask"] = jax.ShapeDtypeStruct((batch, context), jnp.float32)
    if isinstance(graph[graph.loss].layer, PreferenceLoss):
        (answers,) = graph[graph.loss].inputs
        arrays[REFERENCE] = jax.ShapeDtypeStruct((batch, graph.shapes[answers].bind(sizes)[1]), jnp.float32)
    return arrays


@dataclass(frozen=True)
class Outputs:
    """What some of a graph's nodes made."""

    values: dict[str, Any]  # by the name of the node
    cache: PyTree | None = None  # the advanced one, where there is one
    metrics: Pairs = field(default_factory=dict)
    losses: list[Array] = field(default_factory=list)  # means per token that raise the training loss, times its count


def apply(graph: Graph, params: PyTree, batch: Batch, config: ApplyConfig) -> Outputs:
    """Values of the graph's nodes for a batch, up to `config.until` or the loss.

    `batch` holds the graph's inputs, and beside `tokens` int32 [B, S] optionally `segment_ids` and `positions`
    int32 [B, S], `loss_mask` float32 [B, S] and `rows` int32 [B]; without them a row is one document and every
    token counts. With `prefix_segment_ids` int32 [B, S] a token sees the segment of that number, too.
    With `config.cache` the tokens continue its rows: they are written at their `positions` (a negative one marks
    padding) and see all earlier slots of their row.
    """
    inputs = {name: batch[name] for name, _ in graph.inputs if name in batch}
    made = apply_part(graph, graph.needed_for(config.until or graph.loss), params, inputs, batch, config)
    loss = made.values.get(graph.loss)
    if made.losses and isinstance(loss, Loss):
        made.values[graph.loss] = replace(loss, sum=loss.sum + sum(made.losses) * loss.count)
    return made


def apply_part(
    graph: Graph, names: Collection[str], params: PyTree, known: PyTree, batch: Batch, config: ApplyConfig
) -> Outputs:
    """What the named nodes make, in the graph's order, of values that are `known`, which are among those returned."""
    made = Outputs(dict(known), None if config.cache is None else dict(config.cache))
    for node in graph.nodes:
        if node.name not in names:
            continue
        context, own = context_of(node, params, batch, config), params.get(node.name, {})
        inputs = tuple(made.values[name] for name in node.inputs)
        with jax.named_scope(node.name):  # by which profiles and plans know what a program's operations are for
            if node.repeat is not None and config.platform == "gpu" and not node.scans(config.platform):
                own = _cast_matrices(own, graph.parameters.get(node.name, {}), config.compute_dtype)
            result = apply_node(node, own, inputs, context)
        made.values[node.name] = result.value
        made.losses.extend(total / jnp.maximum(count, 1.0) for total, count in result.losses.values())
        for name, (total, count) in result.metrics.items():
            before = made.metrics.get(name, (0.0, 0.0))
            made.metrics[name] = (before[0] + total, before[1] + count)
        if made.cache is not None and result.cache:
            made.cache[node.name] = result.cache
    return made


def _cast_matrices(params: PyTree | list[PyTree], declared: PyTree, dtype: Any) -> Any:
    """The parameters with all layers' matrices in the compute dtype, so that each layer's is a slice and no copy."""
    if isinstance(params, list):
        return [_cast_matrices(layer, declared, dtype) for layer in params]
    matrices = {path for path, parameter in flatten_dict(declared).items() if parameter.inputs}
    arrays = flatten_dict(params, keep_empty_nodes=True).items()
    return unflatten_dict({path: array.astype(dtype) if path in matrices else array for path, array in arrays})


def context_of(node: Node, params: PyTree, batch: Batch, config: ApplyConfig) -> LayerContext:
    """What a node of a graph sees when it is applied; `params` are the graph's, for those that it shares."""
    shared = node.layer.shares
    return LayerContext(
        config=config,
        batch=batch,
        key=None if config.key is None else jax.random.fold_in(config.key, zlib.crc32(node.name.encode())),
        cache=None if config.cache is None else config.cache.get(node.name),
        shared=params[shared] if shared else None,
    )


def apply_node(node: Node, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
    """A node's value with its by-products, all its repeats in a row."""
    cache = context.cache
    if node.repeat is not None and context.config.layers is not None and cache is None:
        return context.config.layers(node, params, inputs[0], context)
    first = replace(context, cache=cache[0] if isinstance(cache, tuple) else cache)
    context = replace(context, prepared=node.layer.prepare(inputs, first))
    return apply_layers(node, params, inputs, context)


def apply_layers(node: Node, params: PyTree, inputs: Any, context: LayerContext, first: int | Array = 0) -> Result:
    """Layer after layer on one value, as one compiled body (scan) or as many, the number `first` first; or one once."""
    once, scanned = node.repeat is None, node.repeat is not None and node.scans(context.config.platform)

    def body(carry: Any, layer_params: PyTree, layer: Any) -> Any:
        inputs, cache = carry
        key = context.key if once or context.key is None else jax.random.fold_in(context.key, layer)
        own = replace(context, key=key, layer=layer if scanned or cache is None else 0, cache=cache)
        result = Result.of(node.layer.apply(layer_params, inputs, own))
        return ((result.value,), result.cache), (result.losses, result.metrics)

    policy = context.config.remat
    if policy is None and context.config.platform != "cpu":
        # Norms and the like are computed again: that costs less than to store and read their float32 values.
        policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, NAMED)
    wrapped, cache = body, context.cache
    if policy is not None and (node.hidden or not once):
        # A loop keeps the passes apart, but XLA makes none of a single turn.
        wrapped = jax.checkpoint(body, policy=policy, prevent_cse=not scanned or node.layers == 1)
    if scanned:
        numbers = first + jnp.arange(node.layers)
        carry, stacked = jax.lax.scan(lambda carry, xs: wrapped(carry, *xs), (inputs, cache), (params, numbers))
        (x,), cache = carry
        losses, metrics = jax.tree.map(lambda values: values.sum(axis=0), stacked)
        counts = {name: count[0] for name, (_, count) in stacked[0].items()}
    else:
        caches, collected = [], []
        every = [params] if once else _unstack(params, node.layers)
        each = zip(every, [cache] if once else cache or (None,) * node.layers, strict=True)
        for layer, (own, cached) in enumerate(each):
            (inputs, cached), by_products = wrapped((inputs, cached), own, first + layer)
            caches.append(cached)
            collected.append(by_products)
        (x,), cache = inputs, caches[0] if once else None if cache is None else tuple(caches)
        losses, metrics = jax.tree.map(lambda *values: sum(values), *collected)
        counts = {name: count for name, (_, count) in collected[0][0].items()}
    return Result(x, cache, {name: (total, counts[name]) for name, (total, _) in losses.items()}, metrics)


def _unstack(params: PyTree | list[PyTree], layers: int) -> list[PyTree]:
    """The parameters of each layer from arrays with the layers first; those that are one by one stay as they are."""
    if isinstance(params, list):
        return params
    # A split, not indexing, so that the gradient is one concatenation instead of `layers` padded sums.
    split = jax.tree.map(lambda leaf: [part[0] for part in jnp.split(leaf, layers)], params)
    return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure([0] * layers), split)


# ---- Flax NNX, for its transformations, optimizers and checkpoints; the plain tree stays the contract ----


class GraphModule(nnx.Module):
    """A graph with its parameters, `nodes`: {node name: nested dict of nnx.Param}; calling it applies the graph."""

    def __init__(self, graph: Graph, nodes: Mapping[str, Any]) -> None:
        self.graph = nnx.static(graph)
        self.nodes = nnx.data(dict(nodes))

    def __call__(self, batch: Mapping[str, Array], config: ApplyConfig | None = None) -> Outputs:
        """Values of the graph's nodes."""
        return apply(self.graph, from_nnx(self), batch, config or ApplyConfig())


def to_nnx(graph: Graph, params: PyTree, mesh: Mesh | None = None) -> GraphModule:
    """The module of a graph, which shares the arrays of `params` and names their dimensions as `logical_axes`.

    With a `mesh` the shardings that the parameters have on it become theirs in NNX, too.
    """

    def param(array: Any, axes: tuple[str | None, ...]) -> Any:
        on_mesh: dict[str, Any] = {} if mesh is None else {"out_sharding": tuple(array.sharding.spec), "mesh": mesh}
        return nnx.Param(array, logical_axes=axes, **on_mesh)

    return GraphModule(graph, jax.tree.map(param, params, logical_axes(graph)))


def from_nnx(module: GraphModule) -> PyTree:
    """The plain tree of a module's parameters, for `apply`, checkpoints and exports."""
    return jax.tree.map(lambda leaf: leaf[...], module.nodes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

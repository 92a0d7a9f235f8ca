"""A node applied several times in a row, as one compiled body (scan) or as many (unrolled)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from affinage.model.kind import Cache, Context, Result
from affinage.model.node import Node
from affinage.model.parameter import Tree

Carry = tuple[Any, Cache | None]
Pairs = dict[str, tuple[Array, Array]]  # (sum, count)
ByProducts = tuple[Pairs, Pairs]  # losses, metrics


def apply_node(node: Node, params: Tree, inputs: tuple[Any, ...], context: Context) -> Result:
    """A node's value with its by-products, all its repeats in a row."""
    cached = context.cache is not None or context.caches is not None
    if node.repeat is not None and context.call.layers is not None and not cached:
        result: Result = context.call.layers(node, params, inputs[0], context)
        return result
    first = context.caches[0] if context.caches else context.cache
    context = replace(context, prepared=node.kind.prepare(inputs, replace(context, cache=first)))
    if node.repeat is not None:
        return apply_layers(node, params, inputs[0], context)
    value = node.kind.apply(params, inputs, context)
    return value if isinstance(value, Result) else Result(value)


def apply_layers(node: Node, params: Tree, x: Any, context: Context, first: int | Array = 0) -> Result:
    """Layer after layer on one value; parameters and cache have the layers as first axis, or are one by one.

    Losses and metrics of the layers are added up; `first` is the number of the first layer for random draws.
    """
    scanned = node.scans(context.call.platform)
    if (context.caches if scanned else context.cache) is not None:
        raise ValueError("a cache of a platform that scans layers is of no use where they are not, nor the reverse")

    def body(carry: Carry, layer_params: Tree, layer: Any, at: Array | None = None) -> tuple[Carry, ByProducts]:
        value, cache = carry
        key = None if context.key is None else jax.random.fold_in(context.key, layer)
        place = layer if scanned or cache is None else 0
        result = node.kind.apply(layer_params, (value,), replace(context, key=key, layer=place, cache=cache, at=at))
        if not isinstance(result, Result):
            result = Result(result)
        return (result.value, result.cache), (result.losses, result.metrics)

    wrapped = context.call.rematerialized(body, scanned=scanned)
    if scanned:
        (value, cache), layers = jax.lax.scan(
            lambda carry, xs: wrapped(carry, *xs), (x, context.cache), (params, first + jnp.arange(node.layers))
        )
        losses, metrics = jax.tree.map(lambda stacked: stacked.sum(axis=0), layers)
        losses = {name: (total, layers[0][name][1][0]) for name, (total, _) in losses.items()}
        return Result(context.narrowed(value), cache, losses, metrics)
    collected: list[ByProducts] = []
    given = context.caches or (None,) * node.layers
    caches: list[Cache] = []
    for layer, (layer_params, own) in enumerate(zip(unstack(params, node.layers), given, strict=True)):
        # The layers before it compute what the last one looks at.
        at = context.at if layer == node.layers - 1 else None
        (x, cache), products = wrapped((x, own), layer_params, first + layer, at)
        caches += [] if cache is None else [cache]
        collected.append(products)
    losses, metrics = jax.tree.map(lambda *values: sum(values), *collected)
    losses = {name: (total, collected[0][0][name][1]) for name, (total, _) in losses.items()}
    return Result(x, losses=losses, metrics=metrics, caches=tuple(caches) if context.caches is not None else None)


def unstack(params: Tree | list[Tree], layers: int) -> list[Tree]:
    """The parameters of each layer from arrays with the layers first; those that are one by one already, as they are.

    A split, not indexing, so that the gradient is one concatenation instead of `layers` padded sums.
    """
    if isinstance(params, list):
        return params
    leaves, structure = jax.tree.flatten(params)
    split = [[part[0] for part in jnp.split(leaf, layers)] for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[layer] for parts in split]) for layer in range(layers)]

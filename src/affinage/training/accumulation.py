"""Sums over the micro-batches of a batch, and over the copies of the model that share it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from affinage.parallel.layout import REPLICAS

PyTree = Any
Batch = Mapping[str, Array]
Sums = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]  # name -> (sum, count)


def accumulate(
    gradient: Callable[[Batch], tuple[PyTree, Sums]], batch: Batch, parts: int, replicas: int = 1
) -> tuple[PyTree, Sums]:
    """Sum `gradient` over `parts` micro-batches of equal size, one after the other.

    Micro-batch m has the rows m, m + parts, m + 2 parts, ...: each device finds its share of every micro-batch among
    the rows it already has.

    Args:
        gradient: of some rows.
        batch: arrays [B, ...].
        parts: divides B.
        replicas: equal parts of the rows, one after the other, that stand side by side along the mesh axis REPLICAS.
            Each has sums of its own until the last micro-batch, which are then summed once. Left to itself, XLA sums
            over the devices in every micro-batch, layer by layer.
    """
    if parts == 1:
        return gradient(batch)
    copies = (replicas,) if replicas > 1 else ()
    axis = len(copies) + 1
    split = {name: jnp.moveaxis(x.reshape(*copies, -1, parts, *x.shape[1:]), axis, 0) for name, x in batch.items()}
    if copies:
        gradient = jax.vmap(gradient, spmd_axis_name=REPLICAS)
    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total: tuple[PyTree, Sums], part: Batch) -> tuple[tuple[PyTree, Sums], None]:
        return jax.tree.map(jnp.add, total, gradient(part)), None

    total = jax.lax.scan(add, zeros, split)[0]
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), total) if copies else total

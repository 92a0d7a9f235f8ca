"""The arrays of a batch, as shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from affinage.model.graph import Graph
from affinage.model.kinds.preference import REFERENCE, PreferenceLoss
from affinage.model.shape import BATCH, SEQUENCE


def batch_shapes(graph: Graph, batch: int, context: int) -> dict[str, Any]:
    """The graph's inputs and what the data loader yields beside them, as trees of `jax.ShapeDtypeStruct`."""
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

"""A trained model as everything after training takes it: generation, evaluation, export."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from affinage.config.training import AttentionImplementation
from affinage.data.tokenizer import Tokenizer
from affinage.model.call import Call, Logits
from affinage.model.graph import Graph
from affinage.model.module import apply
from affinage.model.parameter import Tree
from affinage.parallel import MeshLayout
from affinage.parallel.sharding import batch_sharding, replicated, rows_split


@dataclass(frozen=True)
class LoadedModel:
    """A graph with its weights and tokenizer, on one device or sharded over a mesh."""

    graph: Graph
    params: Tree
    tokenizer: Tokenizer
    name: str
    context: int  # tokens it was trained on at once; nothing longer is put into it
    layout: MeshLayout | None = None  # None: the default device
    system_prompt: str = ""  # what a chat model was told in conversations without a system message; "": nothing
    compute_dtype: str = "float32"
    # What computes it where there is no KV cache, and a row is one sequence; elsewhere xla.
    attention: AttentionImplementation = "auto"

    def place(self, array: ArrayLike) -> Array:
        """`array` on the device, its rows split as the layout says where there is one."""
        if self.layout is None:
            return jnp.asarray(array)
        sharding = batch_sharding(self.layout.mesh, self.layout.table)
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        whole = np.asarray(array)  # on every host, each of which has some of the devices
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def on_host(self, array: Array) -> np.ndarray:
        """The numbers of what was computed; where several hosts have parts of it, all of them must ask for it."""
        if self.layout is not None and not array.is_fully_addressable and not array.is_fully_replicated:
            array = _whole(array, replicated(self.layout.mesh))
        return np.asarray(array)

    @property
    def row_multiple(self) -> int:
        """What the number of rows of a batch must be a multiple of."""
        return 1 if self.layout is None else rows_split(self.layout.mesh, self.layout.table)


@partial(jax.jit, static_argnames="sharding")
def _whole(array: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(array, sharding)


def logits_of(
    graph: Graph,
    params: Tree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    dtype: str,
    cache: Tree | None = None,
    *,
    attention: AttentionImplementation = "auto",
    layout: MeshLayout | None = None,
    segments: Sequence[Array] | None = None,
    at: Int[Array, "R P"] | None = None,
) -> tuple[Logits, Tree | None]:
    """The logits, not yet multiplied out, of rows; and the advanced cache if one is given.

    `attention` and `layout`: as of a LoadedModel. With a cache or segments, attention is xla's. `segments`: where rows
    consist of several, the batch's `segment_ids` and `parents`. `at`: the tokens whose logits are wanted, see `Call`.
    """
    batch = {"tokens": tokens, "positions": positions}
    if segments is not None:
        batch["segment_ids"], batch["parents"] = segments
    call = Call(
        compute_dtype=jnp.dtype(dtype),
        cache=cache,
        until=graph.logits,
        attention=attention if cache is None else "xla",
        at=at,
    )
    if layout is not None:
        call = replace(call, layout=layout)
    outputs = apply(graph, params, batch, call)
    return outputs.values[graph.logits], outputs.cache

"""A trained model as everything after training takes it: generation, evaluation, export."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from affinage.data.tokenizer import Tokenizer
from affinage.model.apply_config import ApplyConfig
from affinage.model.forward import apply
from affinage.model.graph import Graph
from affinage.model.layer import PyTree
from affinage.model.layers.dense import Logits
from affinage.parallel import MeshLayout


@dataclass(frozen=True)
class LoadedModel:
    """A graph with its weights and tokenizer, on one device or sharded over a mesh."""

    graph: Graph
    params: PyTree
    tokenizer: Tokenizer
    name: str
    context: int  # the longest row in tokens
    layout: MeshLayout | None = None  # None: the default device
    system_prompt: str = ""  # of conversations without a system message
    compute_dtype: str = "float32"
    chat: bool = False  # whether it was trained to chat; a template of its tokenizer alone is no sign of that

    def place(self, array: ArrayLike) -> Any:
        """Return `array` with its rows split over the mesh; without a mesh, jit puts it on the device."""
        if self.layout is None:
            return array
        sharding = self.layout.batch_sharding
        whole = np.asarray(array)  # the same on every host, each of which has some of the devices
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def on_host(self, array: Array) -> np.ndarray:
        """Return a computed array as numpy; where several hosts have parts of it, all of them must call this."""
        if self.layout is not None and not array.is_fully_addressable and not array.is_fully_replicated:
            return np.asarray(process_allgather(array, tiled=True))
        return np.asarray(array)

    @property
    def row_multiple(self) -> int:
        """What the number of rows of a batch must be a multiple of."""
        return 1 if self.layout is None else self.layout.parts("batch")


def logits_of(
    graph: Graph,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    dtype: str,
    cache: PyTree | None = None,
    *,
    segments: Sequence[Array] | None = None,
    layout: MeshLayout | None = None,
    **config: Any,
) -> tuple[Logits, PyTree | None]:
    """Return the logits of rows, not yet multiplied out; and the advanced cache if one is given.

    `segments` are the batch's `segment_ids` and `prefix_segment_ids` if rows hold several texts. `config` is more of
    `ApplyConfig`: with segments, or a cache unless rows are computed `from_start`, attention is xla's.
    """
    batch = {"tokens": tokens, "positions": positions}
    if segments is not None:
        batch["segment_ids"], batch["prefix_segment_ids"] = segments
    if layout is not None:
        config["layout"] = layout
    how = ApplyConfig(compute_dtype=jnp.dtype(dtype), cache=cache, until=graph.logits, **config)
    outputs = apply(graph, params, batch, how)
    return outputs.values[graph.logits], outputs.cache

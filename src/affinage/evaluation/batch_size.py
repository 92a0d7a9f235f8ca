"""How many rows a forward pass takes: as many as the planner says that the device's memory holds."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from affinage.cluster.processes import Processes
from affinage.generation.model import LoadedModel, logits_of
from affinage.planning.auto_remat import present
from affinage.planning.trace import peak_memory

MOST = 64  # rows, for each device that rows are split over
ROOM = 0.45  # of the memory beside the weights: XLA keeps up to twice the estimate on processors
_TRACED = 8  # rows that are planned; what is held grows in proportion


def rows_that_fit(model: LoadedModel, *, beside: int = 0) -> int:
    """A power of two, 64 at most, times the devices that rows are split over; nothing is compiled or allocated.

    Rows are taken to be as long as the model's context, and every device to compute all of its rows by itself. `beside`
    is how many bytes of each device something else than the weights has. Hosts that work together all call it, and take
    what fits on each of them.
    """
    # A host knows the memory of its own devices alone.
    fitting = Processes.at_work().all_min("rows that fit", _fitting_here(model, beside))
    return model.row_multiple * (2 ** int(math.log2(min(MOST, fitting))) if fitting > 1 else 1)


def _fitting_here(model: LoadedModel, beside: int) -> int:
    leaves = jax.tree.leaves(model.params)
    device = next(iter(leaves[0].sharding.addressable_devices))
    capacity = present([device]).memory_per_device
    if not capacity:
        return MOST
    left = ROOM * (capacity - beside - sum(bytes_on_a_device(leaf) for leaf in leaves))
    return int(left // bytes_of_a_row(model, device.platform))


def shorter_rows_that_fit(batch: int, longest: int, model: LoadedModel) -> int:
    """How many rows of at most `longest` tokens take the memory of `batch` rows of the whole context.

    A power of two times the devices that rows are split over, and 64 of them at most, if that is more than `batch`.
    """
    multiple = model.row_multiple
    fitting = max(1, batch * model.context // (longest * multiple))
    return max(batch, multiple * min(MOST, 2 ** int(math.log2(fitting))))


def bytes_of_a_row(model: LoadedModel, platform: str) -> float:
    """Bytes that a forward pass holds at its peak for one row of the model's context, beside the weights.

    With all scores of attention: rows that are several texts are computed so.
    """
    shape = jax.ShapeDtypeStruct((_TRACED, model.context), jnp.int32)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)

    def hidden(params: Any, tokens: Any, positions: Any) -> Any:
        lazy, _ = logits_of(model.graph, params, tokens, positions, model.compute_dtype, attention="xla")
        return lazy.hidden

    return peak_memory(hidden, params, shape, shape, platform=platform) / _TRACED


def bytes_on_a_device(leaf: jax.Array) -> int:
    """Of an array's part on each of its devices."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

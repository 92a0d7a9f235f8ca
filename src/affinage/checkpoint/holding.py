"""Hold the arrays of a state as they are, while the next step is given their memory."""

from typing import Any

import jax
import numpy as np

PyTree = Any

LEAST_PART = 2**20  # bytes; of an array that several devices have, each sends such a part at least


def hold(state: PyTree) -> PyTree | None:
    """The same arrays under other names, which stay what they are when those given are donated.

    Nothing is copied here: each one is a view of the same memory, which XLA sees and leaves alone, so that the program
    to which an array is donated writes elsewhere.

    Returns:
        None where an array lies on an accelerator, whose memory cannot be held like this.
    """
    return jax.tree.map(_held, state) if can_be_held(state) else None


def can_be_held(state: PyTree) -> bool:
    """Whether all arrays are in the memory of the hosts themselves."""
    return all(device.platform == "cpu" for leaf in jax.tree.leaves(state) for device in leaf.devices())


def compile_cuts(state: PyTree) -> None:
    """Compile the programs with which Orbax cuts out the part that a device sends of an array that others have, too.

    There is one for each device and each shape, and else the first save would wait for all of them; so it does with an
    Orbax that has them elsewhere.
    """
    try:  # public is only all of a save
        from orbax.checkpoint._src.serialization.replica_slices import get_replica_slices
    except ImportError:
        return

    alike = {(leaf.shape, leaf.dtype, leaf.sharding): leaf for leaf in jax.tree.leaves(state)}
    for array in alike.values():
        cut = get_replica_slices(array, 0, True, min_slice_bytes_for_replica_parallel=LEAST_PART)
        for part in cut.replica_slices:
            part.data()


def _held(array: jax.Array) -> jax.Array:
    views = [jax.device_put(np.asarray(shard.data), shard.device, may_alias=True) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, views)

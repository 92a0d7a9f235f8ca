"""Hold the arrays of a state as they are, while the next step is given their memory."""

from typing import Any

import jax
import numpy as np

PyTree = Any


def hold(state: PyTree) -> PyTree | None:
    """The same arrays under other names, which stay what they are when those given are donated.

    Nothing is copied here: each one is a view of the same memory, which XLA sees and leaves alone, so that the program
    to which an array is donated writes elsewhere.

    Returns:
        None where an array lies on an accelerator, whose memory cannot be held like this.
    """
    leaves = jax.tree.leaves(state)
    if any(device.platform != "cpu" for leaf in leaves for device in leaf.devices()):
        return None
    return jax.tree.map(_held, state)


def _held(array: jax.Array) -> jax.Array:
    views = [jax.device_put(np.asarray(shard.data), shard.device, may_alias=True) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, views)

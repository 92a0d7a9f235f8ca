"""What the backward pass computes again, as the model is applied."""

from dataclasses import replace
from functools import partial

import jax
from jax import checkpoint_policies as policies

from affinage.errors import UserError
from affinage.model.call import Call
from affinage.recipe.parallel import ParallelSettings


def with_remat(call: Call, settings: ParallelSettings) -> Call:
    """The call with layers, and for `full` also nodes, that keep no more than the settings say.

    Raises:
        UserError: for activations that are to wait in the host's memory where the device's memory is the host's.
    """
    chosen = settings.remat
    if chosen == "none":
        return call
    if chosen == "dots":
        return replace(call, remat=partial(jax.checkpoint, policy=policies.dots_with_no_batch_dims_saveable))
    if chosen == "block":
        return replace(call, remat=jax.checkpoint)
    if chosen == "full":
        return replace(call, remat=jax.checkpoint, remat_nodes=True)
    if not chosen.offload:
        return replace(call, remat=partial(jax.checkpoint, policy=policies.save_only_these_names(*chosen.keep)))
    if call.platform == "cpu":
        raise UserError(
            "a CPU has no other memory to offload activations to",
            where="parallel.remat.offload",
            fix="Move these names to `keep`, or leave them out: they are then computed again.",
        )
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(chosen.keep),
        names_which_can_be_offloaded=list(chosen.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return replace(call, remat=partial(jax.checkpoint, policy=policy))

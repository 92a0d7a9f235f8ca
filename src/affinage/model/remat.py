"""What the backward pass computes again, as the model is applied."""

from dataclasses import replace

from jax import checkpoint_policies as policies

from affinage.config.parallel import RematChoice
from affinage.errors import UserError
from affinage.model.call import STATISTICS, Call


def with_remat(call: Call, remat: RematChoice) -> Call:
    """The call with layers, and for `full` also nodes, that keep no more than the setting says.

    Raises:
        UserError: for activations that are to wait in the host's memory where the device's memory is the host's, and
            for `auto`, which the planner replaces before.
    """
    if remat == "auto":
        raise UserError(
            "`auto` was not chosen for these devices",
            where="parallel.remat",
            fix="A recipe's trainings and plans choose. Here name one: none, dots, block or full.",
        )
    if remat == "none":
        return call
    if remat == "dots":
        attended = policies.save_only_these_names("attended", STATISTICS)
        dots = policies.dots_with_no_batch_dims_saveable
        return replace(call, remat=policies.save_from_both_policies(dots, attended))
    if remat == "block":
        return replace(call, remat=policies.nothing_saveable)
    if remat == "full":
        return replace(call, remat=policies.nothing_saveable, remat_nodes=True)
    keep = [*remat.keep, *([STATISTICS] if "attended" in (*remat.keep, *remat.offload) else [])]
    if not remat.offload:
        return replace(call, remat=policies.save_only_these_names(*keep))
    if call.platform == "cpu":
        raise UserError(
            "a CPU has no other memory to offload activations to",
            where="parallel.remat.offload",
            fix="Move these names to `keep`, or leave them out: they are then computed again.",
        )
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=keep,
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return replace(call, remat=policy)

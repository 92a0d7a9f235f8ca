"""How a graph is applied: dtypes, devices, attention, and what the backward pass computes again."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import checkpoint_policies as policies
from jaxtyping import Array, Int, PRNGKeyArray

from affinage.config.parallel import ActivationName, RematChoice
from affinage.config.training import AttentionImplementation
from affinage.errors import UserError
from affinage.model.parameter import Axes, PyTree

HOPPER = (9, 0)  # compute capability from which cuDNN's attention knows documents by their offsets
STATISTICS = "attention_statistics"  # a kernel's log-sum-exp of scores, by name for policies of `jax.checkpoint`
# The policy that keeps all that a layer has a name for: what a recipe may name, and more.
NAMED = policies.save_only_these_names(
    *get_args(ActivationName), STATISTICS, "attention_weights", "residual", "dropout_mask", "experts_out"
)


class Layout:
    """How arrays lie on the devices: whole on one; `affinage.parallel` has the layout of a mesh.

    Layers speak of logical axes only: which mesh axes split them is the layout's to know.
    """

    def constrain(self, x: Array, axes: Axes) -> Array:
        """Pins an activation to the split that its logical axes have."""
        return x

    def resplit(self, x: Array, before: Axes, after: Axes) -> Array:
        """Pins an activation to one split, then to another: what XLA makes an all-to-all of."""
        return self.constrain(self.constrain(x, before), after)

    def gather_rows(self, x: Array) -> Array:
        """The rows that every stage of a pipeline needs, from those that a device has of nodes beside the stages."""
        return x

    def own_rows(self, x: Array) -> Array:
        """The reverse of `gather_rows`."""
        return x

    def whole(self, length: int, axis: str) -> int:
        """How long an axis is over all devices of which an array shows `length`: a plan's shows one device's part."""
        return length

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that split a logical axis; names for collectives inside `mapped`."""
        return ()

    def parts(self, *axes: str) -> int:
        """Into how many parts an array is split along these logical axes of it."""
        return 1

    def mapped(
        self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, *, over: Collection[str] | None = None
    ) -> Callable[..., Any]:
        """`function` as every device runs it on the parts that lie there, with collectives of its own.

        Args:
            function: of arrays.
            inputs: logical axes of each argument, as a tree of its form.
            outputs: those of the result, as a tree of its form.
            over: logical axes that are taken apart, the others stay XLA's business; None: all of them.
        """
        return function


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, for instance (9, 0) of a Hopper; None for other devices."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def local_capability() -> tuple[int, int] | None:
    """The same of this process's first device."""
    return capability_of(jax.local_devices()[0]) if jax.default_backend() == "gpu" else None


@dataclass(frozen=True)
class ApplyConfig:
    """How a graph is applied this time. Nothing here changes the result beyond rounding, except key and cache."""

    compute_dtype: Any = jnp.float32  # parameters are cast to it at use; norms, softmax and the loss stay in float32
    key: PRNGKeyArray | None = None  # of a training step: dropout, augmentations, experts' capacity; None: none
    cache: PyTree | None = None  # from `init_cache`: the batch continues the rows it holds
    from_start: bool = False  # the batch begins its rows: the cache is written and not read
    adapter_dropout: float = 0.0  # of what goes into adapters, where there are any and there is a key
    ema_params: PyTree | None = None  # the moving average of the parameters, for nodes that read it
    until: str | None = None  # compute only this node and what it needs; None: everything up to the loss
    # The places of the tokens whose logits are wanted, in the flattened tokens of each of R equal parts of the rows:
    # logits come out as [R, P, V]. None: all.
    logit_positions: Int[Array, "R P"] | None = None
    attention: AttentionImplementation = "auto"  # see `affinage.model.layers.attention_ops`
    platform: str = field(default_factory=jax.default_backend)  # what is compiled for: "cpu", "gpu" or "tpu"
    capability: tuple[int, int] | None = field(default_factory=local_capability)  # compute capability of NVIDIA GPUs
    remat: Callable[..., Any] | None = None  # what of each layer is kept: a policy of `jax.checkpoint`; None: all
    remat_nodes: bool = False  # keep of every node its inputs alone, and compute the rest again in the backward pass
    layout: Layout = field(default_factory=Layout)  # how arrays lie on the devices
    ring_attention: bool = False  # where the layout splits sequences: pass keys around instead of gathering them
    # Applies a repeated node in place of `apply_layers`, with the same arguments; a pipeline is one.
    layers: Callable[..., Any] | None = None

    def constrain(self, x: Array, axes: Axes) -> Array:
        """Pins an activation to the mesh by its logical axes."""
        return self.layout.constrain(x, axes)

    def rematerialized(self, layer: Callable[..., Any], *, scanned: bool) -> Callable[..., Any]:
        """A layer that keeps for the backward pass what `remat` says, or by default all that is dear.

        That is products and kernels, and what goes into them; on accelerators norms and the like are computed again,
        which costs less than to store and read their float32 values.
        """
        policy = self.remat
        if policy is None:
            if self.platform == "cpu":
                return layer
            policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, NAMED)
        return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)  # a loop keeps the passes apart

    @property
    def rings(self) -> bool:
        """Whether keys and values are passed around between devices that share a sequence."""
        return self.ring_attention and self.layout.parts("sequence") > 1

    @property
    def flattens(self) -> bool:
        """Whether rows and positions are to be one axis in matrix products.

        XLA:CPU multiplies and differentiates matrices 1.4 times as fast as it does [B, S, D]; elsewhere, and where a
        sequence is split, tokens that are split over devices along B and S must not be put into one axis.
        """
        return self.platform == "cpu" and self.layout.parts("sequence") == self.layout.parts("residual") == 1


def with_remat(config: ApplyConfig, remat: RematChoice) -> ApplyConfig:
    """The config with layers, and for `full` also nodes, that keep no more than the setting names.

    Raises:
        UserError: for activations to be offloaded where the device's memory is the host's, and for `auto`, which the
            planner replaces before.
    """
    if remat == "auto":
        fix = "A recipe's trainings and plans choose. Here name one: none, dots, block or full."
        raise UserError("`auto` was not chosen for these devices", where="parallel.remat", fix=fix)
    if isinstance(remat, str):
        attended = policies.save_only_these_names("attended", STATISTICS)
        dots = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attended)
        policy = {"none": config.remat, "dots": dots}.get(remat, policies.nothing_saveable)
        return replace(config, remat=policy, remat_nodes=remat == "full")
    if remat.offload and config.platform == "cpu":
        fix = "Move these names to `keep`, or leave them out: they are then computed again."
        where = "parallel.remat.offload"
        raise UserError("a CPU has no other memory to offload activations to", where=where, fix=fix)
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*remat.keep, *([STATISTICS] if "attended" in (*remat.keep, *remat.offload) else [])],
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return replace(config, remat=policy)

"""How a graph is applied: dtypes, devices, attention, and what the backward pass computes again."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import checkpoint_policies as policies
from jaxtyping import Array, Int, PRNGKeyArray

from affinage.config.training import ActivationName, AttentionImplementation, Remat

# A nested dict with arrays, declarations, axes ... at its leaves. Values differ by use, the nesting does not.
PyTree: TypeAlias = dict[str, Any]
Axes: TypeAlias = tuple[str | None, ...]  # the logical axis of every dimension

HOPPER = (9, 0)  # compute capability from which cuDNN's attention knows documents by their offsets
STATISTICS = "attention_statistics"  # a kernel's log-sum-exp of scores, by name for policies of `jax.checkpoint`
# The policy that keeps all that a layer has a name for: what a recipe may name, and more.
NAMED = policies.save_only_these_names(
    *get_args(ActivationName), STATISTICS, "attention_weights", "residual", "dropout_mask", "experts_out"
)


class Layout:
    """How arrays lie on the devices: whole on one; `affinage.parallel` has the layout that splits them over a mesh."""

    def constrain(self, x: Array, axes: Axes) -> Array:
        """Pins an activation to the split that its logical axes have."""
        return x

    def resplit(self, x: Array, before: Axes, after: Axes) -> Array:
        """Pins an activation to one split, then to another: what XLA makes an all-to-all of."""
        return self.constrain(self.constrain(x, before), after)

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

        `inputs` and `outputs` are trees of logical axes of the form of the arguments and of the result. `over` are the
        logical axes that are taken apart, the others stay XLA's business; None: all of them.
        """
        return function


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, for instance (9, 0) of a Hopper; None for other devices."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


@dataclass(frozen=True)
class ApplyConfig:
    """How a graph is applied this time. Nothing here changes the result beyond rounding, except key and cache."""

    compute_dtype: Any = jnp.float32  # parameters are cast to it at use; norms, softmax and the loss stay in float32
    key: PRNGKeyArray | None = None  # of a training step: dropout, augmentations, experts' capacity; None: none
    cache: PyTree | None = None  # from `init_cache`: the batch continues the rows it holds
    from_start: bool = False  # the batch begins its rows: the cache is written and not read
    ema_params: PyTree | None = None  # the moving average of the parameters, for nodes that read it
    until: str | None = None  # compute only this node and what it needs; None: everything up to the loss
    # Places in the flattened tokens of each of R equal parts of the rows, whose logits [R, P, V] are wanted.
    logit_positions: Int[Array, "R P"] | None = None
    attention: AttentionImplementation = "auto"  # see `affinage.model.layers.attention`
    platform: str = field(default_factory=lambda: jax.default_backend())  # what is compiled for: "cpu", "gpu" or "tpu"
    capability: tuple[int, int] | None = field(default_factory=lambda: capability_of(jax.local_devices()[0]))
    remat: Callable[..., Any] | None = None  # what of each layer is kept: a policy of `jax.checkpoint`; None: all
    planned: bool = False  # traced for a plan only: choices are not logged
    layout: Layout = field(default_factory=Layout)  # how arrays lie on the devices
    ring_attention: bool = False  # where the layout splits sequences: pass keys around instead of gathering them
    layers: Callable[..., Any] | None = None  # takes the place of `apply_layers`; a pipeline is one

    @property
    def flattens(self) -> bool:
        """Whether rows and positions, if not split, are one axis in products: 1.4 times as fast on XLA:CPU."""
        return self.platform == "cpu" and self.layout.parts("sequence") == self.layout.parts("residual") == 1


def with_remat(config: ApplyConfig, remat: Remat) -> ApplyConfig:
    """The config with layers that keep no more than the setting names."""
    if isinstance(remat, str):
        attended = policies.save_only_these_names("attended", STATISTICS)
        dots = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attended)
        return replace(config, remat={"none": config.remat, "dots": dots, "block": policies.nothing_saveable}[remat])
    names = [*remat.keep, *([STATISTICS] if "attended" in remat.keep else [])]
    return replace(config, remat=policies.save_only_these_names(*names))

"""What a graph is applied with, and what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from affinage.config.parallel import ActivationName
from affinage.config.training import AttentionImplementation
from affinage.model.layout import Layout
from affinage.model.parameter import Axes, Tree
from affinage.model.product import product
from affinage.model.products import product32

HOPPER = (9, 0)  # compute capability from which cuDNN's attention knows documents by their offsets
# Names for policies of `jax.checkpoint`, beside those that a recipe may use: a kernel's log-sum-exp of scores, and what
# else a layer keeps by default.
STATISTICS = "attention_statistics"
KEPT = (STATISTICS, "attention_weights", "residual", "dropout_mask", "experts_out")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A sum over counted targets and their number, both float32 scalars. Divide once, after every sum over batches."""

    sum: Float[Array, ""]
    count: Float[Array, ""]

    def mean(self) -> Float[Array, ""]:
        """Sum over count; 0 when nothing was counted."""
        return self.sum / jnp.maximum(self.count, 1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Logits not yet multiplied out, so that a loss over a large vocabulary can do it in parts."""

    hidden: Float[Array, "*N D"]  # in the compute dtype
    kernel: Float[Array, "V D"]  # in the compute dtype
    softcap: float | None = field(default=None, metadata={"static": True})

    def array(self) -> Float[Array, "*N V"]:
        """The logits in float32."""
        return multiply_out(self.hidden, self.kernel, self.softcap)


def multiply_out(
    hidden: Float[Array, "*N D"], kernel: Float[Array, "V D"], softcap: float | None, vocabulary: int | None = None
) -> Float[Array, "*N V"]:
    """Logits in float32, see `cap`."""
    if hidden.ndim == 2 and hidden.dtype == jnp.float32:  # see `Call.flattens`
        return cap(product(hidden, kernel.T), softcap, vocabulary)
    axes = "abc"[: hidden.ndim - 1]
    return cap(product32(f"{axes}d,vd->{axes}v", hidden, kernel), softcap, vocabulary)


def cap(logits: Float[Array, "*N V"], softcap: float | None, vocabulary: int | None = None) -> Float[Array, "*N V"]:
    """Logits bounded to ±softcap by a tanh where one is given (Gemma 2), and -1e30 from the vocabulary's end on."""
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if vocabulary is None:
        return logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocabulary, logits, -1e30)


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, for instance (9, 0) of a Hopper; None for other devices."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def local_capability() -> tuple[int, int] | None:
    """The same of this process's first device."""
    return capability_of(jax.local_devices()[0]) if jax.default_backend() == "gpu" else None


@dataclass(frozen=True)
class Call:
    """How a graph is applied this time. Nothing here changes the result beyond rounding, except key and cache."""

    compute_dtype: Any = jnp.float32  # parameters are cast to it at use; norms, softmax and the loss stay in float32
    key: PRNGKeyArray | None = None  # of a training step: dropout, augmentations, experts' capacity; None: none
    cache: Tree | None = None  # from `init_cache`: the batch continues the rows it holds
    adapter_dropout: float = 0.0  # of what goes into adapters, where there are any and there is a key
    ema_params: Tree | None = None  # the moving average of the parameters, for nodes that read it
    until: str | None = None  # compute only this node and what it needs; None: everything up to the loss
    # The places of the tokens whose values are wanted in the end, in the flattened tokens of each of R equal parts of
    # the rows: of other tokens only what these look at is computed, and values come out as [R, P, ...]. None: all.
    at: Int[Array, "R P"] | None = None
    attention: AttentionImplementation = "auto"  # see `affinage.model.kinds.attention_ops`
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
            products, names = jax.checkpoint_policies.dots_with_no_batch_dims_saveable, get_args(ActivationName)
            named = jax.checkpoint_policies.save_only_these_names(*names, *KEPT)
            policy = jax.checkpoint_policies.save_from_both_policies(products, named)
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


@dataclass(frozen=True)
class Outputs:
    """Values of the computed nodes, the advanced cache, and metrics as (sum, count) pairs."""

    values: dict[str, Any]
    cache: Tree | None = None
    metrics: dict[str, tuple[Array, Array]] = field(default_factory=dict)

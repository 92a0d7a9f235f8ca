"""The training objective of language models: cross-entropy, whole or a chunk of tokens at a time."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field
from typing_extensions import override

from affinage.model.apply_config import ApplyConfig, Layout
from affinage.model.layer import TOKENS, Layer, LayerContext, Loss, Result, Shape, ShapeMismatch, register_layer
from affinage.model.parameter import PyTree
from affinage.model.products import Logits, cap, multiply_out

WHOLE_BYTES = 2**30  # `chunk: auto` computes logits in one piece up to this size in float32 on a device ...
CHUNK_TOKENS = 8192  # ... and beyond it for this many tokens of a device at a time
LOGITS = ("batch", "sequence", "vocab")
_LANES = 128  # a vocabulary's size is rounded up to a multiple of it


class Objective(NamedTuple):
    """How logits become a loss; hashable, so that it can be static."""

    z_loss: float = 0.0  # times the squared log of the softmax's denominator (PaLM, section 5)
    label_smoothing: float = 0.0  # share of the target's probability that is spread over the vocabulary
    softcap: float | None = None  # logits are bounded to ± this by a tanh
    vocabulary: int | None = None  # logits from this one on are padding; None: there is no padding
    on_cpu: bool = False


class Sums(NamedTuple):
    """Weighted sums over tokens, float32. Only the first has a gradient."""

    objective: Float[Array, ""]
    cross_entropy: Float[Array, ""]  # in nats, without what the objective adds
    correct: Float[Array, ""]  # targets that have the largest logit


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"], weights: Float[Array, "*N"], objective: Objective
) -> Sums:
    """Sums over all tokens, each times its weight; logits are float32, capped already and -1e30 where padded.

    The gradient is written by hand, because autodiff keeps three arrays of the size of the logits where two do.
    """
    return _forward(logits, targets, weights, objective)[0]


def _forward(logits: Array, targets: Array, weights: Array, objective: Objective) -> tuple[Sums, tuple[Array, ...]]:
    largest, log_z = _largest_and_log_z(logits) if not objective.on_cpu else _in_two_passes(logits)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = plain = log_z - chosen
    if objective.label_smoothing:
        number = objective.vocabulary or logits.shape[-1]
        losses += objective.label_smoothing * (chosen - jnp.mean(logits[..., :number], axis=-1))
    if objective.z_loss:
        losses += objective.z_loss * jnp.square(log_z)
    sums = (jnp.sum(values * weights) for values in (losses, plain, chosen >= largest))
    return Sums(*sums), (logits, targets, weights, log_z)


def _in_two_passes(logits: Float[Array, "*N V"]) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    largest = jnp.max(logits, axis=-1)
    return largest, largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))


def _largest_and_log_z(logits: Float[Array, "*N V"]) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    """The largest logit and the log of the softmax's denominator, read once (Milakov and Gimelshein, 2018)."""

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        largest = jnp.maximum(left[0], right[0])
        return largest, left[1] * jnp.exp(left[0] - largest) + right[1] * jnp.exp(right[0] - largest)

    start = (jnp.float32(-1e38), jnp.float32(0.0))
    largest, total = jax.lax.reduce((logits, jnp.ones_like(logits)), start, join, (logits.ndim - 1,))
    return largest, largest + jnp.log(total)


def _backward(objective: Objective, kept: tuple[Array, ...], gradient: Sums) -> tuple[Array, None, None]:
    logits, targets, weights, log_z = kept
    scale = (gradient.objective * weights)[..., None]
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits - log_z[..., None])
    if objective.z_loss:
        probabilities *= (1.0 + 2.0 * objective.z_loss * log_z)[..., None]
    wanted = (1.0 - objective.label_smoothing) * (targets[..., None] == column)
    if objective.label_smoothing:
        number = objective.vocabulary or logits.shape[-1]
        wanted += jnp.where(column < number, objective.label_smoothing / number, 0.0)
    d_logits = (probabilities - wanted) * scale
    # XLA:CPU would compute the exponentials once for each of the two products that follow.
    return jax.lax.optimization_barrier(d_logits) if objective.on_cpu else d_logits, None, None


cross_entropy.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def chunked_cross_entropy(
    hidden: Float[Array, "B S D"],
    kernel: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    objective: Objective,
    chunk: int,
    layout: Layout,
) -> Sums:
    """The same from hidden vectors, `chunk` positions at a time: [B, S, V] is never stored.

    Differentiated, it computes the gradients together with the sums, so no product is done twice: they are linear in
    the one number that comes back.
    """

    def one(total: Sums, part: tuple[Array, ...]) -> tuple[Sums, None]:
        h, t, w = part
        logits = multiply_out(h, kernel, objective.softcap, objective.vocabulary)
        return jax.tree.map(jnp.add, total, cross_entropy(logits, t, w, objective)), None

    return jax.lax.scan(one, _no_sums(), chunks(chunk, hidden, targets, weights))[0]


def _chunked_forward(
    hidden: Array, kernel: Array, targets: Array, weights: Array, objective: Objective, chunk: int, layout: Layout
) -> tuple[Sums, tuple[Array, Array]]:
    copies = layout.parts("batch")  # each device adds up the kernel's gradient of its rows; they are summed once

    def apart(x: Array) -> Array:
        return layout.constrain(x.reshape(copies, -1, *x.shape[1:]), ("batch", *(None,) * x.ndim))

    def one(carry: tuple[Sums, Array], part: tuple[Array, ...]) -> tuple[tuple[Sums, Array], Array]:
        (total, d_kernel), (h, t, w) = carry, part

        def of_logits(logits: Array) -> tuple[Array, Sums]:
            sums = cross_entropy(cap(logits, objective.softcap, objective.vocabulary), t, w, objective)
            return sums.objective, sums

        logits = jnp.einsum("bcd,vd->bcv", h, kernel, preferred_element_type=jnp.float32)
        d_logits, sums = jax.grad(of_logits, has_aux=True)(logits)
        d_logits = d_logits.astype(h.dtype)
        d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, kernel)
        more = jnp.einsum("pbcv,pbcd->pvd", apart(d_logits), apart(h), preferred_element_type=jnp.float32)
        return (jax.tree.map(jnp.add, total, sums), d_kernel + more), d_hidden

    start = layout.constrain(jnp.zeros((copies, *kernel.shape), jnp.float32), ("batch", "vocab", None))
    (sums, d_kernel), d_hidden = jax.lax.scan(one, (_no_sums(), start), chunks(chunk, hidden, targets, weights))
    batch, length, width = hidden.shape
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(batch, -1, width)[:, :length]
    return sums, (d_hidden, jnp.sum(d_kernel, axis=0).astype(kernel.dtype))


def _chunked_backward(
    objective: Objective, chunk: int, layout: Layout, kept: tuple[Array, Array], gradient: Sums
) -> tuple[Array, Array, None, None]:
    d_hidden, d_kernel = (part * gradient.objective.astype(part.dtype) for part in kept)
    return d_hidden, d_kernel, None, None


chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)


def _no_sums() -> Sums:
    return Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))


def chunks(chunk: int, *arrays: Array) -> tuple[Array, ...]:
    """[B, S, ...] as [S / chunk, B, chunk, ...]; the last chunk is filled with zeros."""

    def split(x: Array) -> Array:
        missing = -x.shape[1] % chunk
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return tuple(split(array) for array in arrays)


def positions_at_once(setting: int | str, rows: int, length: int, vocabulary: int, layout: Layout) -> int:
    """Positions of all rows whose logits exist at once, of a `chunk` in tokens of a device; 0: all of them."""
    tokens: int = CHUNK_TOKENS if isinstance(setting, str) else setting
    if isinstance(setting, str) and rows * length * vocabulary * 4 <= WHOLE_BYTES * layout.parts(*LOGITS):
        return 0
    rows_here = -(-rows // layout.parts("batch"))
    positions = max(1, tokens // rows_here)
    return positions if tokens > 0 and positions < length else 0


def padded(kernel: Float[Array, "V D"], config: ApplyConfig) -> tuple[Float[Array, "W D"], int | None]:
    """The kernel with zeros up to a number of rows that matrix units like, and where these begin; None: nowhere."""
    missing = -len(kernel) % _LANES
    if config.platform == "cpu" or not missing or config.layout.parts("vocab") > 1:
        return kernel, None
    return jnp.pad(kernel, ((0, missing), (0, 0))), len(kernel)


def next_tokens(tokens: Int[Array, "B S"], batch: Mapping[str, Array]) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
    """Targets and their weights: position t predicts token t + 1 of the same document where `loss_mask` says so."""
    targets = jnp.roll(tokens, -1, axis=1)
    mask = batch.get("loss_mask")
    weights = jnp.ones(tokens.shape, jnp.float32) if mask is None else jnp.roll(mask, -1, axis=1).astype(jnp.float32)
    segments = batch.get("segment_ids")
    if segments is not None:
        weights = weights * (jnp.roll(segments, -1, axis=1) == segments)
    return targets, weights.at[:, -1].set(0.0)


def whole_row_targets(
    tokens: Int[Array, "B S"], batch: Mapping[str, Array], config: ApplyConfig
) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
    """`next_tokens` of whole rows: where sequences are split, a target may lie on the next device."""
    targets, weights = (config.constrain(array, ("batch", None)) for array in next_tokens(tokens, batch))
    return targets, weights


def expect_logits_and_tokens(inputs: tuple[Shape, ...]) -> None:
    """Raise ShapeMismatch unless the inputs are logits [B, S, V] and token ids [B, S]."""
    logits, tokens = inputs
    if tokens != TOKENS:
        raise ShapeMismatch(f"expected token ids [B, S] int as second input, got {tokens}")
    if len(logits.dims) != 3:
        raise ShapeMismatch(f"expected logits [B, S, vocabulary] as first input, got {logits}")


@register_layer("next_token_loss")
class NextTokenLoss(Layer):
    """Cross-entropy of the next token in nats, summed over the counted targets."""

    takes = ("logits", "tokens")
    is_loss = True
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-denominator of the softmax; PaLM has 1e-4."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target spread over the vocabulary."""
    chunk: int | Literal["auto"] = "auto"
    """Tokens of a device whose logits exist at once; 0: all; auto: all up to 1 GiB of logits, else 8192."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        expect_logits_and_tokens(inputs)
        return Shape(())

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        logits, tokens = inputs
        targets, weights = whole_row_targets(tokens, context.batch, context.config)
        count = jnp.sum(weights)
        sums = self._sums(logits, targets, weights, context.config)
        plain, correct = jax.lax.stop_gradient((sums.cross_entropy, sums.correct))
        metrics = {"cross_entropy": (plain, count), "accuracy": (correct, count)}
        return Result(Loss(sums.objective, count), metrics=metrics)

    def _sums(self, logits: Any, targets: Array, weights: Array, config: ApplyConfig) -> Sums:
        on_cpu = config.platform == "cpu"
        if not isinstance(logits, Logits):
            objective = Objective(self.z_loss, self.label_smoothing, on_cpu=on_cpu)
            return cross_entropy(logits.astype(jnp.float32), targets, weights, objective)
        hidden, softcap = logits.hidden, logits.softcap
        kernel, vocabulary = padded(logits.kernel, config)
        objective = Objective(self.z_loss, self.label_smoothing, softcap, vocabulary, on_cpu)
        rows, length = targets.shape
        chunk = positions_at_once(self.chunk, rows, length, len(kernel), config.layout)
        if chunk:
            return chunked_cross_entropy(hidden, kernel, targets, weights, objective, chunk, config.layout)
        if config.flattens:
            hidden, targets, weights = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1)
        return cross_entropy(multiply_out(hidden, kernel, softcap, vocabulary), targets, weights, objective)

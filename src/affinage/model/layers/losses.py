"""The objectives of language models: the next token's cross-entropy, and pairs of better and worse answers (DPO)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.model.apply_config import ApplyConfig, Layout, PyTree
from affinage.model.layer import BATCH, TOKENS, Layer, LayerContext, Loss, Result, Shape, ShapeMismatch, register_layer
from affinage.model.layers.embedding import multiply_out, without_padding

WHOLE_BYTES = 2**30  # `chunk: auto` computes logits in one piece up to this size in float32 on a device ...
CHUNK_TOKENS = 8192  # ... and beyond it for this many tokens of a device at a time
REFERENCE = "reference_log_probabilities"  # of the batch: float32 [B, documents], by the model that training began with
_LANES = 128  # a vocabulary's size is rounded up to a multiple of it


class Sums(NamedTuple):
    """Weighted sums over tokens, float32. Only the first has a gradient."""

    cross_entropy: Float[Array, ""]  # in nats
    correct: Float[Array, ""]  # targets that have the largest logit


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"], weights: Float[Array, "*N"], on_cpu: bool = False
) -> Sums:
    """Sums over tokens times their weights, of float32 logits; autodiff would keep three arrays of their size."""
    return _forward(logits, targets, weights, on_cpu)[0]


def _forward(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"], weights: Float[Array, "*N"], on_cpu: bool
) -> tuple[Sums, tuple[Array, ...]]:
    if on_cpu:
        largest = jnp.max(logits, axis=-1)
        total = jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)
    else:  # in one reduction, which XLA:CPU does not vectorize
        start = (jnp.float32(-1e38), jnp.float32(0.0))
        largest, total = jax.lax.reduce((logits, jnp.ones_like(logits)), start, _joined_sums, (logits.ndim - 1,))
    log_z = largest + jnp.log(total)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    sums = Sums(jnp.sum((log_z - chosen) * weights), jnp.sum((chosen >= largest) * weights))
    return sums, (logits, targets, weights, log_z)


def _joined_sums(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """The largest and the sum of exponentials, relative to it, of two parts (Milakov and Gimelshein, 2018)."""
    ahead = left[0] - right[0]
    part = jnp.exp(-jnp.abs(ahead))  # one exponential, where two would take longer than reading the logits
    return jnp.maximum(left[0], right[0]), jnp.where(ahead > 0, left[1] + part * right[1], part * left[1] + right[1])


def _backward(on_cpu: bool, saved: tuple[Array, ...], gradient: Sums) -> tuple[Float[Array, "*N V"], None, None]:
    logits, targets, weights, log_z = saved
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    d_logits = jnp.exp(logits - log_z[..., None]) - (targets[..., None] == column)
    d_logits = d_logits * (gradient.cross_entropy * weights)[..., None]
    # XLA:CPU would compute the exponentials once for each of the two products that follow.
    return jax.lax.optimization_barrier(d_logits) if on_cpu else d_logits, None, None


cross_entropy.defvjp(_forward, _backward)


class _Parts(NamedTuple):  # hashable, so that it can be static
    chunk: int  # positions of all rows at once
    layout: Layout
    vocabulary: int | None  # logits from this one on are padding; None: there is no padding
    on_cpu: bool


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def chunked_cross_entropy(
    hidden: Float[Array, "B S D"],
    kernel: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    parts: _Parts,
) -> Sums:
    """The same from hidden vectors, `chunk` positions at a time: [B, S, V] is never stored.

    It computes the gradients together with the sums, so no product is done twice: they are linear in the one number
    that comes back. Of a program without a gradient XLA leaves them out.
    """
    return _chunked_forward(hidden, kernel, targets, weights, parts)[0]


def _chunked_forward(
    hidden: Array, kernel: Array, targets: Array, weights: Array, parts: _Parts
) -> tuple[Sums, tuple[Array, Array]]:
    layout = parts.layout
    copies = layout.parts("batch")  # each device adds up the kernel's gradient of its rows; they are summed once

    def apart(x: Array) -> Array:
        return layout.constrain(x.reshape(copies, -1, *x.shape[1:]), ("batch", *(None,) * x.ndim))

    def one(carry: tuple[Sums, Array], part: tuple[Array, ...]) -> tuple[tuple[Sums, Array], Array]:
        (total, d_kernel), (h, t, w) = carry, part
        logits = jnp.einsum("bcd,vd->bcv", h, kernel, preferred_element_type=jnp.float32)
        sums, saved = _forward(without_padding(logits, parts.vocabulary), t, w, parts.on_cpu)
        d_logits = _backward(parts.on_cpu, saved, Sums(jnp.float32(1.0), jnp.float32(0.0)))[0].astype(h.dtype)
        d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, kernel)
        more = jnp.einsum("pbcv,pbcd->pvd", apart(d_logits), apart(h), preferred_element_type=jnp.float32)
        return (jax.tree.map(jnp.add, total, sums), d_kernel + more), d_hidden

    nothing = Sums(jnp.float32(0.0), jnp.float32(0.0))
    start = nothing, layout.constrain(jnp.zeros((copies, *kernel.shape), jnp.float32), ("batch", "vocab", None))
    in_chunks = tuple(_split(x, parts.chunk) for x in (hidden, targets, weights))
    (sums, d_kernel), d_hidden = jax.lax.scan(one, start, in_chunks)
    d_hidden = _joined(d_hidden, hidden.shape[1])
    return sums, (d_hidden, jnp.sum(d_kernel, axis=0).astype(kernel.dtype))


def _chunked_backward(parts: _Parts, saved: tuple[Array, Array], gradient: Sums) -> tuple[Array, Array, None, None]:
    d_hidden, d_kernel = (part * gradient.cross_entropy.astype(part.dtype) for part in saved)
    return d_hidden, d_kernel, None, None


chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)


def _split(x: Float[Array, "B S ..."], chunk: int) -> Float[Array, "C B c ..."]:
    """Chunks of positions; the last one is filled with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _joined(x: Float[Array, "C B c ..."], length: int) -> Float[Array, "B S ..."]:
    """The reverse of `_split`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])[:, :length]


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


class _OfLogits(Layer):
    takes = ("logits", "tokens")
    chunk: int | Literal["auto"] = "auto"
    """Tokens of a device whose logits exist at once; 0: all; auto: all up to 1 GiB of logits, else 8192."""

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        if inputs[1] != TOKENS or len(inputs[0].dims) != 3:
            got = " and ".join(map(str, inputs))
            raise ShapeMismatch(f"expected logits [B, S, vocabulary] and token ids [B, S] int, got {got}")
        return Shape(())

    def _targets(
        self, tokens: Int[Array, "B S"], context: LayerContext
    ) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
        """Targets and weights of whole rows: where sequences are split, a target may lie on the next device."""
        targets, weights = next_tokens(tokens, context.batch)
        pin = context.config.layout.constrain
        return pin(targets, ("batch", None)), pin(weights, ("batch", None))

    def _chunk(self, targets: Int[Array, "B S"], vocabulary: int, layout: Layout) -> int:
        """Positions of all rows whose logits exist at once; 0: all of them."""
        rows, length = targets.shape
        tokens = CHUNK_TOKENS if isinstance(self.chunk, str) else self.chunk
        bytes_at_once = rows * length * vocabulary * 4 / layout.parts("batch", "sequence", "vocab")
        if tokens == 0 or (self.chunk == "auto" and bytes_at_once <= WHOLE_BYTES):
            return 0
        positions = max(1, tokens // -(-rows // layout.parts("batch")))
        return positions if positions < length else 0


@register_layer("next_token_loss")
class NextTokenLoss(_OfLogits):
    """Cross-entropy of the next token in nats, summed over the counted targets."""

    is_loss = True

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        logits, tokens = inputs
        targets, weights = self._targets(tokens, context)
        config, count, on_cpu = context.config, jnp.sum(weights), context.config.platform == "cpu"
        hidden, (kernel, vocabulary) = logits.hidden, padded(logits.kernel, config)
        if chunk := self._chunk(targets, len(kernel), config.layout):
            parts = _Parts(chunk, config.layout, vocabulary, on_cpu)
            sums = chunked_cross_entropy(hidden, kernel, targets, weights, parts)
        else:
            if config.flattens:
                hidden, targets, weights = (x.reshape(-1, *x.shape[2:]) for x in (hidden, targets, weights))
            sums = cross_entropy(multiply_out(hidden, kernel, vocabulary, config.flattens), targets, weights, on_cpu)
        plain, correct = jax.lax.stop_gradient(sums)
        metrics = {"cross_entropy": (plain, count), "accuracy": (correct, count)}
        return Result(Loss(sums.cross_entropy, count), metrics=metrics)


@register_layer("document_log_probabilities")
class DocumentLogProbabilities(_OfLogits):
    """For each of the first documents of a row the log-probability of its counted targets, summed, and their number.

    [B, documents, 2] float32; documents that are not there have zeros. Targets count as in `next_token_loss`.
    """

    documents: int = Field(ge=2, multiple_of=2)
    """Of a row at most, in pairs; a batch says by `segment_ids` where each lies."""

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        super().shape(inputs)
        return Shape((BATCH, self.documents, 2))

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B N 2"]:
        logits, tokens = inputs
        targets, weights = self._targets(tokens, context)
        kernel, vocabulary = padded(logits.kernel, context.config)

        @jax.checkpoint  # the backward pass computes the logits again instead of keeping them
        def log_probabilities(part: tuple[Array, Array]) -> Array:
            hidden, target = part
            values = multiply_out(hidden, kernel, vocabulary)
            return jnp.take_along_axis(values, target[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(values, axis=-1)

        if chunk := self._chunk(targets, len(logits.kernel), context.config.layout):
            in_chunks = (_split(logits.hidden, chunk), _split(targets, chunk))
            of_targets = _joined(jax.lax.map(log_probabilities, in_chunks), targets.shape[1])
        else:
            of_targets = log_probabilities((logits.hidden, targets))
        segments = context.batch.get("segment_ids")
        ids = jnp.zeros_like(tokens) if segments is None else segments - segments[:, :1]
        belongs = ids[..., None] == jnp.arange(self.documents, dtype=ids.dtype)[None, None]
        summed = jnp.stack([of_targets * weights, weights], axis=-1)
        return jnp.einsum("bsk,bsn->bnk", summed, belongs.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


@register_layer("preference_loss")
class PreferenceLoss(Layer):
    """The loss of direct preference optimization, summed over pairs; document 2k of a row is chosen, 2k + 1 rejected.

    It is -log sigmoid(beta d) with d = (log p(chosen) - log p(rejected)) - (the same of the reference) (Rafailov et
    al., 2023, equation 7). The metrics are TRL's. The batch brings `reference_log_probabilities` [B, documents].
    """

    takes = ("log_probabilities",)
    is_loss = True
    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to the reference; TRL's default."""

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        if len(inputs[0].dims) != 3 or inputs[0].width != 2:
            raise ShapeMismatch(f"expected log-probabilities [B, documents, 2], got {inputs[0]}")
        return Shape(())

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        policy, counts = inputs[0][..., 0], inputs[0][..., 1]
        change = policy - context.batch[REFERENCE].astype(jnp.float32)
        losses = -jax.nn.log_sigmoid(self.beta * (change[:, 0::2] - change[:, 1::2]))
        there = (counts[:, 0::2] > 0) & (counts[:, 1::2] > 0)
        rewards, pairs = self.beta * change, jnp.sum(there.astype(jnp.float32))
        margins = rewards[:, 0::2] - rewards[:, 1::2]
        values = {
            "rewards/chosen": rewards[:, 0::2],
            "rewards/rejected": rewards[:, 1::2],
            "rewards/accuracies": (margins > 0).astype(jnp.float32),
            "rewards/margins": margins,
            "logps/chosen": policy[:, 0::2],
            "logps/rejected": policy[:, 1::2],
        }
        metrics = {name: (jnp.sum(each, where=there), pairs) for name, each in jax.lax.stop_gradient(values).items()}
        return Result(Loss(jnp.sum(losses, where=there), pairs), metrics=metrics)

"""The objectives of language models: the next token's cross-entropy, and pairs of better and worse answers (DPO)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field
from typing_extensions import override

from affinage.model.apply_config import ApplyConfig, Layout
from affinage.model.layer import BATCH, TOKENS, Layer, LayerContext, Loss, Result, Shape, ShapeMismatch, register_layer
from affinage.model.parameter import PyTree
from affinage.model.products import Logits, cap, multiply_out

WHOLE_BYTES = 2**30  # `chunk: auto` computes logits in one piece up to this size in float32 on a device ...
CHUNK_TOKENS = 8192  # ... and beyond it for this many tokens of a device at a time
LOGITS = ("batch", "sequence", "vocab")
REFERENCE = "reference_log_probabilities"  # of the batch: float32 [B, documents], by the model that training began with
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
    if objective.on_cpu:
        largest = jnp.max(logits, axis=-1)
        log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    else:
        largest, log_z = _largest_and_log_z(logits)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = plain = log_z - chosen
    if objective.label_smoothing:
        number = objective.vocabulary or logits.shape[-1]
        losses += objective.label_smoothing * (chosen - jnp.mean(logits[..., :number], axis=-1))
    if objective.z_loss:
        losses += objective.z_loss * jnp.square(log_z)
    sums = (jnp.sum(values * weights) for values in (losses, plain, chosen >= largest))
    return Sums(*sums), (logits, targets, weights, log_z)


def _largest_and_log_z(logits: Float[Array, "*N V"]) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    """The largest logit and the log of the softmax's denominator, read once (Milakov and Gimelshein, 2018)."""

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        largest = jnp.maximum(left[0], right[0])
        return largest, left[1] * jnp.exp(left[0] - largest) + right[1] * jnp.exp(right[0] - largest)

    start = (jnp.float32(-1e38), jnp.float32(0.0))
    largest, total = jax.lax.reduce((logits, jnp.ones_like(logits)), start, join, (logits.ndim - 1,))
    return largest, largest + jnp.log(total)


def _backward(objective: Objective, saved: tuple[Array, ...], gradient: Sums) -> tuple[Array, None, None]:
    logits, targets, weights, log_z = saved
    scale = (gradient.objective * weights)[..., None]
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits - log_z[..., None])
    if objective.z_loss:
        probabilities *= (1.0 + 2.0 * objective.z_loss * log_z)[..., None]
    desired = (1.0 - objective.label_smoothing) * (targets[..., None] == column)
    if objective.label_smoothing:
        number = objective.vocabulary or logits.shape[-1]
        desired += jnp.where(column < number, objective.label_smoothing / number, 0.0)
    d_logits = (probabilities - desired) * scale
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
    objective: Objective, chunk: int, layout: Layout, saved: tuple[Array, Array], gradient: Sums
) -> tuple[Array, Array, None, None]:
    d_hidden, d_kernel = (part * gradient.objective.astype(part.dtype) for part in saved)
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

    def _check(self, inputs: tuple[Shape, ...]) -> None:
        logits, tokens = inputs
        if tokens != TOKENS:
            raise ShapeMismatch(f"expected token ids [B, S] int as second input, got {tokens}")
        if len(logits.dims) != 3:
            raise ShapeMismatch(f"expected logits [B, S, vocabulary] as first input, got {logits}")

    def _targets(self, tokens: Array, context: LayerContext) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
        """Targets and weights of whole rows: where sequences are split, a target may lie on the next device."""
        targets, weights = next_tokens(tokens, context.batch)
        pin = context.config.constrain
        return pin(targets, ("batch", None)), pin(weights, ("batch", None))

    def _chunk(self, targets: Array, vocabulary: int, layout: Layout) -> int:
        """Positions of all rows whose logits exist at once; 0: all of them."""
        rows, length = targets.shape
        tokens = CHUNK_TOKENS if isinstance(self.chunk, str) else self.chunk
        if self.chunk == "auto" and rows * length * vocabulary * 4 <= WHOLE_BYTES * layout.parts(*LOGITS):
            return 0
        positions = max(1, tokens // -(-rows // layout.parts("batch")))
        return positions if tokens > 0 and positions < length else 0


@register_layer("next_token_loss")
class NextTokenLoss(_OfLogits):
    """Cross-entropy of the next token in nats, summed over the counted targets."""

    is_loss = True
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-denominator of the softmax; PaLM has 1e-4."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target spread over the vocabulary."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        self._check(inputs)
        return Shape(())

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        logits, tokens = inputs
        targets, weights = self._targets(tokens, context)
        count = jnp.sum(weights)
        sums = self._sums(logits, targets, weights, context.config)
        plain, correct = jax.lax.stop_gradient((sums.cross_entropy, sums.correct))
        metrics = {"cross_entropy": (plain, count), "accuracy": (correct, count)}
        return Result(Loss(sums.objective, count), metrics=metrics)

    def _sums(self, logits: Any, targets: Array, weights: Array, config: ApplyConfig) -> Sums:
        objective = Objective(self.z_loss, self.label_smoothing, on_cpu=config.platform == "cpu")
        if not isinstance(logits, Logits):
            return cross_entropy(logits.astype(jnp.float32), targets, weights, objective)
        hidden, softcap = logits.hidden, logits.softcap
        kernel, vocabulary = padded(logits.kernel, config)
        objective = objective._replace(softcap=softcap, vocabulary=vocabulary)
        if chunk := self._chunk(targets, len(kernel), config.layout):
            return chunked_cross_entropy(hidden, kernel, targets, weights, objective, chunk, config.layout)
        if config.flattens:
            hidden, targets, weights = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1)
        return cross_entropy(multiply_out(hidden, kernel, softcap, vocabulary), targets, weights, objective)


# ---- preference pairs ----


@register_layer("document_log_probabilities")
class DocumentLogProbabilities(_OfLogits):
    """For each of the first documents of a row, sums over its counted targets: log-probability, number, mean logit.

    [B, documents, 3] float32; documents that are not there have zeros. Targets count as in `next_token_loss`. The mean
    is over the vocabulary and has no gradient.
    """

    documents: int = Field(ge=1)
    """Of a row at most; a batch says by `segment_ids` where each lies."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        self._check(inputs)
        return Shape((BATCH, self.documents, 3))

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B N 3"]:
        logits, tokens = inputs
        targets, weights = self._targets(tokens, context)
        if isinstance(logits, Logits):
            chunk = self._chunk(targets, len(logits.kernel), context.config.layout)
            found, means = _readings(logits, targets, chunk, context.config)
        else:
            whole = logits.astype(jnp.float32)
            found = jnp.take_along_axis(jax.nn.log_softmax(whole, axis=-1), targets[..., None], axis=-1)[..., 0]
            means = jnp.mean(jax.lax.stop_gradient(whole), axis=-1)
        segments = context.batch.get("segment_ids")
        ids = jnp.zeros_like(tokens) if segments is None else segments - segments[:, :1]
        belongs = ids[..., None] == jnp.arange(self.documents, dtype=ids.dtype)[None, None]
        summed = jnp.stack([found * weights, weights, means * weights], axis=-1)
        return jnp.einsum("bsk,bsn->bnk", summed, belongs.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _readings(
    logits: Logits, targets: Int[Array, "B S"], chunk: int, config: ApplyConfig
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """The log-probability of every target, and the mean of the logits there (which has no gradient).

    `chunk` positions have their logits at once (0: all); the backward pass makes them again instead of keeping them,
    so that [B, S, V] is never stored. Where nothing caps the logits, their mean is that of the kernel's rows times the
    hidden vector, and no logit is read for it.
    """
    fixed, softcap, number = jax.lax.stop_gradient, logits.softcap, len(logits.kernel)
    kernel, vocabulary = padded(logits.kernel, config)
    row = None if softcap is not None else jnp.sum(fixed(kernel).astype(jnp.float32), axis=0) / number

    @jax.checkpoint
    def one(h: Array, t: Array) -> tuple[Array, Array]:
        values = multiply_out(h, kernel, softcap, vocabulary)
        found = jnp.take_along_axis(values, t[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(values, axis=-1)
        if row is None:
            return found, jnp.mean(fixed(values[..., :number]), axis=-1)
        return found, jnp.dot(fixed(h).astype(jnp.float32), row, precision=jax.lax.Precision.HIGHEST)

    batch, length = targets.shape
    if not chunk:
        return one(logits.hidden, targets)
    found = jax.lax.map(lambda part: one(*part), chunks(chunk, logits.hidden, targets))
    log_probabilities, means = (jnp.moveaxis(parts, 0, 1).reshape(batch, -1)[:, :length] for parts in found)
    return log_probabilities, means


@register_layer("preference_loss")
class PreferenceLoss(Layer):
    """The loss of direct preference optimization, summed over pairs; document 2k of a row is chosen, 2k + 1 rejected.

    With d = (log p(chosen) - log p(rejected)) - (the same of the reference), `sigmoid` is -log sigmoid(beta d)
    (Rafailov et al., 2023, equation 7), with label smoothing e (1 - e) of it and e of -log sigmoid(-beta d) (Mitchell,
    2023); `ipo` is (d - 1 / (2 beta))^2 with log-probabilities that are means over tokens (Azar et al., 2023).
    The metrics are TRL's. The batch brings `reference_log_probabilities` [B, documents].
    """

    takes = ("log_probabilities",)
    is_loss = True
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's own, or IPO's square."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to the reference; TRL's default."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose labels may be the wrong way round."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        dims = inputs[0].dims
        if len(dims) != 3 or dims[2] != 3 or not isinstance(dims[1], int) or dims[1] % 2:
            raise ShapeMismatch(f"expected log-probabilities [B, an even number of documents, 3], got {inputs[0]}")
        return Shape(())

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        policy, counts, logits = (inputs[0][..., index] for index in range(3))
        change = policy - context.batch[REFERENCE].astype(jnp.float32)
        there = (counts[:, 0::2] > 0) & (counts[:, 1::2] > 0)
        if self.form == "ipo":
            losses = jnp.square(_margin(change / jnp.maximum(counts, 1.0)) - 1.0 / (2.0 * self.beta))
        else:
            scaled, e = self.beta * _margin(change), self.label_smoothing
            losses = -(1.0 - e) * jax.nn.log_sigmoid(scaled) - e * jax.nn.log_sigmoid(-scaled)
        rewards, log_probs, logits = jax.lax.stop_gradient((self.beta * change, policy, logits))
        values = {
            "rewards/chosen": rewards[:, 0::2],
            "rewards/rejected": rewards[:, 1::2],
            "rewards/accuracies": (_margin(rewards) > 0).astype(jnp.float32),
            "rewards/margins": _margin(rewards),
            "logps/chosen": log_probs[:, 0::2],
            "logps/rejected": log_probs[:, 1::2],
        }

        def total(values: Float[Array, "B N/2"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(there, values, 0.0))

        pairs = jnp.sum(there.astype(jnp.float32))
        metrics = {name: (total(each), pairs) for name, each in values.items()}
        for side, name in enumerate(("logits/chosen", "logits/rejected")):  # means over tokens, not over answers
            metrics[name] = (total(logits[:, side::2]), total(counts[:, side::2]))
        return Result(Loss(total(losses), pairs), metrics=metrics)


def _margin(values: Float[Array, "B N"]) -> Float[Array, "B N/2"]:
    return values[:, 0::2] - values[:, 1::2]

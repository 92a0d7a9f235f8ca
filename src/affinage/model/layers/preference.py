"""Learning from pairs of a better and a worse answer (DPO), as two nodes after the logits."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field
from typing_extensions import override

from affinage.model.apply_config import ApplyConfig
from affinage.model.layer import BATCH, Layer, LayerContext, Loss, Result, Shape, ShapeMismatch, register_layer
from affinage.model.layers.losses import chunks, expect_logits_and_tokens, padded, positions_at_once, whole_row_targets
from affinage.model.parameter import PyTree
from affinage.model.products import Logits, multiply_out

REFERENCE = "reference_log_probabilities"  # of the batch: float32 [B, documents], by the model that training began with


class TokenReadings(NamedTuple):
    """What is read of the logits at every position, float32. Only the first has a gradient."""

    log_probabilities: Float[Array, "B S"]  # of the targets
    mean_logits: Float[Array, "B S"]  # over the vocabulary


def token_readings(logits: Logits, targets: Int[Array, "B S"], chunk: int, config: ApplyConfig) -> TokenReadings:
    """The log-probability of every target, and the mean of the logits there, from hidden vectors.

    `chunk` positions have their logits at once (0: all); the backward pass makes them again instead of keeping them,
    so that [B, S, V] is never stored. Where nothing caps the logits, their mean is that of the kernel's rows times the
    hidden vector, and no logit is read for it.
    """
    fixed, softcap, number = jax.lax.stop_gradient, logits.softcap, len(logits.kernel)
    kernel, vocabulary = padded(logits.kernel, config)
    row = None if softcap is not None else jnp.sum(fixed(kernel).astype(jnp.float32), axis=0) / number

    @jax.checkpoint
    def one(h: Array, t: Array) -> TokenReadings:
        values = multiply_out(h, kernel, softcap, vocabulary)
        found = jnp.take_along_axis(values, t[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(values, axis=-1)
        if row is None:
            return TokenReadings(found, jnp.mean(fixed(values[..., :number]), axis=-1))
        return TokenReadings(found, jnp.dot(fixed(h).astype(jnp.float32), row, precision=jax.lax.Precision.HIGHEST))

    batch, length = targets.shape
    if not 0 < chunk < length:
        return one(logits.hidden, targets)
    h, t = chunks(chunk, logits.hidden, targets)
    found = jax.lax.map(lambda part: one(*part), (h, t))
    return jax.tree.map(lambda parts: jnp.moveaxis(parts, 0, 1).reshape(batch, -1)[:, :length], found)


@register_layer("document_log_probabilities")
class DocumentLogProbabilities(Layer):
    """For each of the first documents of a row, sums over its counted targets: log-probability, number, mean logit.

    [B, documents, 3] float32; documents that are not there have zeros. Targets count as in `next_token_loss`. The mean
    is over the vocabulary and has no gradient.
    """

    takes = ("logits", "tokens")
    documents: int = Field(ge=1)
    """Of a row at most; a batch says by `segment_ids` where each lies."""
    chunk: int | Literal["auto"] = "auto"
    """Tokens of a device whose logits exist at once; 0: all; auto: all up to 1 GiB of logits, else 8192."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        expect_logits_and_tokens(inputs)
        return Shape((BATCH, self.documents, 3))

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B N 3"]:
        logits, tokens = inputs
        targets, weights = whole_row_targets(tokens, context.batch, context.config)
        if isinstance(logits, Logits):
            rows, length = targets.shape
            chunk = positions_at_once(self.chunk, rows, length, len(logits.kernel), context.config.layout)
            found = token_readings(logits, targets, chunk, context.config)
        else:
            whole = logits.astype(jnp.float32)
            normal = jax.nn.log_softmax(whole, axis=-1)
            told = jnp.take_along_axis(normal, targets[..., None], axis=-1)[..., 0]
            found = TokenReadings(told, jnp.mean(jax.lax.stop_gradient(whole), axis=-1))
        segments = context.batch.get("segment_ids")
        ids = jnp.zeros_like(tokens) if segments is None else segments - segments[:, :1]
        belongs = ids[..., None] == jnp.arange(self.documents, dtype=ids.dtype)[None, None]
        summed = jnp.stack([found.log_probabilities * weights, weights, found.mean_logits * weights], axis=-1)
        return jnp.einsum("bsk,bsn->bnk", summed, belongs.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


@register_layer("preference_loss")
class PreferenceLoss(Layer):
    """The loss of direct preference optimisation, summed over pairs; document 2k of a row is chosen, 2k + 1 rejected.

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
        (given,) = inputs
        if len(given.dims) != 3 or given.dims[2] != 3 or not isinstance(given.dims[1], int) or given.dims[1] % 2:
            raise ShapeMismatch(f"expected log-probabilities [B, an even number of documents, 3], got {given}")
        return Shape(())

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        (given,) = inputs
        policy, counts, logits = given[..., 0], given[..., 1], given[..., 2]
        reference = context.batch[REFERENCE].astype(jnp.float32)
        there = (counts[:, 0::2] > 0) & (counts[:, 1::2] > 0)
        if self.form == "ipo":
            means = 1.0 / jnp.maximum(counts, 1.0)
            margin = _margin((policy - reference) * means)
            losses = jnp.square(margin - 1.0 / (2.0 * self.beta))
        else:
            scaled = self.beta * _margin(policy - reference)
            e = self.label_smoothing
            losses = -(1.0 - e) * jax.nn.log_sigmoid(scaled) - e * jax.nn.log_sigmoid(-scaled)
        rewards = jax.lax.stop_gradient(self.beta * (policy - reference))
        chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
        pairs = jnp.sum(there.astype(jnp.float32))
        fixed = jax.lax.stop_gradient(policy)
        told = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
            "rewards/margins": chosen - rejected,
            "logps/chosen": fixed[:, 0::2],
            "logps/rejected": fixed[:, 1::2],
        }
        metrics = {name: (jnp.sum(jnp.where(there, values, 0.0)), pairs) for name, values in told.items()}
        for side, name in enumerate(("logits/chosen", "logits/rejected")):  # means over tokens, not over answers
            sums = (jnp.where(there, values[:, side::2], 0.0) for values in (jax.lax.stop_gradient(logits), counts))
            total, tokens = map(jnp.sum, sums)
            metrics[name] = (total, tokens)
        return Result(Loss(jnp.sum(jnp.where(there, losses, 0.0)), pairs), metrics=metrics)


def _margin(values: Float[Array, "B N"]) -> Float[Array, "B N/2"]:
    return values[:, 0::2] - values[:, 1::2]

"""The training objective of language models."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from affinage.model.call import Logits, Loss
from affinage.model.kind import Context, NodeKind, Result, node_kind
from affinage.model.parameter import Tree
from affinage.model.shape import TOKENS, Shape, ShapeMismatch


def next_tokens(tokens: Int[Array, "B S"], batch: dict[str, Array]) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
    """Targets and their weights: position t predicts token t + 1 of the same document where `loss_mask` says so."""
    targets = jnp.roll(tokens, -1, axis=1)
    mask = batch.get("loss_mask")
    weights = jnp.ones(tokens.shape, jnp.float32) if mask is None else jnp.roll(mask, -1, axis=1).astype(jnp.float32)
    segments = batch.get("segment_ids")
    if segments is not None:
        weights = weights * (jnp.roll(segments, -1, axis=1) == segments)
    return targets, weights.at[:, -1].set(0.0)


@node_kind("next_token_loss")
class NextTokenLoss(NodeKind):
    """Cross-entropy of the next token in nats, summed over the counted targets."""

    takes = ("logits", "tokens")
    is_loss = True

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        logits, tokens = inputs
        if tokens != TOKENS:
            raise ShapeMismatch(f"expected token ids [B, S] int as second input, got {tokens}")
        if len(logits.dims) != 3:
            raise ShapeMismatch(f"expected logits [B, S, vocabulary] as first input, got {logits}")
        return Shape(())

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Result:
        logits, tokens = inputs
        targets, weights = next_tokens(tokens, dict(context.batch))
        array = logits.array() if isinstance(logits, Logits) else logits.astype(jnp.float32)
        log_z = jax.nn.logsumexp(array, axis=-1)
        chosen = jnp.take_along_axis(array, targets[..., None], axis=-1)[..., 0]
        total, count = jnp.sum((log_z - chosen) * weights), jnp.sum(weights)
        correct = jnp.sum((chosen >= jnp.max(array, axis=-1)) * weights)
        return Result(Loss(total, count), metrics={"cross_entropy": (total, count), "accuracy": (correct, count)})

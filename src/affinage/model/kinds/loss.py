"""The training objective of language models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field
from typing_extensions import override

from affinage.model.call import Logits, Loss
from affinage.model.kind import Context, NodeKind, Result, node_kind
from affinage.model.kinds.cross_entropy import Objective, Sums, chunked_cross_entropy, cross_entropy
from affinage.model.layout import Layout
from affinage.model.parameter import Tree
from affinage.model.shape import TOKENS, Shape, ShapeMismatch

WHOLE_BYTES = 2**30  # `chunk: auto` computes logits in one piece up to this size in float32 on a device ...
AUTO_CHUNK = 256  # ... and this many positions at a time beyond


LOGITS = ("batch", "sequence", "vocab")


def next_tokens(tokens: Int[Array, "B S"], batch: Mapping[str, Array]) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
    """Targets and their weights: position t predicts token t + 1 of the same document where `loss_mask` says so."""
    targets = jnp.roll(tokens, -1, axis=1)
    mask = batch.get("loss_mask")
    weights = jnp.ones(tokens.shape, jnp.float32) if mask is None else jnp.roll(mask, -1, axis=1).astype(jnp.float32)
    segments = batch.get("segment_ids")
    if segments is not None:
        weights = weights * (jnp.roll(segments, -1, axis=1) == segments)
    return targets, weights.at[:, -1].set(0.0)


def auto_chunk(tokens: int, vocabulary: int, layout: Layout) -> int:
    """Positions whose logits exist at once, by what of all logits lies on one device; 0: all of them."""
    return AUTO_CHUNK if tokens * vocabulary * 4 > WHOLE_BYTES * layout.parts(*LOGITS) else 0


def expect_logits_and_tokens(inputs: tuple[Shape, ...]) -> None:
    """Raise ShapeMismatch unless the inputs are logits [B, S, V] and token ids [B, S]."""
    logits, tokens = inputs
    if tokens != TOKENS:
        raise ShapeMismatch(f"expected token ids [B, S] int as second input, got {tokens}")
    if len(logits.dims) != 3:
        raise ShapeMismatch(f"expected logits [B, S, vocabulary] as first input, got {logits}")


@node_kind("next_token_loss")
class NextTokenLoss(NodeKind):
    """Cross-entropy of the next token in nats, summed over the counted targets."""

    takes = ("logits", "tokens")
    is_loss = True
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-denominator of the softmax; PaLM has 1e-4."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target spread over the vocabulary."""
    chunk: int | Literal["auto"] = "auto"
    """Positions whose logits exist at once; 0: all; auto: by their size."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        expect_logits_and_tokens(inputs)
        return Shape(())

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Result:
        logits, tokens = inputs
        # Shifted as whole rows: where sequences are split, a target may lie on the next device.
        targets, weights = (
            context.call.constrain(array, ("batch", None)) for array in next_tokens(tokens, context.batch)
        )
        count = jnp.sum(weights)
        sums = self._sums(logits, targets, weights, context)
        plain, correct = jax.lax.stop_gradient((sums.cross_entropy, sums.correct))
        metrics = {"cross_entropy": (plain, count), "accuracy": (correct, count)}
        return Result(Loss(sums.objective, count), metrics=metrics)

    def _sums(self, logits: Any, targets: Array, weights: Array, context: Context) -> Sums:
        objective = Objective(self.z_loss, self.label_smoothing)
        if not isinstance(logits, Logits):
            return cross_entropy(logits.astype(jnp.float32), targets, weights, objective)
        chunk = self.chunk
        if chunk == "auto":
            chunk = auto_chunk(targets.size, logits.kernel.shape[0], context.call.layout)
        if 0 < chunk < targets.shape[1]:
            return chunked_cross_entropy(
                logits.hidden, logits.kernel, targets, weights, logits.softcap, objective, chunk
            )
        if context.call.flattens:
            flat = replace(logits, hidden=logits.hidden.reshape(-1, logits.hidden.shape[-1]))
            return cross_entropy(flat.array(), targets.reshape(-1), weights.reshape(-1), objective)
        return cross_entropy(logits.array(), targets, weights, objective)

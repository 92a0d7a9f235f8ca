"""Log-probabilities of continuations. Only scalars leave the device."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from affinage.data.special_tokens import PAD
from affinage.evaluation.rows import Pair, RowBatch, batch_rows, group_requests, in_pieces
from affinage.generation.model import LoadedModel, logits_of
from affinage.generation.shapes import power_of_two
from affinage.model.call import multiply_out
from affinage.model.graph import Graph
from affinage.model.parameter import Tree
from affinage.recipe.training import AttentionImplementation

_LOGITS_AT_ONCE = 2**24  # elements of a float32 block of logits: 64 MB, whatever batch and vocabulary are
# What a compilation costs, in floating point operations that the machine could have done meanwhile.
_COMPILE_FLOPS = {"cpu": 5e10}
_COMPILE_FLOPS_ACCELERATOR = 1e15

Scores = tuple[Float[Array, "B"], Bool[Array, "B"], Float[Array, "B K"], Bool[Array, "B K"]]


@lru_cache(maxsize=8)
def _compiled(graph: Graph, dtype: str, attention: AttentionImplementation, mesh: jax.sharding.Mesh | None) -> Any:
    """The jitted scoring function of a graph; jit keeps one executable per shape."""

    @partial(jax.jit, static_argnames="span")
    def score(
        params: Tree,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, "B"],
        scored: Int[Array, "B"],
        candidates: Int[Array, "B K"],
        span: int,
    ) -> Scores:
        length = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)
        lazy, _ = logits_of(graph, params, tokens, positions, dtype, attention=attention, mesh=mesh)
        # The last `span` inputs of every row; some may lie before what is scored, or before the row's beginning.
        at = lengths[:, None] - span + jnp.arange(span)[None]
        hidden = jnp.take_along_axis(lazy.hidden, jnp.maximum(at, 0)[:, :, None], axis=1)
        last, last_best = _log_probabilities(lazy.kernel, lazy.softcap, hidden[:, -1:], candidates[:, None])
        total, greedy = jnp.zeros(lengths.shape), jnp.ones(lengths.shape, bool)
        if span > 1:
            at, hidden = at[:, :-1], hidden[:, :-1]
            following = jnp.take_along_axis(tokens, jnp.maximum(at + 1, 0), axis=1)
            inner, best = _log_probabilities(lazy.kernel, lazy.softcap, hidden, following[:, :, None])
            counted = at >= (lengths - scored)[:, None]
            total = jnp.sum(jnp.where(counted, inner[:, :, 0], 0.0), axis=1)
            greedy = jnp.all(jnp.where(counted, best[:, :, 0], True), axis=1)
        return total, greedy, last[:, 0], last_best[:, 0]

    return score


def _log_probabilities(
    kernel: Float[Array, "V D"], softcap: float | None, hidden: Float[Array, "B T D"], targets: Int[Array, "B T K"]
) -> tuple[Float[Array, "B T K"], Bool[Array, "B T K"]]:
    """Log-probability of each target, and whether it is the most likely token, in float32, a block at a time."""
    count, vocabulary = targets.shape[0] * targets.shape[1], kernel.shape[0]
    block = max(1, min(count, _LOGITS_AT_ONCE // vocabulary))
    blocks = -(-count // block)
    padding = ((0, blocks * block - count), (0, 0))
    rows = jnp.pad(hidden.reshape(count, -1), padding).reshape(blocks, block, -1)
    wanted = jnp.pad(targets.reshape(count, -1), padding).reshape(blocks, block, -1)

    def one(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, target = inputs
        logits = multiply_out(x, kernel, softcap)
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        log_probability = jnp.take_along_axis(logits, target, axis=1) - normaliser
        return log_probability, target == jnp.argmax(logits, axis=-1)[:, None]

    values, best = one((rows[0], wanted[0])) if blocks == 1 else jax.lax.map(one, (rows, wanted))
    shape = targets.shape
    return tuple(a.reshape(blocks * block, -1)[:count].reshape(shape) for a in (values, best))  # type: ignore[return-value]


class Scorer:
    """Scores continuations with one model, `batch` rows at a time."""

    def __init__(self, model: LoadedModel, *, batch: int = 64) -> None:
        self.model = model
        self._batch = batch
        self._score = _compiled(model.graph, model.compute_dtype, model.attention, model.mesh)

    def score(
        self,
        pairs: Sequence[Pair],
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[tuple[float, bool]]:
        """For each (context ids, continuation ids): the continuation's log-probability, and whether it is greedy.

        Natural logarithms, summed over the continuation's tokens in float32. Pairs longer than the model's context plus
        one are cut from the left; a continuation that is itself longer than the context is scored in pieces of half
        of it, each after what comes before. `progress` is told the number of pieces answered with every batch.
        """
        pieces, owners = in_pieces(pairs, self.model.context)
        values = self._score_pieces(pieces, progress)
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for owner, (value, greedy) in zip(owners, values, strict=True):
            total, all_greedy = results[owner]
            results[owner] = total + value, all_greedy and greedy
        return results

    def _score_pieces(self, pairs: Sequence[Pair], progress: Callable[[int], None]) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        rows = group_requests(pairs, self.model.context)
        multiple = self.model.row_multiple
        batch = -(-min(self._batch, power_of_two(len(rows))) // multiple) * multiple
        batches = batch_rows(rows, batch, context=self.model.context, compile_tokens=self._compile_tokens(), pad=PAD)
        pending: tuple[RowBatch, Scores] | None = None
        for one in batches:
            # The next batch is under way while the numbers of this one are taken apart.
            started = (one, self._start(one))
            if pending is not None:
                progress(_collect(*pending, results))
            pending = started
        if pending is not None:
            progress(_collect(*pending, results))
        return results

    def _start(self, batch: RowBatch) -> Scores:
        place = self.model.place
        scores: Scores = self._score(
            self.model.params,
            place(batch.tokens),
            place(batch.lengths),
            place(batch.scored),
            place(batch.candidates),
            span=batch.span,
        )
        return scores

    def _compile_tokens(self) -> float:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.model.params))
        flops = _COMPILE_FLOPS.get(jax.default_backend(), _COMPILE_FLOPS_ACCELERATOR)
        return flops / (2 * parameters)


def _collect(batch: RowBatch, scores: Scores, results: list[tuple[float, bool]]) -> int:
    """Put a batch's numbers where the requests that asked for them look; returns how many requests those were."""
    total, greedy, last, last_best = (np.asarray(a) for a in scores)
    answered = 0
    for index, row in enumerate(batch.rows):
        for column, requests in enumerate(row.requests):
            value = float(total[index]) + float(last[index, column])
            for request in requests:
                results[request] = value, bool(greedy[index] and last_best[index, column])
            answered += len(requests)
    return answered

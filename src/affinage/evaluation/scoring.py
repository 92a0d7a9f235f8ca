"""Log-probabilities of continuations. Only scalars leave the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from affinage.data.special_tokens import PAD
from affinage.evaluation.families import batch_families, find_families
from affinage.evaluation.ledger import Ledger
from affinage.evaluation.rows import Pair, Row, batch_rows, group_requests, in_pieces
from affinage.generation.model import LoadedModel, logits_of
from affinage.generation.shapes import power_of_two
from affinage.model.call import multiply_out
from affinage.model.graph import Graph
from affinage.model.module import init_cache
from affinage.model.parameter import Tree
from affinage.parallel import MeshLayout
from affinage.recipe.training import AttentionImplementation

_LOGITS_AT_ONCE = 2**24  # elements of a float32 block of logits: 64 MB, whatever batch and vocabulary are
# What a compilation costs, in floating point operations that the machine could have done meanwhile.
_COMPILE_FLOPS = {"cpu": 5e10}
_COMPILE_FLOPS_ACCELERATOR = 1e15

Scores = tuple[Float[Array, "B"], Bool[Array, "B"], Float[Array, "B K"], Bool[Array, "B K"]]


@lru_cache(maxsize=8)
def _compiled(graph: Graph, dtype: str, attention: AttentionImplementation, layout: MeshLayout | None) -> Any:
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
        lazy, _ = logits_of(graph, params, tokens, positions, dtype, attention=attention, layout=layout)
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


@lru_cache(maxsize=8)
def _compiled_for_families(graph: Graph, dtype: str, layout: MeshLayout | None) -> Any:
    """The jitted scoring function of families of rows: one pass over what they share, one over all their ends."""

    @jax.jit
    def score(
        params: Tree,
        shared: Int[Array, "B S"],
        lengths: Int[Array, "B"],
        ends: Int[Array, "N T"],
        scored: Int[Array, "N"],
        candidates: Int[Array, "N K"],
    ) -> Scores:
        (families, width), (rows, span) = shared.shape, ends.shape
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], shared.shape)
        # Padding to the right also lands in the cache, at positions that are overwritten before they are looked at.
        cache = init_cache(graph, families, width + span, jnp.dtype(dtype))
        _, cache = logits_of(graph, params, shared, positions, dtype, cache, layout=layout)
        of_each = rows // families
        cache = jax.tree.map(lambda a: jnp.repeat(a, of_each, axis=1), cache)
        steps = jnp.arange(span, dtype=jnp.int32)[None]
        at = jnp.where(steps < scored[:, None], jnp.repeat(lengths, of_each)[:, None] + steps, -1)
        lazy, _ = logits_of(graph, params, ends, at, dtype, cache, layout=layout)
        ending = jnp.take_along_axis(lazy.hidden, (scored - 1)[:, None, None], axis=1)
        last, last_best = _log_probabilities(lazy.kernel, lazy.softcap, ending, candidates[:, None])
        total, greedy = jnp.zeros(scored.shape), jnp.ones(scored.shape, bool)
        if span > 1:
            inner, best = _log_probabilities(lazy.kernel, lazy.softcap, lazy.hidden[:, :-1], ends[:, 1:, None])
            counted = steps[:, :-1] < scored[:, None] - 1
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

    def __init__(
        self, model: LoadedModel, *, batch: int = 64, ledger: Ledger | None = None, share: bool = True
    ) -> None:
        """`ledger` keeps answers over a kill; `share`: compute contexts that continuations share once."""
        self.model = model
        self._batch = batch
        self._ledger = ledger
        self._share = share
        self._score = _compiled(model.graph, model.compute_dtype, model.attention, model.layout)
        self._score_families = _compiled_for_families(model.graph, model.compute_dtype, model.layout)

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
        answers: dict[int, tuple[float, bool]] = {}
        if self._ledger is not None:
            found = ((index, self._ledger.get(*pair)) for index, pair in enumerate(pairs))
            answers = {index: answer for index, answer in found if answer is not None}
            progress(len(answers))
        left = [index for index in range(len(pairs)) if index not in answers]

        def collect(rows: Sequence[Row | None], scores: Scores) -> None:
            new = {left[place]: answer for place, answer in _answers(rows, [self.model.on_host(a) for a in scores])}
            answers.update(new)
            if self._ledger is not None:
                for index, answer in new.items():
                    self._ledger.put(*pairs[index], answer)
            progress(len(new))

        pending: tuple[Sequence[Row | None], Scores] | None = None
        try:
            for started in self._batches(group_requests([pairs[index] for index in left], self.model.context)):
                # The next batch is under way while the numbers of this one are taken apart.
                if pending is not None:
                    collect(*pending)
                pending = started
            if pending is not None:
                collect(*pending)
        finally:  # whoever is told of the progress may end it
            if self._ledger is not None:
                self._ledger.flush()
        return [answers[index] for index in range(len(pairs))]

    def _batches(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row | None], Scores]]:
        """Every row in one batch, with the numbers of its batch, which the device may still be computing."""
        place, params = self.model.place, self.model.params
        context, multiple, compile_tokens = self.model.context, self.model.row_multiple, self._compile_tokens()
        families, alone, size = find_families(rows) if self._share else ([], rows, 1)
        for some in batch_families(
            families, size, self._batch, context=context, compile_tokens=compile_tokens, pad=PAD, multiple=multiple
        ):
            of_families = (some.shared, some.lengths, some.ends, some.scored, some.candidates)
            yield some.rows, self._score_families(params, *map(place, of_families))
        batch = -(-min(self._batch, power_of_two(len(alone))) // multiple) * multiple
        for one in batch_rows(alone, batch, context=context, compile_tokens=compile_tokens, pad=PAD):
            of_rows = (one.tokens, one.lengths, one.scored, one.candidates)
            yield one.rows, self._score(params, *map(place, of_rows), span=one.span)

    def _compile_tokens(self) -> float:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.model.params))
        flops = _COMPILE_FLOPS.get(jax.default_backend(), _COMPILE_FLOPS_ACCELERATOR)
        return flops / (2 * parameters)


def _answers(rows: Sequence[Row | None], scores: Sequence[np.ndarray]) -> Iterator[tuple[int, tuple[float, bool]]]:
    """For every request that a batch answers, its place and its answer."""
    total, greedy, last, last_best = scores
    for index, row in enumerate(rows):
        for column, requests in enumerate(row.requests if row is not None else ()):
            answer = float(total[index]) + float(last[index, column]), bool(greedy[index] and last_best[index, column])
            for request in requests:
                yield request, answer

"""Log-probabilities of continuations. Only scalars leave the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from affinage.config.training import AttentionImplementation
from affinage.data.special_tokens import PAD
from affinage.evaluation.batching import Batch, Pair, PrefixGroup, Row, batches, find_groups, group_requests, in_pieces
from affinage.generation.model import LoadedModel, logits_of
from affinage.model.graph import Graph
from affinage.model.parameter import PyTree
from affinage.model.products import multiply_out
from affinage.parallel import MeshLayout

LOGITS_AT_ONCE = 2**24  # elements of a float32 block of logits: 64 MB, whatever batch and vocabulary are
# What a compilation costs, in floating point operations that the machine could have done meanwhile.
_COMPILE_FLOPS = {"cpu": 5e10}
_COMPILE_FLOPS_ACCELERATOR = 1e15
# Tokens at once, whatever memory holds: more of them leave the caches of processors, which costs up to a third.
_MOST_TOKENS = {"cpu": 1536}

Scores = tuple[Float[Array, "R P"], Bool[Array, "R P"]]
Joined = tuple[Int[Array, "B S"], Int[Array, "B S"], Int[Array, "B S"]]  # positions, segments, prefix segments


@lru_cache(maxsize=8)
def _compiled(
    graph: Graph, dtype: str, attention: AttentionImplementation, layout: MeshLayout | None, logits_at_once: int
) -> Any:
    """The jitted scoring function of a graph; jit keeps one executable per shape."""

    @jax.jit
    def score(
        params: PyTree,
        tokens: Int[Array, "B S"],
        logit_positions: Int[Array, "R P"],
        targets: Int[Array, "R P"],
        joined: Joined | None = None,
    ) -> Scores:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        segments = None
        if joined is not None:
            positions, *segments = joined
        lazy, _ = logits_of(
            graph,
            params,
            tokens,
            positions,
            dtype,
            attention=attention,
            layout=layout,
            segments=segments,
            logit_positions=logit_positions,
        )
        return _log_probabilities(lazy.kernel, lazy.softcap, lazy.hidden, targets, logits_at_once)

    return score


def _log_probabilities(
    kernel: Float[Array, "V D"],
    softcap: float | None,
    hidden: Float[Array, "R P D"],
    targets: Int[Array, "R P"],
    logits_at_once: int,
) -> Scores:
    """Log-probability of each target, and whether it is the most likely token, in float32, a block at a time."""
    count, vocabulary = targets.size, kernel.shape[0]
    block = max(1, min(count, logits_at_once // vocabulary))
    blocks = -(-count // block)
    padding = blocks * block - count
    rows = jnp.pad(hidden.reshape(count, -1), ((0, padding), (0, 0))).reshape(blocks, block, -1)
    wanted = jnp.pad(targets.reshape(count), (0, padding)).reshape(blocks, block)

    def one(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, target = inputs
        logits = multiply_out(x, kernel, softcap)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        wanted = jnp.take_along_axis(logits, target[:, None], axis=1)
        # The first of the largest, as argmax says; which costs CPUs almost as much as the product.
        less_likely = (logits < wanted) | ((logits == wanted) & (jnp.arange(vocabulary)[None] >= target[:, None]))
        return wanted[:, 0] - normaliser, jnp.all(less_likely, axis=-1)

    values, best = one((rows[0], wanted[0])) if blocks == 1 else jax.lax.map(one, (rows, wanted))
    value, is_best = (a.reshape(-1)[:count].reshape(targets.shape) for a in (values, best))
    return value, is_best


class Scorer:
    """Scores continuations with one model."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        batch: int = 64,
        share: bool = True,
        logits_at_once: int = LOGITS_AT_ONCE,
    ) -> None:
        """A scorer of one model.

        Args:
            model: with its weights and tokenizer.
            batch: rows of the model's context that memory holds at once, however many shorter ones those are.
            share: compute once what continuations share, and several in a row, where all kinds of nodes of it can.
            logits_at_once: elements of the largest block of float32 logits that the device holds.
        """
        self.model = model
        self._batch = batch
        self._share = share
        self._score = _compiled(model.graph, model.compute_dtype, model.attention, model.layout, logits_at_once)

    def score(
        self,
        pairs: Sequence[Pair],
        answered: Callable[[int, tuple[float, bool]], None] = lambda _index, _answer: None,
    ) -> list[tuple[float, bool]]:
        """For each (context ids, continuation ids): the continuation's log-probability, and whether it is greedy.

        Natural logarithms. Pairs longer than the model's context plus one are cut from the left; a continuation that is
        itself longer than the context is scored in pieces of half of it, each after what comes before. `answered` is
        called with the index of a pair and its answer as batches are done.
        """
        pieces, owners = in_pieces(pairs, self.model.context)
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        left = np.bincount(owners, minlength=len(pairs))

        def collect(batch: Batch, scores: Scores) -> None:
            values, best = (self.model.on_host(a) for a in scores)
            for place, (value, greedy) in batch.answers(values, best):
                owner = owners[place]
                total, all_greedy = results[owner]
                results[owner] = total + value, all_greedy and greedy
                left[owner] -= 1
                if not left[owner]:
                    answered(owner, results[owner])

        pending: tuple[Batch, Scores] | None = None
        for started in self._batches(group_requests(pieces, self.model.context)):
            # The next batch is under way while the numbers of this one are taken apart.
            if pending is not None:
                collect(*pending)
            pending = started
        if pending is not None:
            collect(*pending)
        return results

    def _batches(self, rows: Sequence[Row]) -> Iterator[tuple[Batch, Scores]]:
        """Every row in one batch, with the numbers of its batch, which the device may still be computing."""
        place, model = self.model.place, self.model
        graph = model.graph
        computed = graph.needed_for(graph.logits)
        packed = self._share and all(node.layer.joins for node in graph.nodes if node.name in computed)
        # Scores of attention in a row of twice the context take the memory of four rows.
        most = model.context * (2 if self._batch >= 4 * model.row_multiple else 1)
        groups = find_groups(rows, most) if packed else [PrefixGroup(0, (row,)) for row in rows]
        tokens = self._batch * model.context
        for one in batches(
            groups,
            min(tokens, _MOST_TOKENS.get(jax.default_backend(), tokens)),
            context=model.context,
            most=most,
            compile_tokens=self._compile_tokens(),
            pad=PAD,
            multiple=model.row_multiple,
            packed=packed,
        ):
            joined = tuple(map(place, (one.positions, one.segments, one.prefix_segment_ids))) if one.joined else None
            yield one, self._score(model.params, *map(place, (one.tokens, one.logit_positions, one.targets)), joined)

    def _compile_tokens(self) -> float:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.model.params))
        flops = _COMPILE_FLOPS.get(jax.default_backend(), _COMPILE_FLOPS_ACCELERATOR)
        return flops / (2 * parameters)

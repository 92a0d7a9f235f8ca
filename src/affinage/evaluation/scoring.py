"""Log-probabilities of continuations, of which only scalars leave the device; and how many rows its memory holds."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from affinage.cluster.processes import Processes
from affinage.data.special_tokens import PAD
from affinage.evaluation.batching import Batch, Pair, PrefixGroup, as_rows, batches, find_groups
from affinage.generation.model import LoadedModel, logits_of
from affinage.model.graph import Graph
from affinage.model.layer import PyTree
from affinage.model.layers.embedding import multiply_out
from affinage.parallel import MeshLayout
from affinage.planning.estimate import present
from affinage.planning.trace import peak_memory

LOGITS_AT_ONCE = 2**24  # elements of a float32 block of logits: 64 MB, whatever batch and vocabulary are
# Tokens at once, whatever memory holds: more of them leave the caches of processors, which costs up to a third.
_MAX_TOKENS = {"cpu": 1536}
MAX_ROWS = 64  # for each device that rows are split over
MEMORY_SHARE = 0.45  # of the memory beside the weights: XLA keeps up to twice the estimate on processors
_TRACED = 8  # rows that are planned; memory grows in proportion

Scores = tuple[Float[Array, "R P"], Bool[Array, "R P"]]
Joined = tuple[Int[Array, "B S"], Int[Array, "B S"], Int[Array, "B S"]]  # positions, segments, prefix segments


@lru_cache(maxsize=8)
def _compiled(graph: Graph, dtype: str, layout: MeshLayout | None, logits_at_once: int) -> Any:
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
            graph, params, tokens, positions, dtype, layout=layout, segments=segments, logit_positions=logit_positions
        )
        return _log_probabilities(lazy.kernel, lazy.hidden, targets, logits_at_once)

    return score


def _log_probabilities(
    kernel: Float[Array, "V D"],
    hidden: Float[Array, "R P D"],
    targets: Int[Array, "R P"],
    logits_at_once: int,
) -> Scores:
    """Log-probability of each target, and whether it is the most likely token, in float32, a block at a time."""
    vocabulary = kernel.shape[0]
    block = max(1, min(targets.size, logits_at_once // vocabulary))
    blocks = -(-targets.size // block)
    padding = blocks * block - targets.size
    rows = jnp.pad(hidden.reshape(targets.size, -1), ((0, padding), (0, 0))).reshape(blocks, block, -1)
    wanted = jnp.pad(targets.reshape(-1), (0, padding)).reshape(blocks, block)

    def score_block(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, target = inputs
        logits = multiply_out(x, kernel)
        wanted = jnp.take_along_axis(logits, target[:, None], axis=1)
        # The first of the largest, as argmax, which costs CPUs almost as much as the product, would find it.
        less_likely = (logits < wanted) | ((logits == wanted) & (jnp.arange(vocabulary)[None] >= target[:, None]))
        return wanted[:, 0] - jax.nn.logsumexp(logits, axis=-1), jnp.all(less_likely, axis=-1)

    values, best = score_block((rows[0], wanted[0])) if blocks == 1 else jax.lax.map(score_block, (rows, wanted))
    value, is_best = (a.reshape(-1)[: targets.size].reshape(targets.shape) for a in (values, best))
    return value, is_best


def score(
    model: LoadedModel,
    pairs: Sequence[Pair],
    answered: Callable[[int, tuple[float, bool]], None] = lambda _index, _answer: None,
    *,
    batch: int = 64,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> list[tuple[float, bool]]:
    """Return for (context ids, continuation ids) the continuation's log-probability, and whether it is greedy.

    Logarithms are natural. Pairs longer than the model's context plus one are cut from the left. Shared prefixes are
    computed once, and several continuations in a row, if all layers of the model can.

    Args:
        model: with its weights and tokenizer.
        pairs: to score; the answers are in their order.
        answered: called with the index of a pair and its answer as batches are done.
        batch: rows of the model's context that memory holds at once.
        logits_at_once: elements of the largest block of float32 logits that the device holds.

    Raises UserError for a continuation that is longer than the context.
    """
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)

    def collect(done: Batch, scores: Scores) -> None:
        for place, answer in done.answers(*map(model.on_host, scores)):
            results[place] = answer
            answered(place, answer)

    rows, needed = as_rows(pairs, model.context), model.graph.needed_for(model.graph.logits)
    packed = all(node.layer.joins for node in model.graph.nodes if node.name in needed)
    # Scores of attention in a row of twice the context take the memory of four rows.
    most = model.context * (2 if batch >= 4 * model.row_multiple else 1)
    tokens, platform = batch * model.context, jax.default_backend()
    program = _compiled(model.graph, model.compute_dtype, model.layout, logits_at_once)
    pending: list[tuple[Batch, Scores]] = []
    for each in batches(
        find_groups(rows, most) if packed else [PrefixGroup(0, (row,)) for row in rows],
        min(tokens, _MAX_TOKENS.get(platform, tokens)),
        context=model.context,
        most=most,
        pad=PAD,
        multiple=model.row_multiple,
        packed=packed,
    ):
        joined = (each.positions, each.segments, each.prefix_segment_ids) if each.joined else None
        arrays = jax.tree.map(model.place, (each.tokens, each.logit_positions, each.targets, joined))
        pending.append((each, program(model.params, *arrays)))
        if len(pending) > 1:  # the device computes this batch while the numbers of the one before are taken apart
            collect(*pending.pop(0))
    for last in pending:
        collect(*last)
    return results


def rows_that_fit(model: LoadedModel, *, beside: int = 0) -> int:
    """Return a power of two, at most 64, times the devices that rows are split over; nothing is compiled.

    Rows are as long as the model's context, and every device computes all of its rows by itself. `beside` is the number
    of bytes of each device that something else than the weights takes. Hosts that work together all call it, and take
    what fits on each of them.
    """
    device = next(iter(jax.tree.leaves(model.params)[0].sharding.addressable_devices))
    fitting, capacity = MAX_ROWS, present([device]).memory_per_device
    if capacity:
        left = capacity - beside - sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(model.params))
        fitting = int(MEMORY_SHARE * left // bytes_of_a_row(model, device.platform))
    # A host knows the memory of its own devices alone.
    fitting = Processes.at_work().all_min("rows that fit", fitting)
    return model.row_multiple * (2 ** int(math.log2(min(MAX_ROWS, fitting))) if fitting > 1 else 1)


def bytes_of_a_row(model: LoadedModel, platform: str) -> float:
    """Return the bytes that a forward pass holds at its peak for one row of the context, beside the weights.

    All scores of attention are counted: rows of several texts are computed so.
    """
    shape = jax.ShapeDtypeStruct((_TRACED, model.context), jnp.int32)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)

    def hidden(params: Any, tokens: Any, positions: Any) -> Any:
        lazy, _ = logits_of(model.graph, params, tokens, positions, model.compute_dtype, attention="xla")
        return lazy.hidden

    return peak_memory(hidden, params, shape, shape, platform=platform) / _TRACED


def bytes_on_a_device(leaf: jax.Array) -> int:
    """Return the bytes of an array's part on each of its devices."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

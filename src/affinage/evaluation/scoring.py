"""Log-probabilities of continuations, packed into batches of few shapes; only scalars leave the device.

Rows that begin alike are a prefix group: the shared tokens stand once, and each row's end sees them and itself.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from affinage.data.special_tokens import PAD
from affinage.generation.engine import LoadedModel, logits_of
from affinage.hardware.chips import chip
from affinage.model.graph import Graph
from affinage.model.layer import PyTree
from affinage.model.layers.embedding import multiply_out
from affinage.parallel.sharding import MeshLayout

LOGITS_AT_ONCE = 2**24  # elements of a float32 block of logits: 64 MB, whatever batch and vocabulary are
# Tokens at once, whatever memory holds: more of them leave the caches of processors, which costs up to a third.
_MAX_TOKENS = {"cpu": 1536}
_MAX_ROWS = 64  # for each device that rows are split over
_MAX_PAIRS = 2**24  # of a query and a key at once: 64 MB of float32 scores for each head of attention
_TOKENS = 2**14  # at once on a device of this much memory, however long the context is
_MUCH_MEMORY = 40 * 2**30  # bytes
_MULTIPLE = 8  # of every length, for the sake of the hardware
Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation to score
Answer = tuple[int, tuple[float, bool]]  # a request, with its log-probability and whether it is greedy


class Row(NamedTuple):
    """A text without its last token, of which the last tokens are `targets`, to score for a request."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    request: int
    first: int  # the place after which the first target stands


def as_rows(pairs: Sequence[Pair], context: int) -> list[Row]:
    """Return rows for (context ids, continuation ids) pairs, each cut from the left to the last `context` inputs.

    The input of a pair is everything but its last token, as in the harness: (context + continuation)[-(length + 1):-1].
    """
    rows = []
    for index, (before, continuation) in enumerate(pairs):
        if not before or not 0 < len(continuation) <= context:
            raise ValueError("a pair needs a token of context, and of continuation one to as many as the model reads")
        tokens = (before + continuation)[-(context + 1) : -1]
        rows.append(Row(tuple(tokens), tuple(continuation), index, len(tokens) - len(continuation)))
    return rows


_SHORTEST = 8  # saved tokens that are worth a group, and a quarter of a row's tokens, too
_ROOM = 256  # tokens of a group of short rows, at most


@dataclass(frozen=True)
class PrefixGroup:
    """Rows whose first `shared` tokens are the same, in order; or one row by itself, with 0."""

    shared: int
    rows: tuple[Row, ...]

    @cached_property
    def length(self) -> int:
        """Tokens, the shared ones and those of equal rows counted once."""
        return self.shared + sum(len(tokens) - self.shared for tokens in {row.tokens for row in self.rows})

    @cached_property
    def targets(self) -> int:
        """The number of targets of all rows."""
        return sum(len(row.targets) for row in self.rows)


def find_groups(rows: Sequence[Row], most: int) -> list[PrefixGroup]:
    """Return every row in one group, joined with others that begin alike.

    None grows beyond `most` tokens, twice the longest row, or 256 if rows are short; with 0 every row is by itself.
    """
    most = min(most, max(_ROOM, 2 * max((len(row.tokens) for row in rows), default=0)))
    groups: list[PrefixGroup] = []
    for row in sorted(rows, key=lambda row: (row.tokens, row.request)):
        if groups:
            last = groups[-1]
            limit = min(last.shared or len(last.rows[0].tokens), len(row.tokens))
            pairs = zip(last.rows[-1].tokens[:limit], row.tokens, strict=False)
            alike = next((n for n, (a, b) in enumerate(pairs) if a != b), limit)
            joined = PrefixGroup(alike, (*last.rows, row))
            saved = last.length + len(row.tokens) - joined.length
            if saved >= max(_SHORTEST, len(row.tokens) / 4) and joined.length <= most:
                groups[-1] = joined
                continue
        groups.append(PrefixGroup(0, (row,)))
    return groups


# Tokens of a row that short groups are put into. Which of them leaves little padding depends on the groups: of
# those of 50 tokens 192 hold three, and 256 five.
_ROOMS = (192, 256, 320, 448, 576)
_EQUAL = 1750  # keys whose attention costs a token as much as the rest of a layer, in a narrow model on CPUs
_GroupRow = list[PrefixGroup]


@dataclass(frozen=True)
class Batch:
    """Rows of groups, padded to one shape, in R equal parts."""

    tokens: Int[np.ndarray, "B S"]  # of a group the shared ones, then the ends of its rows one after the other
    # `positions`: those of every end follow the shared ones. `segment_ids`: a number for the shared tokens, and one for
    # each end. `prefix_segment_ids`: for an end that of the shared tokens, for other tokens their own.
    places: Mapping[str, Int[np.ndarray, "B S"]]
    logit_positions: Int[np.ndarray, "R P"]  # places in the flattened tokens of a part after which targets stand
    targets: Int[np.ndarray, "R P"]  # to score
    requests: list[list[tuple[int, int]]]  # of each part in the order of the targets, each with their number
    joined: bool  # a row of this length may be more than one sequence, or longer than one

    def answers(self, values: Float[np.ndarray, "R P"], best: Bool[np.ndarray, "R P"]) -> Iterator[Answer]:
        """Yield every request with its answer, from those of the targets."""
        for part, requests in enumerate(self.requests):
            start = 0
            for request, count in requests:
                own = slice(start, start + count)
                yield request, (float(np.sum(values[part, own], dtype=np.float64)), bool(np.all(best[part, own])))
                start += count


def batches(groups: Sequence[PrefixGroup], tokens: int, *, context: int, most: int, multiple: int) -> list[Batch]:
    """Return batches of few shapes, the longest first so that memory runs out at once or never.

    A batch has at most `tokens`, or a row, and a `multiple` of rows, filled up with PAD. The model's rows have
    `context` tokens; those with several groups have at most `most`, and there are none if that is 0.
    """
    # Rows are of two lengths, the longest and one that leaves little padding; with 0 for `most` each has one group.
    longest_first = sorted(groups, key=lambda group: (-group.length, group.rows[0].tokens))
    largest = max((group.length for group in groups), default=0)
    longest = min(context, _padded(largest)) if largest <= context else _padded(largest)
    rooms = [longest, *(room for room in _ROOMS if room <= most)]
    ways = [_packed(longest_first, sorted({room, max(room, longest)}), packed=most > 0) for room in rooms]
    cheapest = min(ways, key=lambda way: sum(len(way[length]) * length * (1 + length / _EQUAL) for length in way))
    made: list[Batch] = []
    for length, rows in cheapest.items():
        # The scores of attention grow with the square of the length.
        fitting = max(1, int(tokens * min(1, context / length)) // (length * multiple)) * multiple
        count = -(-len(rows) // fitting) * multiple  # parts of all batches, all as full as one another
        rows = sorted(rows, key=_targets, reverse=True)
        parts = [rows[start::count] for start in range(count)]
        columns, of_part = _padded(max(sum(map(_targets, part)) for part in parts)), len(parts[0])
        padded = [row for part in parts for row in [*part, *[[]] * (of_part - len(part))]]
        of_batch = of_part * multiple
        joined = length > context or any(len(row) > 1 or len(row[0].rows) > 1 for row in rows)
        for start in range(0, len(padded), of_batch):
            made.append(_batch(padded[start : start + of_batch], length, of_part, columns, joined))
    return sorted(made, key=lambda batch: -batch.tokens.size)


def _padded(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


def _targets(row: _GroupRow) -> int:
    return sum(group.targets for group in row)


def _packed(longest_first: Sequence[PrefixGroup], sizes: Sequence[int], *, packed: bool) -> dict[int, list[_GroupRow]]:
    """Rows of `sizes`; each group goes where the least room is left over, or into a new row that is long enough."""
    rows: dict[int, list[_GroupRow]] = {}
    every: list[_GroupRow] = []
    left: list[tuple[int, int]] = []  # tokens that rows have left, ascending, and their places in `every`
    for group in longest_first:
        place = bisect_left(left, (group.length, 0))
        if packed and place < len(left):
            space, number = left.pop(place)
        else:
            space, number = next(size for size in sizes if size >= group.length), len(every)
            every.append([])
            rows.setdefault(space, []).append(every[number])
        every[number].append(group)
        insort(left, (space - group.length, number))
    return rows


def _batch(rows: Sequence[_GroupRow], length: int, of_part: int, columns: int, joined: bool) -> Batch:
    """A batch of rows, of which `of_part` are a part with `columns` targets."""
    parts = len(rows) // of_part
    positions, segments, prefixes = arrays = [np.zeros((len(rows), length), np.int32) for _ in range(3)]
    after_which, targets = (np.zeros((parts, columns), np.int32) for _ in range(2))
    tokens, requests = np.full((len(rows), length), PAD, np.int32), [list[tuple[int, int]]() for _ in range(parts)]
    for index, groups in enumerate(rows):
        part, place_in_part = divmod(index, of_part)
        column = sum(count for _, count in requests[part])
        start = number = 0
        for group in groups:
            first, shared, number = start, group.shared, number + 1
            prefixes[index, first : first + group.length] = number
            tokens[index, first : first + shared] = group.rows[0].tokens[:shared]
            positions[index, first : first + shared] = np.arange(shared)
            segments[index, first : first + shared] = number
            start += shared
            for text, equal in groupby(group.rows, lambda row: row.tokens):
                number += 1
                own = slice(start, start + len(text) - shared)
                tokens[index, own] = text[shared:]
                positions[index, own] = np.arange(shared, len(text))
                segments[index, own] = number
                for row in equal:
                    after, count = np.arange(row.first, len(text)), len(row.targets)
                    at = np.where(after < shared, after + first, after - shared + start)
                    after_which[part, column : column + count] = place_in_part * length + at
                    targets[part, column : column + count] = row.targets
                    requests[part].append((row.request, count))
                    column += count
                start = own.stop
    places = dict(zip(("positions", "segment_ids", "prefix_segment_ids"), arrays, strict=True))
    return Batch(tokens, places, after_which, targets, requests, joined)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _scores(
    graph: Graph,
    dtype: str,
    layout: MeshLayout | None,
    logits_at_once: int,
    params: PyTree,
    tokens: Int[Array, "B S"],
    logit_positions: Int[Array, "R P"],
    targets: Int[Array, "R P"],
    places: Mapping[str, Int[Array, "B S"]],  # `positions` and segments, where rows hold several texts
) -> tuple[Float[Array, "R P"], Bool[Array, "R P"]]:
    """Log-probability of each target, and whether it is the most likely token, in float32, a block at a time."""
    lazy, _ = logits_of((graph, dtype, layout), params, {"tokens": tokens, **places}, logit_positions=logit_positions)
    vocabulary = lazy.kernel.shape[0]

    def score_one(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, target = inputs
        logits = multiply_out(hidden, lazy.kernel)
        wanted = logits[target]
        # The first of the largest, as argmax, which costs CPUs almost as much as the product, would find it.
        less_likely = (logits < wanted) | ((logits == wanted) & (jnp.arange(vocabulary) >= target))
        return wanted - jax.nn.logsumexp(logits), jnp.all(less_likely)

    block = max(1, min(targets.size, logits_at_once // vocabulary))
    rows = lazy.hidden.reshape(targets.size, -1), targets.reshape(-1)
    values, best = jax.lax.map(score_one, rows, batch_size=block)
    return values.reshape(targets.shape), best.reshape(targets.shape)


def score(
    model: LoadedModel,
    pairs: Sequence[Pair],
    *,
    batch: int = 64,  # rows of the model's context that memory holds at once
    logits_at_once: int = LOGITS_AT_ONCE,  # elements of the largest block of float32 logits that the device holds
) -> Iterator[Answer]:
    """Yield the answer to each pair (context ids, continuation ids), in the order in which batches are done.

    An answer is the index of the pair with the continuation's natural log-probability, and whether it is greedy. Pairs
    longer than the model's context plus one are cut from the left. Shared prefixes are computed once, and several
    continuations in a row, if all layers of the model can. ValueError: a continuation longer than the context.
    """
    rows, needed = as_rows(pairs, model.context), model.graph.needed_for(model.graph.logits)
    packed = all(node.layer.joins for node in model.graph.nodes if node.name in needed)
    # Scores of attention in a row of twice the context take the memory of four rows.
    most = packed * model.context * (2 if batch >= 4 * model.row_multiple else 1)
    tokens = min(batch * model.context, _MAX_TOKENS.get(jax.default_backend(), batch * model.context))
    program = partial(_scores, model.graph, model.compute_dtype, model.layout, logits_at_once, model.params)
    made = batches(find_groups(rows, most), tokens, context=model.context, most=most, multiple=model.row_multiple)

    def dispatch(each: Batch) -> Any:
        places = each.places if each.joined else {}
        arrays = jax.tree.map(model.place, (each.tokens, each.logit_positions, each.targets, places))
        return each, program(*arrays)

    # The device computes a batch while the numbers of the one before are taken apart.
    for (done, scores), _ in pairwise(chain(map(dispatch, made), [None])):
        yield from done.answers(*map(model.on_host, scores))


def default_batch(model: LoadedModel) -> int:
    """Return how many rows of the model's context are scored at once, a multiple of what they are split over.

    The scores of attention decide, which grow with the square of the context: 64 rows of 512 tokens, 16 of 1,024. A
    device that is known to have much memory gets 16,384 tokens where that is more: 8 rows of 2,048, 4 of 4,096.
    """
    rows, memory = _MAX_PAIRS // model.context**2, chip(jax.devices()[0].device_kind).memory_per_device
    if memory is not None and memory >= _MUCH_MEMORY:
        rows = max(rows, _TOKENS // model.context)
    return model.row_multiple * max(1, min(_MAX_ROWS, rows))

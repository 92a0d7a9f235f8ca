"""Batches from token shards: batch = f(seed, step), for any number of processes, with no state to save or lose.

A mixture gives groups of rows weights, in stages; which group a draw takes is a function of the step alone, too.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Float, Integer

from affinage.config.training import TrainSettings
from affinage.data.code_points import kernel
from affinage.data.order import permuted
from affinage.data.special_tokens import MARKS, Marks
from affinage.data.token_shards import TokenShards, find_shard_folders
from affinage.errors import UserError, did_you_mean

Batch = dict[str, np.ndarray]

REFERENCE = "reference_log_probabilities"  # of a batch of preferences: float32 [B, documents]
SLOTS = 1024  # draws over which weights hold, rounded to a tenth of a percent; more slots where there are many weights
ALL = "all"
STEPS_AT_ONCE, TOKENS_AT_ONCE = 16, 2**15  # at most: many small batches at once cost about as much as two alone
CALLS_AHEAD = 8  # that make batches
_SCANNED = 2**20  # draws that are looked through at a time
_END = 2**62  # draw that no training reaches
_MIXTURE = "mixture"  # of the section of a training


def make_batch(
    tokens: Integer[np.ndarray, "B S"],
    mask: Integer[np.ndarray, "B S"],
    rows: Integer[np.ndarray, " B"],
    marks: Marks = MARKS,
    reference: Float[np.ndarray, "B documents"] | None = None,
) -> Batch:
    """Return the batch that training reads.

    `tokens`, `segment_ids`, `positions` (within the segment) int32 [B, S]; `loss_mask` float32 [B, S], 1 where the
    token counts as a target (`mask`, but never <pad>); `rows` int32 [B], the row's place in the global batch; of
    preferences `REFERENCE`. A segment begins with <s>, and after </s>: what follows there without <s> is the rest of a
    long document.
    """
    begin = -1 if marks.begin is None else marks.begin
    pad = -1 if marks.pad == marks.end else marks.pad  # then no token comes before it in its segment: it never counts
    divided = zip(("segment_ids", "positions", "loss_mask"), _divide(tokens, mask, begin, marks.end, pad), strict=True)
    fields = {"tokens": tokens, **dict(divided), "rows": rows.astype(np.int32)}
    return fields if reference is None else fields | {REFERENCE: reference}


@kernel
def _divide(tokens, mask, begin, end, pad):  # type: ignore[no-untyped-def]
    segment_ids, positions = np.empty(tokens.shape, np.int32), np.empty(tokens.shape, np.int32)
    loss_mask = np.empty(tokens.shape, np.float32)
    for row in range(tokens.shape[0]):
        segment = position = 0
        for place in range(tokens.shape[1]):
            token = tokens[row, place]
            if token == begin or (place and tokens[row, place - 1] == end):
                segment += 1
                position = 0
            segment_ids[row, place] = segment
            positions[row, place] = position
            loss_mask[row, place] = mask[row, place] and token != pad
            position += 1
    return segment_ids, positions, loss_mask


# ---- mixtures ----


Group = tuple[str, str]  # the source and language of a folder of rows; "" where they have none
Weights = Mapping[str, float]  # of a source, a language, or `<source>.<language>`; or of `all` alone
Mixture = Sequence[tuple[int, Weights]]  # the steps from which on weights hold, the first of them 0
Component = tuple[str, ...]  # names of the groups that are shuffled together


class Stage:
    """Draws `first` to before `end`, counted over all steps, in which components take turns in a fixed pattern.

    A component's slots of the pattern are spread evenly. Their numbers are rounded by largest remainder, to at least
    one. Its position is in its endless sequence of epochs.
    """

    def __init__(
        self, first: int, end: int, weights: Mapping[Component, float], begun: Mapping[Component, int]
    ) -> None:
        """`begun`: the positions that components have reached in earlier stages."""
        slots = max(SLOTS, 4 * len(weights))
        shares = np.array(list(weights.values())) / sum(weights.values()) * slots
        counts = np.maximum(np.floor(shares).astype(np.int64), 1)
        while missing := slots - int(counts.sum()):  # below zero where the minimum of one slot took too many
            step = np.sign(missing)
            counts[np.argmax(np.where(counts + step > 0, step * (shares - counts), -np.inf))] += step
        numbers = np.repeat(np.arange(len(counts)), counts)
        ranks = np.arange(slots) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.argsort((ranks + 0.5) / counts[numbers], kind="stable")
        self.first, self.end, self.components, self._counts = first, end, tuple(weights), counts
        # The component of every slot, and how many slots before it are of the same.
        self._pattern, self._ranks = numbers[order], ranks[order]
        self._begun = np.array([begun.get(component, 0) for component in weights])

    def positions(self, draws: Integer[np.ndarray, " n"]) -> Iterator[tuple[Component, np.ndarray, np.ndarray]]:
        """Return of every component which of the draws are of it, int64 [m], and their positions, int64 [m]."""
        turns, slots = np.divmod(draws - self.first, len(self._pattern))
        chosen = self._pattern[slots]
        positions = self._begun[chosen] + turns * self._counts[chosen] + self._ranks[slots]
        for number in {*chosen.tolist()}:
            taken = np.flatnonzero(chosen == number)
            yield self.components[number], taken, positions[taken]

    def reached(self, draw: int) -> dict[Component, int]:
        """Return the position that every component has reached before a draw."""
        turn, slot = divmod(draw - self.first, len(self._pattern))
        inside = np.bincount(self._pattern[:slot], minlength=len(self._counts))
        return dict(zip(self.components, (self._begun + turn * self._counts + inside).tolist(), strict=True))


def stages_of(groups: Mapping[str, Group], mixture: Mixture | None, batch: int) -> list[Stage]:
    """Return the stages of a mixture of groups by name; None takes all rows as they come.

    Groups that share one weight are shuffled together, so that all of them are in the same epoch. A component that a
    later stage also has continues where it was. Raises UserError for weights that name nothing, or leave nothing.
    """
    mixture, stages, begun = mixture or [(0, {ALL: 1.0})], list[Stage](), dict[Component, int]()
    ends = [*(step * batch for step, _ in mixture[1:]), _END]
    for (step, weights), end in zip(mixture, ends, strict=True):
        components = {tuple(groups): 1.0} if set(weights) == {ALL} else components_of(weights, groups)
        stages.append(Stage(step * batch, end, components, begun))
        begun |= stages[-1].reached(end)
    return stages


def components_of(weights: Weights, groups: Mapping[str, Group]) -> dict[Component, float]:
    """Return the groups that each weight above zero stands for, and the weight; others are left out.

    A name is a source, a language or `<source>.<language>`; the last goes before the other two.
    Raises UserError for an unknown name, a group that two names stand for, and weights that are all zero.
    """
    names = sorted({name for each, group in groups.items() for name in (each, *group) if name})
    for name in weights:
        if name not in names:
            fix = f"{did_you_mean(name, names)} There are: {', '.join(names)}".lstrip()
            raise UserError(f"a weight for {name!r}, which has no sequences", where=_MIXTURE, fix=fix)
    members: dict[str, list[str]] = {name: [] for name in weights}
    for each, group in sorted(groups.items()):
        owners = [each] if each in weights else [name for name in weights if name in group]
        if len(owners) > 1:
            fix = f"Give {each!r} a weight of its own, or give weights to sources alone or to languages alone."
            raise UserError(f"both {owners[0]!r} and {owners[1]!r} stand for {each!r}", where=_MIXTURE, fix=fix)
        for name in owners:
            members[name].append(each)
    components = {tuple(members[name]): weight for name, weight in weights.items() if weight > 0 and members[name]}
    if not components:
        raise UserError("all weights are zero", where=_MIXTURE, fix="Give at least one weight above zero.")
    return dict(sorted(components.items()))


# ---- loaders ----


def mixture_of(settings: TrainSettings) -> Mixture | None:
    """Return the mixture of a training's settings."""
    return None if settings.mixture is None else [(each.from_step, each.weights) for each in settings.mixture]


class DataLoader:
    """Endless shuffled batches from one or several folders of token shards, all of one context.

    Without a mixture, an epoch goes once through all rows of all folders. With one, each component has epochs of its
    own. Every epoch has its own order, found by arithmetic, so memory does not grow with the number of rows.
    """

    def __init__(self, folder: Path, *, seed: int, batch: int, mixture: Mixture | None = None) -> None:
        """`folder` holds shards or sub-folders of shards; `batch` is rows per step. Raises UserError without rows."""
        self.shards = {name: TokenShards(path) for name, path in sorted(find_shard_folders(folder).items())}
        if not self.shards:
            fix = "Run the step that writes token shards again."
            raise UserError("there are no token shards here", where=str(folder), fix=fix)
        self._any = next(iter(self.shards.values()))  # what is said of one folder holds of all
        self.context, self.batch_size, self._seed = self._any.seq_len, batch, seed
        facts = {name: shards.facts for name, shards in self.shards.items()}
        groups = {name: (each.get("source", ""), each.get("language", "")) for name, each in facts.items()}
        self._stages = stages_of(groups, mixture, batch)
        self._starts = {  # of every component the first row of each folder, and the number of all
            component: np.cumsum([0, *(self.shards[name].rows for name in component)])
            for stage in self._stages
            for component in stage.components
        }

    def _rows(self, draws: Integer[np.ndarray, " n"]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Return what draws, counted over all steps, take: (folder, indices of the draws, rows of the folder)."""
        for stage in self._stages:
            of_stage = np.flatnonzero((draws >= stage.first) & (draws < stage.end))
            for component, taken, positions in stage.positions(draws[of_stage]):
                starts, size = self._starts[component], int(self._starts[component][-1])
                name = "all" if len(component) == len(self.shards) else ",".join(component)
                epochs, rows = np.divmod(positions, size)
                for epoch in {*epochs.tolist()}:
                    here = epochs == epoch
                    rows[here] = permuted(rows[here], size, self._seed, name, epoch)
                folders = np.searchsorted(starts, rows, side="right") - 1
                for number in {*folders.tolist()}:
                    here = folders == number
                    yield component[number], of_stage[taken[here]], rows[here] - starts[number]

    def where(self, step: int) -> list[tuple[str, int]]:
        """Return the folder and the row number of every row of the global batch of `step`."""
        drawn = self._rows(np.arange(step * self.batch_size, (step + 1) * self.batch_size))
        places = {line: (name, row) for name, taken, rows in drawn for line, row in zip(taken.tolist(), rows.tolist())}
        return [places[line] for line in range(self.batch_size)]

    def steps_of(self, folder: str, row: int, steps: int) -> list[int]:
        """Return which of the first `steps` steps draw a row of a folder: the inverse of `where`.

        It looks through all draws, 20 million of them in about a second.
        """
        found: list[int] = []
        for first in range(0, steps * self.batch_size, _SCANNED):
            draws = np.arange(first, min(first + _SCANNED, steps * self.batch_size))
            for name, taken, rows in self._rows(draws):
                found += draws[taken[rows == row]].tolist() if name == folder else []
        return sorted(draw // self.batch_size for draw in found)

    def epochs(self, steps: int) -> dict[str, float]:
        """Return how often the first `steps` steps go through the rows of each folder."""
        draws, reached = steps * self.batch_size, dict[Component, int]()
        for stage in self._stages:
            if stage.first < draws:
                reached |= stage.reached(min(draws, stage.end))
        epochs = dict.fromkeys(self.shards, 0.0)
        for component, position in reached.items():
            for name in component:
                epochs[name] += position / int(self._starts[component][-1])
        return epochs

    def steps_within(self, most: float, steps: int) -> int:
        """Return how many of the first `steps` steps read no folder more than `most` times; at least 1."""
        return max(1, bisect.bisect(range(1, steps + 1), most, key=lambda step: max(self.epochs(step).values())))

    def batches(self, first: int, count: int, part: int = 0, parts: int = 1) -> list[Batch]:
        """Return the batches of `count` steps from `first` on, or of each the part of process `part` of `parts`.

        See `make_batch`. Raises UserError where the rows of a batch do not divide.
        """
        size, rest = divmod(self.batch_size, parts)
        if rest:
            raise UserError(f"a batch of {self.batch_size} rows does not divide over {parts} processes")
        places = np.arange(part * size, (part + 1) * size)
        draws = (np.arange(first, first + count)[:, None] * self.batch_size + places).ravel()
        fields: dict[str, np.ndarray] = {}
        for name, taken, rows in self._rows(draws):
            for key, values in self.shards[name].fields(rows).items():
                if key not in fields:
                    fields[key] = np.empty((len(draws), *values.shape[1:]), values.dtype)
                fields[key][taken] = values
        whole = make_batch(**fields, rows=np.tile(places, count), marks=self._any.marks)
        return [{key: values[k * size :][:size] for key, values in whole.items()} for k in range(count)]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Return the batch of `step`, or a part of it; see `batches`."""
        return self.batches(step, 1, part, parts)[0]

    def iterate(self, number: int = 0, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Return the batches from `number` on, which counts from 0, or a part of each, for ever; see `prefetch`."""
        count = min(max(TOKENS_AT_ONCE * parts // (self.batch_size * self.context), 1), STEPS_AT_ONCE)
        return prefetch(lambda first: self.batches(first, count, part, parts), number, count)

    iterate_part = iterate  # see `affinage.training.trainer.Feed`


def prefetch(make: Callable[[int], list[Batch]], start: int, stride: int) -> Iterator[Batch]:
    """Return the batches of `make(start)`, `make(start + stride)`, ..., for ever; `CALLS_AHEAD` run in advance.

    Closing the iterator, or dropping it, ends its threads. An error of `make` is raised when its turn comes.
    """
    pool = ThreadPoolExecutor(2, thread_name_prefix="batches")
    try:
        calls = (pool.submit(make, number) for number in itertools.count(start, stride))
        pending = deque(itertools.islice(calls, CALLS_AHEAD))
        while True:
            made = pending.popleft().result()
            pending.append(next(calls))
            yield from made
    finally:
        pool.shutdown(cancel_futures=True)


class ValidationRows:
    """Held-out rows in their order, in batches of one size; the last one is filled up with rows that do not count."""

    def __init__(self, folder: Path, *, batch: int, limit: int | None = None) -> None:
        """With `limit`, that many rows are taken, evenly spaced over the folder."""
        self.shards, self.batch_size = TokenShards(folder), batch
        self.rows = min(limit or self.shards.rows, self.shards.rows)
        self._chosen = np.arange(self.rows) * self.shards.rows // self.rows
        self.bytes = int(self.shards.row_bytes[self._chosen].sum())  # of text that these rows predict, in UTF-8

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches; see `make_batch`."""
        for first in range(0, self.rows, self.batch_size):
            chosen, marks = self._chosen[first : first + self.batch_size], self.shards.marks
            missing = ((0, self.batch_size - len(chosen)), (0, 0))
            fields = {key: np.pad(values, missing) for key, values in self.shards.fields(chosen).items()}
            fields["tokens"][len(chosen) :] = marks.pad
            yield make_batch(**fields, rows=np.arange(self.batch_size), marks=marks)

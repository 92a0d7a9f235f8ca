"""Batches from token shards: batch = f(seed, step), for any number of processes, with no state to save or lose.

A mixture gives groups of rows weights, in stages; which group a draw takes is a function of the step alone, too.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Integer

from affinage.data.order import permuted
from affinage.data.special_tokens import MARKS, Marks
from affinage.data.token_shards import TokenShards, find_shard_folders
from affinage.errors import UserError, did_you_mean

Batch = dict[str, np.ndarray]
T = TypeVar("T")

REFERENCE = "reference_log_probabilities"  # of a batch of preferences: float32 [B, documents]
SLOTS = 1024  # draws over which weights hold, rounded to a tenth of a percent; more slots where there are many weights
ALL = "all"
MANY_EPOCHS = 40  # passes over the same data after which a further one teaches nothing (Muennighoff et al., 2023)
_MIXTURE = "pretrain.mixture"  # of the recipe


def segments(
    tokens: Integer[np.ndarray, "B S"], marks: Marks = MARKS
) -> tuple[Integer[np.ndarray, "B S"], Integer[np.ndarray, "B S"]]:
    """Return segment ids and positions (index within the segment), int32 [B, S].

    A segment begins with <s>, and after </s>: what follows there without <s> is the rest of a long document.
    """
    begins = np.zeros(tokens.shape, bool) if marks.begin is None else tokens == marks.begin
    begins[:, 1:] |= tokens[:, :-1] == marks.end
    segment_ids = np.cumsum(begins, axis=1, dtype=np.int32)
    index = np.arange(tokens.shape[1], dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)
    return segment_ids, positions


def make_batch(
    tokens: Integer[np.ndarray, "B S"],
    mask: Integer[np.ndarray, "B S"],
    rows: Integer[np.ndarray, " B"],
    marks: Marks = MARKS,
) -> Batch:
    """Return the batch that training reads.

    `tokens`, `segment_ids`, `positions` int32 [B, S]; `loss_mask` float32 [B, S], 1 where the token counts as a target
    (`mask`, but never <pad>); `rows` int32 [B], the row's place in the global batch.
    """
    segment_ids, positions = segments(tokens, marks)
    counted = mask.astype(bool)
    if marks.pad != marks.end:  # otherwise no token of its segment comes before the fill, so it never counts
        counted &= tokens != marks.pad
    loss_mask: Float[np.ndarray, "B S"] = counted.astype(np.float32)
    fields = {"tokens": tokens, "segment_ids": segment_ids, "positions": positions, "loss_mask": loss_mask}
    return fields | {"rows": rows.astype(np.int32)}


def repetition(epochs: float) -> str:
    """Return the advice for a training that reads its data very many times over, "" for others."""
    if epochs <= MANY_EPOCHS:
        return ""
    return f"reads its data {epochs:,.0f} times: it will learn it by heart; give it more text or fewer steps"


# ---- mixtures ----


Group = tuple[str, str]  # the source and language of a folder of rows; "" where they have none
Weights = Mapping[str, float]  # of a source, a language, or `<source>.<language>`; or of `all` alone
Component = tuple[str, ...]  # names of the groups that are shuffled together


class Stage(NamedTuple):
    """Components that take turns in a fixed pattern. Draws are counted over all steps of the training."""

    first: int  # draw that the stage begins with
    components: tuple[Component, ...]
    pattern: Integer[np.ndarray, " slots"]  # component of every slot
    ranks: Integer[np.ndarray, " slots"]  # slots of the same component before it in the pattern
    counts: Integer[np.ndarray, " components"]  # slots of every component
    begun: Integer[np.ndarray, " components"]  # position of every component at the beginning of the stage

    def draws(self, first: int, count: int) -> Iterator[tuple[Component, np.ndarray, np.ndarray]]:
        """Return what `count` draws from `first` on take of every component: int64 [n] lines of a batch, [n] positions.

        A position is one of the component's endless sequence of epochs.
        """
        turns, slots = np.divmod(np.arange(first - self.first, first - self.first + count), len(self.pattern))
        chosen = self.pattern[slots]
        for number in {*chosen.tolist()}:
            lines = np.flatnonzero(chosen == number)
            positions = self.begun[number] + turns[lines] * self.counts[number] + self.ranks[slots[lines]]
            yield self.components[number], lines, positions

    def positions_at(self, draw: int) -> Integer[np.ndarray, " components"]:
        """Return the position that every component has reached before a draw."""
        turn, slot = divmod(draw - self.first, len(self.pattern))
        return self.begun + turn * self.counts + np.bincount(self.pattern[:slot], minlength=len(self.counts))


def stages_of(groups: Mapping[str, Group], mixture: Sequence[tuple[int, Weights]] | None, batch: int) -> list[Stage]:
    """Return the stages of a mixture, given as (first step, weights) from step 0 on; None takes all rows as they come.

    Groups that share one weight are shuffled together, so that all of them are in the same epoch. A component that a
    later stage also has continues where it was. Raises UserError for weights that name nothing, or leave nothing.
    """
    stages: list[Stage] = []
    reached: dict[Component, int] = {}
    for step, weights in mixture or [(0, {ALL: 1.0})]:
        first = step * batch
        if stages:
            reached |= zip(stages[-1].components, stages[-1].positions_at(first).tolist())
        components = {tuple(groups): 1.0} if set(weights) == {ALL} else components_of(weights, groups)
        begun = np.array([reached.get(component, 0) for component in components])
        stages.append(Stage(first, tuple(components), *_pattern(list(components.values())), begun))
    return stages


def components_of(weights: Weights, groups: Mapping[str, Group]) -> dict[Component, float]:
    """Return the groups that each weight above zero stands for, and the weight; others are left out.

    A name is a source, a language or `<source>.<language>`; the last goes before the other two.
    Raises UserError for an unknown name, a group that two names stand for, and weights that are all zero.
    """
    owner = {name: name for name in weights if name in groups}
    for name in weights:
        members = [name] if name in groups else [each for each, group in groups.items() if name in group]
        if not members:
            names = sorted({part for each, group in groups.items() for part in (each, *group) if part})
            fix = f"{did_you_mean(name, names)} There are: {', '.join(names)}".lstrip()
            raise UserError(f"a weight for {name!r}, which has no sequences", where=_MIXTURE, fix=fix)
        for member in members:
            other = owner.setdefault(member, name)
            if other not in (name, member):
                fix = f"Give {member!r} a weight of its own, or give weights to sources alone or to languages alone."
                raise UserError(f"both {other!r} and {name!r} stand for {member!r}", where=_MIXTURE, fix=fix)
    members_of = {name: tuple(sorted(group for group in owner if owner[group] == name)) for name in weights}
    components = {members_of[name]: weight for name, weight in weights.items() if weight > 0 and members_of[name]}
    if not components:
        raise UserError("all weights are zero", where=_MIXTURE, fix="Give at least one weight above zero.")
    return dict(sorted(components.items()))


def _pattern(weights: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the component and the rank of every slot, and the slots of every component.

    A component's slots are spread evenly. Their numbers are rounded by largest remainder, to at least one.
    """
    slots = max(SLOTS, 4 * len(weights))
    shares = np.array(weights) / sum(weights) * slots
    counts = np.maximum(np.floor(shares).astype(np.int64), 1)
    missing = slots - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[: max(missing, 0)]] += 1
    for _ in range(-missing):  # those with the minimum of one slot took more than their share
        counts[np.argmax(np.where(counts > 1, counts - shares, -np.inf))] -= 1
    components = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((ranks + 0.5) / counts[components], kind="stable")
    return components[order], ranks[order], counts


# ---- loaders ----


class DataLoader:
    """Endless shuffled batches from one or several folders of token shards, all of one context.

    Without a mixture, an epoch goes once through all rows of all folders. With one, each component has epochs of its
    own. Every epoch has its own order, found by arithmetic, so memory does not grow with the number of rows.
    """

    def __init__(
        self, folder: Path, *, seed: int, batch: int, mixture: Sequence[tuple[int, Weights]] | None = None
    ) -> None:
        """`folder` holds shards or sub-folders of shards; `batch` is rows per step.

        `mixture` has the steps from which on weights hold, see `stages_of`. Raises UserError where there are no rows.
        """
        self.shards = {name: TokenShards(path) for name, path in sorted(find_shard_folders(folder).items())}
        if not self.shards:
            fix = "Run the step that writes token shards again."
            raise UserError("there are no token shards here", where=str(folder), fix=fix)
        self.context = next(iter(self.shards.values())).seq_len
        self.batch_size, self._seed = batch, seed
        groups = {
            name: (shards.facts.get("source", ""), shards.facts.get("language", ""))
            for name, shards in self.shards.items()
        }
        self._stages = stages_of(groups, mixture, batch)
        self._starts = {  # of every component the first row of each folder, and the number of all
            component: np.cumsum([0, *(self.shards[name].rows for name in component)])
            for stage in self._stages
            for component in stage.components
        }
        self.reference: Mapping[str, Float[np.ndarray, "rows documents"]] = {}
        """Of preferences: the log-probabilities that the reference gives the documents of each row, by folder."""

    def _order(self, component: Component, epoch: int) -> tuple[int | str, ...]:
        """What names the permutation of an epoch."""
        return self._seed, "all" if len(component) == len(self.shards) else ",".join(component), epoch

    def _draws(self, first: int, count: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Return what `count` draws of one step take, `first` counted over all steps: (folder, lines, rows)."""
        stage = next(stage for stage in reversed(self._stages) if stage.first <= first)
        for component, lines, positions in stage.draws(first, count):
            starts = self._starts[component]
            epochs, indices = np.divmod(positions, starts[-1])
            rows = np.empty_like(indices)
            for epoch in {*epochs.tolist()}:
                here = epochs == epoch
                rows[here] = permuted(indices[here], int(starts[-1]), *self._order(component, epoch))
            folders = np.searchsorted(starts, rows, side="right") - 1
            for number in {*folders.tolist()}:
                here = folders == number
                yield component[number], lines[here], rows[here] - starts[number]

    def where(self, step: int) -> list[tuple[str, int]]:
        """Return the folder and the row number of every row of the global batch of `step`."""
        places: dict[int, tuple[str, int]] = {}
        for name, lines, rows in self._draws(step * self.batch_size, self.batch_size):
            places |= {line: (name, row) for line, row in zip(lines.tolist(), rows.tolist(), strict=True)}
        return [places[line] for line in range(self.batch_size)]

    def _uses(self, component: Component, steps: int) -> Iterator[tuple[Stage, int, int, int]]:
        """Return what the first `steps` steps take of a component: (stage, number there, first, end position)."""
        draws = steps * self.batch_size
        for stage, end in zip(self._stages, [*(stage.first for stage in self._stages[1:]), draws], strict=True):
            if stage.first < draws and component in stage.components:
                index = stage.components.index(component)
                yield stage, index, int(stage.begun[index]), int(stage.positions_at(min(draws, end))[index])

    def steps_of(self, folder: str, row: int, steps: int) -> list[int]:
        """Return which of the first `steps` steps draw a row of a folder: the inverse of `where`."""
        drawn = []
        for component in [each for each in self._starts if folder in each]:
            starts = self._starts[component]
            number, total = np.array([starts[component.index(folder)] + row]), int(starts[-1])
            for stage, index, first, end in self._uses(component, steps):
                for epoch in range(first // total, -(-end // total)):
                    place = permuted(number, total, *self._order(component, epoch), inverse=True)
                    if first <= (position := epoch * total + int(place[0])) < end:
                        turn, rank = divmod(position - int(stage.begun[index]), int(stage.counts[index]))
                        slot = int(np.flatnonzero(stage.pattern == index)[rank])
                        drawn.append((stage.first + turn * len(stage.pattern) + slot) // self.batch_size)
        return sorted(drawn)

    def epochs(self, steps: int) -> dict[str, float]:
        """Return how often the first `steps` steps go through the rows of each folder."""
        epochs = dict.fromkeys(self.shards, 0.0)
        for component, starts in self._starts.items():
            reached = max((end for *_, end in self._uses(component, steps)), default=0)
            for name in component:
                epochs[name] += reached / int(starts[-1])
        return epochs

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Return the batch of `step`, or the part of it that belongs to process `part` of `parts`; see `make_batch`."""
        size, first = _share(self.batch_size, part, parts)
        tokens = np.empty((size, self.context), np.int32)
        mask = np.ones((size, self.context), np.uint8)
        references = np.zeros((size, *next((of.shape[1:] for of in self.reference.values()), ())), np.float32)
        for name, lines, rows in self._draws(step * self.batch_size + first, size):
            tokens[lines], mask[lines] = self.shards[name].read(rows)
            if self.reference:
                references[lines] = self.reference[name][rows]
        batch = make_batch(tokens, mask, np.arange(first, first + size), next(iter(self.shards.values())).marks)
        return batch | ({REFERENCE: references} if self.reference else {})

    def iterate(self, number: int = 0) -> Iterator[Batch]:
        """Return the batches from `number` on, which counts from 0, for ever; see `prefetch`."""
        return self.iterate_part(number, 0, 1)

    def iterate_part(self, number: int, part: int, parts: int) -> Iterator[Batch]:
        """See `affinage.training.trainer.Feed`."""
        return prefetch(lambda step: self.batch(step, part, parts), number)


def _share(batch: int, part: int, parts: int) -> tuple[int, int]:
    """Return the number of rows of one part of a batch, and the first of them."""
    if batch % parts:
        raise UserError(f"a batch of {batch} rows does not divide over {parts} processes")
    return batch // parts, part * (batch // parts)


def prefetch(make: Callable[[int], T], start: int, *, ahead: int = 8, threads: int = 2) -> Iterator[T]:
    """Return `make(start)`, `make(start + 1)`, ... for ever, `ahead` of them made by `threads` threads in advance.

    Closing the iterator, or dropping it, ends the threads. An error of `make` is raised when its turn comes.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    try:
        numbers = itertools.count(start)
        pending = deque(pool.submit(make, next(numbers)) for _ in range(ahead))
        while True:
            made = pending.popleft().result()
            pending.append(pool.submit(make, next(numbers)))
            yield made
    finally:
        pool.shutdown(cancel_futures=True)


class ValidationRows:
    """Held-out rows in their order, in batches of one size; the last batch is filled up with rows that do not count."""

    def __init__(self, folder: Path, *, batch: int, limit: int | None = None) -> None:
        """With `limit`, that many rows are taken, evenly spaced over the folder."""
        self._shards = TokenShards(folder)
        self.name, self.context, self.batch_size = folder.name, self._shards.seq_len, batch
        self.rows = min(limit or self._shards.rows, self._shards.rows)
        self._chosen = np.arange(self.rows) * self._shards.rows // self.rows
        self.bytes = int(self._shards.row_bytes[self._chosen].sum())
        """UTF-8 bytes of the tokens that these rows predict: bits per byte = total nats / ln 2 / bytes."""
        self.reference: Float[np.ndarray, "rows documents"] | None = None
        """Of preferences: see `DataLoader.reference`."""

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self.rows // self.batch_size)

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        """Return batch `index`, or the part of it that belongs to process `part` of `parts`; see `make_batch`."""
        size, first = _share(self.batch_size, part, parts)
        chosen = self._chosen[index * self.batch_size + first :][:size]
        tokens = np.full((size, self.context), self._shards.marks.pad, np.int32)
        mask = np.zeros((size, self.context), np.uint8)
        tokens[: len(chosen)], mask[: len(chosen)] = self._shards.read(chosen)
        batch = make_batch(tokens, mask, np.arange(first, first + size), self._shards.marks)
        if self.reference is not None:
            batch[REFERENCE] = np.zeros((size, self.reference.shape[1]), np.float32)
            batch[REFERENCE][: len(chosen)] = self.reference[chosen]
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(index) for index in range(len(self)))

"""Which part of the rows each row of training is drawn from: weights, in stages, as a function of the step alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from affinage.errors import UserError, did_you_mean

SLOTS = 1024  # rows over which weights hold, rounded to whole rows: to a tenth of a percent; more of many weights
ALL = "all"
_KEY = "pretrain.mixture"  # of the recipe


@dataclass(frozen=True)
class Group:
    """Rows of one source in one language; "" where rows have none."""

    source: str
    language: str
    rows: int


Weights = Mapping[str, float]  # of a source, a language, or `<source>.<language>`; or of `all` alone
Component = tuple[str, ...]  # names of the groups that are shuffled together


class Draws(NamedTuple):
    """Rows of training that one component gives: which ones, and their positions in its endless sequence of epochs."""

    component: Component
    lines: Integer[np.ndarray, " n"]  # their places among the rows that were asked for
    positions: Integer[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Stage:
    """Pools that take turns in a fixed pattern of rows, from a row of training on."""

    first: int  # row of training, counted over all steps
    components: tuple[Component, ...]
    turns: Integer[np.ndarray, " slots"]  # component of every slot
    ranks: Integer[np.ndarray, " slots"]  # how many slots of the same component come before, in the pattern
    counts: tuple[int, ...]  # slots of every component
    begun: tuple[int, ...]  # rows that earlier stages took of every component

    def draws(self, first: int, count: int) -> list[Draws]:
        """What `count` rows of training are, from the row `first` on."""
        turns, slots = np.divmod(np.arange(first - self.first, first - self.first + count), len(self.turns))
        components, ranks = self.turns[slots], self.ranks[slots]
        found = []
        for component in set(components.tolist()):
            lines = np.flatnonzero(components == component)
            positions = self.begun[component] + turns[lines] * self.counts[component] + ranks[lines]
            found.append(Draws(self.components[component], lines, positions))
        return found

    def taken(self, component: int, row: int) -> int:
        """Rows taken of a component before the row `row` of training, in this stage."""
        turn, slot = divmod(row - self.first, len(self.turns))
        return turn * self.counts[component] + int(np.count_nonzero(self.turns[:slot] == component))

    def row_of(self, component: int, position: int) -> int:
        """The row of training that draws a position of a component's sequence: the inverse of `draws`."""
        turn, rank = divmod(position - self.begun[component], self.counts[component])
        return self.first + turn * len(self.turns) + self._slots[component][rank]

    @cached_property
    def _slots(self) -> list[list[int]]:
        return [np.flatnonzero(self.turns == component).tolist() for component in range(len(self.components))]


class Mixture:
    """Stages of weights over groups of rows.

    Groups that share one weight are shuffled together, so that all of them are in the same epoch. A component that a
    later stage also has continues where it was.
    """

    def __init__(self, groups: Mapping[str, Group], stages: Sequence[tuple[int, Weights]] | None, batch: int) -> None:
        """`stages` are (first step, weights), the first from step 0; None takes all rows as they come.

        Raises UserError for weights that name nothing, or leave nothing.
        """
        self.groups = dict(groups)
        self.stages: list[Stage] = []
        taken: dict[Component, int] = {}
        for number, (step, weights) in enumerate(stages or [(0, {ALL: 1.0})]):
            if self.stages:
                for component, begun in zip(self.stages[-1].components, self._taken_at(number - 1, step * batch)):
                    taken[component] = begun
            components = {tuple(groups): 1.0} if set(weights) == {ALL} else components_of(weights, groups)
            turns, ranks, counts = _pattern(list(components.values()))
            begun_at = tuple(taken.get(component, 0) for component in components)
            self.stages.append(Stage(step * batch, tuple(components), turns, ranks, counts, begun_at))
        self._firsts = [stage.first for stage in self.stages]

    @property
    def components(self) -> list[Component]:
        """All components of all stages."""
        return list(dict.fromkeys(component for stage in self.stages for component in stage.components))

    def draws(self, first: int, count: int) -> list[Draws]:
        """Where `count` rows of training of one step come from; `first` is counted over all steps."""
        return self._stage_at(first).draws(first, count)

    def uses(self, component: Component, rows: int) -> list[tuple[Stage, int, int, int]]:
        """The stages before the row `rows` of training that draw from a component: (stage, number there, from, to)."""
        found = []
        for number, stage in enumerate(self.stages):
            if stage.first < rows and component in stage.components:
                index = stage.components.index(component)
                found.append((stage, index, stage.begun[index], self._taken_at(number, rows)[index]))
        return found

    def drawn(self, rows: int) -> dict[str, float]:
        """How many rows of each group the first `rows` rows of training draw; of a begun epoch its share."""
        found = dict.fromkeys(self.groups, 0.0)
        for component in self.components:
            taken = max((stop for _, _, _, stop in self.uses(component, rows)), default=0)
            total = sum(self.groups[name].rows for name in component)
            for name in component:
                found[name] += taken * self.groups[name].rows / total
        return found

    def _stage_at(self, row: int) -> Stage:
        number = len(self._firsts) - 1
        while self._firsts[number] > row:
            number -= 1
        return self.stages[number]

    def _taken_at(self, number: int, row: int) -> list[int]:
        """Positions to which the components of a stage have come at a row of training, or at its end before that."""
        stage = self.stages[number]
        if number + 1 < len(self.stages):
            row = min(row, self.stages[number + 1].first)
        return [begun + stage.taken(component, row) for component, begun in enumerate(stage.begun)]


def components_of(weights: Weights, groups: Mapping[str, Group]) -> dict[Component, float]:
    """The groups that each weight above zero stands for, and the weight; groups that none stands for are left out.

    A name is a source, a language or `<source>.<language>`; the last goes before the other two.
    Raises UserError for a name that there is not, a group that two names stand for, and weights that are all zero.
    """
    owner = {name: name for name in weights if name in groups}
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise UserError(f"the weight of {name!r} is {weight}", where=_KEY, fix="weights are numbers from 0 up")
        for group in _meant(name, groups):
            other = owner.setdefault(group, name)
            if other not in (name, group):
                raise UserError(
                    f"both {other!r} and {name!r} stand for the rows of {group!r}",
                    where=_KEY,
                    fix=f"give {group!r} a weight of its own, or give weights to sources alone or to languages alone",
                )
    components = {
        tuple(sorted(group for group, by in owner.items() if by == name)): weight
        for name, weight in weights.items()
        if weight > 0
    }
    components.pop((), None)
    if not components:
        raise UserError("all weights are zero", where=_KEY)
    return dict(sorted(components.items()))


def _meant(name: str, groups: Mapping[str, Group]) -> list[str]:
    if name in groups:
        return [name]
    found = [each for each, group in groups.items() if name in (group.source, group.language)]
    if found:
        return found
    refuse_unknown(name, {part for each, group in groups.items() for part in (each, group.source, group.language)})
    return []


def refuse_unknown(name: str, known: set[str]) -> None:
    """Raise the UserError for a weight of something that there is not."""
    names = sorted(known - {""})
    raise UserError(
        f"a weight for {name!r}, but there are no rows of it",
        where=_KEY,
        fix=f"{did_you_mean(name, names)} Rows there are: {', '.join(names)}".lstrip(),
    )


def _pattern(weights: list[float]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The order in which components take turns: component and rank of every slot, slots of every component.

    A component's slots are spread evenly. Their numbers are rounded by largest remainder, to at least one.
    """
    slots = max(SLOTS, 4 * len(weights))
    shares = np.array(weights) / sum(weights) * slots
    counts = np.maximum(np.floor(shares).astype(np.int64), 1)
    missing = slots - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[: max(missing, 0)]] += 1
    for _ in range(-missing):  # those of at least one slot took more than their share
        counts[np.argmax(np.where(counts > 1, counts - shares, -np.inf))] -= 1
    components = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((ranks + 0.5) / counts[components], kind="stable")
    return components[order], ranks[order], tuple(counts.tolist())

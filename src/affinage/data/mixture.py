"""Which groups of sequences a training draws from: weights, in stages, as a function of the step alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from affinage.errors import UserError, did_you_mean

SLOTS = 1024  # draws over which weights hold, rounded to a tenth of a percent; more slots where there are many weights
ALL = "all"
_KEY = "pretrain.mixture"  # of the recipe


class Group(NamedTuple):
    """The sequences of one source in one language; "" where they have none."""

    source: str
    language: str
    rows: int


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
        for number in np.unique(chosen).tolist():
            lines = np.flatnonzero(chosen == number)
            positions = self.begun[number] + turns[lines] * self.counts[number] + self.ranks[slots[lines]]
            yield self.components[number], lines, positions

    def positions_at(self, draw: int) -> Integer[np.ndarray, " components"]:
        """Return the position that every component has reached before a draw."""
        turn, slot = divmod(draw - self.first, len(self.pattern))
        return self.begun + turn * self.counts + np.bincount(self.pattern[:slot], minlength=len(self.counts))

    def draw_of(self, number: int, position: int) -> int:
        """Return the draw that takes a position of a component: the inverse of `draws`."""
        turn, rank = divmod(position - int(self.begun[number]), int(self.counts[number]))
        return self.first + turn * len(self.pattern) + int(np.flatnonzero(self.pattern == number)[rank])


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
        members = [name] if name in groups else [each for each, group in groups.items() if name in group[:2]]
        if not members:
            names = sorted({part for each, group in groups.items() for part in (each, *group[:2]) if part})
            fix = f"{did_you_mean(name, names)} There are: {', '.join(names)}".lstrip()
            raise UserError(f"a weight for {name!r}, which has no sequences", where=_KEY, fix=fix)
        for member in members:
            other = owner.setdefault(member, name)
            if other not in (name, member):
                fix = f"Give {member!r} a weight of its own, or give weights to sources alone or to languages alone."
                raise UserError(f"both {other!r} and {name!r} stand for {member!r}", where=_KEY, fix=fix)
    members_of = {name: tuple(sorted(group for group in owner if owner[group] == name)) for name in weights}
    components = {members_of[name]: weight for name, weight in weights.items() if weight > 0 and members_of[name]}
    if not components:
        raise UserError("all weights are zero", where=_KEY, fix="Give at least one weight above zero.")
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

"""Several runs, or models of runs, beside each other: what is set otherwise, what it cost, and what it gave."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from affinage.differing import differing
from affinage.errors import UserError
from affinage.evaluation.compare import Answers, Difference, Unlike, compare, unlike
from affinage.report.evaluations import Evaluation, read_evaluation
from affinage.report.facts import Facts, collect_facts
from affinage.report.summary import verdict

_NAMES = ("name", "description", "report")  # settings that change nothing of what is compared
_HOUR = 3600.0


@dataclass(frozen=True)
class Entrant:
    """One of those that are compared."""

    name: str  # as the user called it
    facts: Facts  # of its run; without anything in them for results that no run has made
    results: Path | None = None  # the folder of its answers to benchmarks
    evaluation: Evaluation | None = None  # what is in it
    again: str = ""  # the command that evaluates it again, where the answers are not of the model as it is now

    @property
    def is_run(self) -> bool:
        """Whether more is known of it than its answers."""
        return bool(self.facts.recipe)


@dataclass(frozen=True)
class Setting:
    """A setting that is not the same in all runs: its value in each, None where a run does not have it."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Paired:
    """What the items say of one entrant against the first: both by their places."""

    other: int
    differences: tuple[Difference, ...]
    unlike: tuple[Unlike, ...] = ()  # tasks that were not asked alike


@dataclass(frozen=True)
class Comparison:
    """All that is said of several entrants; differences are against the first of them."""

    entrants: tuple[Entrant, ...]
    settings: tuple[Setting, ...]
    paired: tuple[Paired, ...]
    quantities: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # name -> of each entrant, None if unknown

    @property
    def title(self) -> str:
        """Their names in a line."""
        return " · ".join(entrant.name for entrant in self.entrants)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "runs": [
                {
                    "name": one.name,
                    "summary": verdict(one.facts, "en") if one.is_run else "",
                    **{name: values[place] for name, values in self.quantities.items()},
                    "bits_per_byte": bits_per_byte(one.facts),
                    "scores": {
                        task: {
                            s.metric: {"value": s.value, "stderr": s.stderr}
                            for s in one.evaluation.scores
                            if s.task == task
                        }
                        for task in dict.fromkeys(s.task for s in one.evaluation.scores)
                    }
                    if one.evaluation
                    else {},
                    **({"judged_before": True, "evaluate_again": one.again} if one.again else {}),
                }
                for place, one in enumerate(self.entrants)
            ],
            "settings": [{"key": one.key, "values": list(one.values)} for one in self.settings],
            "differences": [
                {"from": self.entrants[0].name, "to": self.entrants[pair.other].name, **each.to_dict()}
                for pair in self.paired
                for each in pair.differences
            ],
            "asked_otherwise": [
                {"from": self.entrants[0].name, "to": self.entrants[pair.other].name, **each.to_dict()}
                for pair in self.paired
                for each in pair.unlike
            ],
        }


def entrant(
    name: str,
    run: Path | None,
    results: Path | None,
    *,
    again: str = "",
    parts: Mapping[str, Path] | None = None,
) -> Entrant:
    """One to compare: its run's folder, the folder of its results, or both; `again` as `Entrant` has it.

    `parts` are the folders of the run's steps that count, all of them by default.
    """
    facts = collect_facts(run, parts) if run is not None else collect_facts(Path(name), {})
    judged = facts.evaluations[-1] if facts.evaluations else None
    return Entrant(name, facts, results, read_evaluation(name, results) if results is not None else judged, again)


def comparison(entrants: Sequence[Entrant]) -> Comparison:
    """What is to be said of them.

    Raises:
        UserError: nothing can be compared: they are no runs, and have no item of a benchmark in common.
    """
    found = [_quantities(one) for one in entrants]
    names = dict.fromkeys(name for each in found for name in each)
    quantities = {name: tuple(each.get(name) for each in found) for name in names}
    settings = differing_settings([one.facts.recipe for one in entrants if one.is_run])
    if not all(one.is_run for one in entrants):
        settings = ()
    paired = tuple(_paired(entrants))
    if not (quantities or settings or any(pair.differences for pair in paired)):
        places = ", ".join(one.name for one in entrants)
        commands = dict.fromkeys(map(_judging, entrants))
        fix = f"Run their recipes, or judge them: {'; '.join(commands)}"
        raise UserError(
            "there is nothing to compare: no training, no results, the same settings", where=places, fix=fix
        )
    return Comparison(tuple(entrants), settings, paired, quantities)


def _judging(one: Entrant) -> str:
    """The command that judges it, with the tasks where its recipe does not say what it evaluates."""
    tasks = one.facts.settings.evaluate.tasks
    return shlex.join(["affinage", "eval", one.name, *([] if tasks else ["--tasks", "TASK"])])


def _paired(entrants: Sequence[Entrant]) -> Iterator[Paired]:
    first, ours = entrants[0], None
    for place, other in enumerate(entrants[1:], 1):
        if first.results is None or other.results is None:
            continue
        try:
            ours = ours or Answers(first.results)
            theirs = Answers(other.results)
            yield Paired(place, tuple(compare(ours, theirs)), tuple(unlike(ours, theirs)))
        except UserError:
            if not (first.is_run and other.is_run):  # then there is nothing else to compare
                raise


def differing_settings(recipes: Sequence[Mapping[str, Any]]) -> tuple[Setting, ...]:
    """The settings that are not the same in all recipes, by their keys as `--set` takes them; sections in a whole."""
    found = (Setting(key, values) for key, values in differing(recipes))
    return tuple(setting for setting in found if setting.key.split(".")[0] not in _NAMES)


def _quantities(one: Entrant) -> dict[str, Any]:
    """What a run took and gave, in numbers; what it does not know is left out."""
    trainings = one.facts.trainings
    first = trainings[0] if trainings else None
    if first is None:
        return {}
    seconds = sum(training.worked or 0.0 for training in trainings) or None
    flops = [t.flops_per_step * t.steps for t in trainings if t.flops_per_step and t.steps]
    found = {
        "parameters": first.parameters.total,
        "tokens": sum(training.tokens or 0 for training in trainings) or None,
        "flops": sum(flops) or None,
        "devices": str(first.devices) or None,
        "training_seconds": seconds,
        "device_hours": seconds * first.devices.count / _HOUR if seconds and first.devices.count else None,
        "seconds": one.facts.seconds,
        "tokens_per_second": first.tokens_per_second,
        "mfu": first.mfu,
        "final_loss": first.final_loss,
    }
    return {name: value for name, value in found.items() if value is not None}


def bits_per_byte(facts: Facts) -> dict[str, float]:
    """Of each validation set, after the first training."""
    sets = facts.trainings[0].validation if facts.trainings else {}
    return {name: one.bits_per_byte for name, one in sets.items() if one.bits_per_byte is not None}

"""Several runs, or models of runs, side by side: which settings differ, what each cost, and what each gave."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from affinage.config.yaml import brief
from affinage.differing import differing
from affinage.errors import UserError
from affinage.evaluation.results import LOG_LIKELIHOOD, Difference, compare, read_answers
from affinage.report.facts import MODELS, Evaluation, Facts, read_evaluation
from affinage.report.figures import TITLES, Figure, Series, line_figure, loss_axis, score_figure, smoothed, thinned
from affinage.report.language import N_, Language, language_of
from affinage.report.page import render_template, summary

_NAMES = ("name", "description", "report")  # settings that change nothing of what is compared
_METRICS = {  # what metrics of texts mean
    LOG_LIKELIHOOD: N_(
        "log_likelihood: of the expected text, in nats per item, higher is better; perplexity is exp(−log_likelihood)."
    ),
}


@dataclass(frozen=True)
class Entrant:
    """One of those that are compared."""

    name: str  # as the user called it
    facts: Facts  # of its run; empty for results without a run
    results: Path | None = None  # the folder of its answers to benchmarks
    last: bool = False  # whether it is its run's last training, not the whole run, whose first one has the loss

    @property
    def is_run(self) -> bool:
        """Whether more is known of it than its answers."""
        return bool(self.facts.recipe)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Its scores; without a folder of answers, those of its run's last model."""
        if self.results is not None:
            return read_evaluation(self.name, self.results)
        return next(reversed(self.facts.evaluations), None)

    @property
    def bits_per_byte(self) -> dict[str, float]:
        """Of each validation set, after the run's first training, or the one that is compared."""
        sets = self.facts.trainings[-self.last].result.validation if self.facts.trainings else {}
        return {name: one.bits_per_byte for name, one in sets.items() if one.bits_per_byte is not None}

    @property
    def quantities(self) -> dict[str, Any]:
        """What a run took and gave, in numbers; what it does not know is left out."""
        results = [training.result for training in self.facts.trainings]
        if not results:
            return {}
        first, seconds = results[-self.last], sum(result.worked or 0.0 for result in results)
        found = {
            "parameters": first.parameters.total,
            "tokens": sum(result.tokens or 0 for result in results),
            "flops": sum((result.flops_per_step or 0.0) * (result.steps or 0) for result in results),
            "devices": str(first.devices),
            "training_seconds": seconds,
            "device_hours": seconds * (first.devices.count or 0) / 3600,
            "seconds": self.facts.seconds,
            "tokens_per_second": first.tokens_per_second,
            "mfu": first.mfu,
            "final_loss": first.final_loss,
        }
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class Comparison:
    """Several entrants, their settings that differ (key -> the values), and by name the differences from the first."""

    entrants: list[Entrant]
    settings: dict[str, tuple[Any, ...]]
    paired: dict[str, list[Difference]]

    @property
    def quantities(self) -> dict[str, list[Any]]:
        """All quantities that any of them knows, of each; None where it does not."""
        names = dict.fromkeys(name for one in self.entrants for name in one.quantities)
        return {name: [one.quantities.get(name) for one in self.entrants] for name in names}

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        quantities, first = self.quantities, self.entrants[0].name
        return {
            "runs": [
                {"name": one.name, "summary": summary(one.facts, "en") if one.is_run else ""}
                | {name: values[place] for name, values in quantities.items()}
                | {"bits_per_byte": one.bits_per_byte, "scores": one.evaluation.to_dict() if one.evaluation else {}}
                for place, one in enumerate(self.entrants)
            ],
            "settings": [{"key": key, "values": list(values)} for key, values in self.settings.items()],
            "differences": [
                {"from": first, "to": name} | difference.to_dict()
                for name, differences in self.paired.items()
                for difference in differences
            ],
            "asked_otherwise": [
                {"from": first, "to": name, "task": task, "questions": count}
                for name, differences in self.paired.items()
                for task, count in _asked_otherwise(differences).items()
            ],
        }


def comparison(entrants: Sequence[Entrant]) -> Comparison:
    """Compare several entrants.

    Raises:
        UserError: nothing can be compared: they are no runs, and have no item of a benchmark in common.
    """
    runs = all(one.is_run for one in entrants)
    settings = differing_settings([one.facts.recipe for one in entrants]) if runs else {}
    first, paired = entrants[0], {}
    for other in entrants[1:]:
        if first.results is not None and other.results is not None:
            try:
                paired[other.name] = compare(read_answers(first.results), read_answers(other.results))
            except UserError:
                if not (first.is_run and other.is_run):  # then there is nothing else to compare
                    raise
    found = Comparison(list(entrants), settings, paired)
    if not (found.quantities or settings or paired):
        tasks = [[] if one.facts.settings.evaluate.get("tasks") else ["--tasks", "TASK"] for one in entrants]
        commands = [shlex.join(["affinage", "eval", one.name, *more]) for one, more in zip(entrants, tasks)]
        raise UserError(
            "there is nothing to compare: no training, no results, the same settings",
            where=", ".join(one.name for one in entrants),
            fix=f"Run their recipes, or evaluate them: {'; '.join(dict.fromkeys(commands))}",
        )
    return found


def differing_settings(recipes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The settings that are not the same in all recipes, by their keys as `--set` takes them; sections as a whole."""
    return {key: values for key, values in differing(recipes) if key.split(".")[0] not in _NAMES}


def render_comparison(found: Comparison, language: str | None = None) -> str:
    """The comparison as one self-contained HTML page, in English or French."""
    t = language_of(language)
    losses = [figure for name in MODELS if (figure := _loss_figure(found, name, t))]
    evaluations = {one.name: one.evaluation for one in found.entrants if one.evaluation}
    return render_template(
        "comparison.html.j2",
        t,
        found=found,
        summaries={one.name: summary(one.facts, t.code) if one.is_run else "" for one in found.entrants},
        brief=brief,
        losses=losses,
        scores=score_figure(evaluations, t, t("Scores side by side")),
        notes=notes,
    )


def _asked_otherwise(differences: Sequence[Difference]) -> dict[str, int]:
    """The tasks with items of another prompt or right answer, and the number of these items."""
    return {one.task: one.asked_otherwise for one in differences if one.asked_otherwise}


def notes(differences: Sequence[Difference], t: Language) -> list[str]:
    """What must be known of the differences: tasks whose questions differ, what a metric of an item is."""
    tasks, found = [], []
    for task, count in _asked_otherwise(differences).items():
        items = t("items with another prompt or right answer: {count}", count=count)
        tasks.append(f"{task} ({items})")
    if tasks:
        found.append(t("Differences in these tasks are not of the models alone: {tasks}.", tasks=", ".join(tasks)))
    metrics = {one.metric.partition(",")[0] for one in differences}
    return found + [t(meaning) for metric, meaning in _METRICS.items() if metric in metrics]


def _loss_figure(found: Comparison, name: str, t: Language) -> Figure | None:
    """The losses of one training in all runs that have it, against tokens."""
    series = []
    for place, one in enumerate(found.entrants):
        training = one.facts.training(name)
        if training is None or not training.result.tokens or not training.result.steps:
            continue
        tokens = training.result.tokens / training.result.steps
        curve = [(step * tokens, loss) for step, loss in smoothed(training.curves.get("loss", []))]
        sets = [dict(points) for points in training.validation.values()]
        steps = sorted(set.intersection(*map(set, sets))) if sets else []
        means = [(step * tokens, sum(losses[step] for losses in sets) / len(sets)) for step in steps]
        series.append(Series(one.name, thinned(curve), place, "line"))
        series.append(Series(t("validation: {name}", name=one.name), thinned(means, 60), place, "points"))
    series = [one for one in series if one.points]
    if len({one.color for one in series}) < 2:
        return None
    title = t("Loss: {training}", training=t(TITLES[name]))
    return line_figure(title, series, t("training tokens"), loss_axis(series, name, t), t)

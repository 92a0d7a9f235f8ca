"""The page that compares runs: the report's parts, with a column or a color for each of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from affinage.config.yaml import brief
from affinage.evaluation.compare import Difference, Unlike
from affinage.evaluation.results import BITS_PER_BYTE, LOG_LIKELIHOOD
from affinage.report.charts import (
    LOG_RANGE,
    WIDE,
    Axis,
    Interval,
    Point,
    Row,
    Series,
    interval_chart,
    line_chart,
    responsive,
    smoothed,
    thinned,
)
from affinage.report.comparison import Comparison, Entrant, Paired, Setting, bits_per_byte
from affinage.report.evaluations import is_share
from affinage.report.figures import Figure, Key, values_of
from affinage.report.page import environment, shell
from affinage.report.quantities import ABSENT, Quantities
from affinage.report.strings import spoken, strings
from affinage.report.summary import verdict
from affinage.report.trainings import Training

_TRAININGS = ("pretrain", "sft", "dpo")
_METRICS = {LOG_LIKELIHOOD: "log_likelihood", BITS_PER_BYTE: "bits_per_byte_of_texts"}  # what is said of them


@dataclass(frozen=True)
class Line:
    """A row of a table, written out."""

    label: str
    values: list[str]


def render_comparison(found: Comparison, language: str | None = None) -> str:
    """The comparison as one self-contained HTML page, in English or French."""
    language = spoken(language or "en")
    words, quantities = strings(language), Quantities(language)
    losses = [figure for name in _TRAININGS if (figure := _losses(found, name, words, quantities))]
    judged = _scores(found, words, quantities)
    there = {
        "runs": True,
        "differing": all(one.is_run for one in found.entrants),
        "losses": bool(losses),
        "judged": judged is not None,
        "differences": bool(found.paired),
    }
    return (
        environment()
        .get_template("comparison.html.j2")
        .render(
            **shell(language),
            found=found,
            sections=[name for name, shown in there.items() if shown],
            summaries=[(one.name, verdict(one.facts, language) if one.is_run else "") for one in found.entrants],
            judged_before=[
                words["judged_before"].format(name=one.name, command=one.again) for one in found.entrants if one.again
            ],
            lines=quantity_lines(found, words, quantities),
            settings=[Line(one.key, setting_values(one)) for one in found.settings],
            losses=losses,
            judged=judged,
            score_lines=_score_lines(found, quantities),
            differences=_differences(found, words, quantities),
        )
    )


def quantity_lines(found: Comparison, words: dict[str, str], quantities: Quantities) -> list[Line]:
    """What each took and gave, a line for each quantity that any of them knows."""
    units: dict[str, Callable[[Any], str]] = {
        "flops": quantities.flops,
        "devices": str,
        "training_seconds": quantities.duration,
        "seconds": quantities.duration,
        "device_hours": quantities.number,
        "mfu": quantities.percent,
        "final_loss": partial(quantities.decimal, places=3),
    }
    lines = [
        Line(words[f"c_{name}"], [ABSENT if v is None else units.get(name, quantities.count)(v) for v in values])
        for name, values in found.quantities.items()
    ]
    bits = [bits_per_byte(one.facts) for one in found.entrants]
    return lines + [
        Line(words["c_bits_per_byte"].format(name=name), [quantities.decimal(one.get(name), 3) for one in bits])
        for name in dict.fromkeys(name for one in bits for name in one)
    ]


def setting_values(setting: Setting) -> list[str]:
    """A setting in each of the runs, written out."""
    return [ABSENT if value is None else brief(value) for value in setting.values]


def _losses(found: Comparison, name: str, words: dict[str, str], quantities: Quantities) -> Figure | None:
    """The losses of one training in all runs that have it, against tokens."""
    trained = [
        (place, one, training) for place, one in enumerate(found.entrants) if (training := one.facts.training(name))
    ]
    if len(trained) < 2:
        return None
    in_tokens = all(training.tokens and training.steps for _, _, training in trained)
    series = []
    for place, one, training in trained:
        scale = training.tokens / training.steps if in_tokens and training.tokens and training.steps else 1.0
        curve = [(step * scale, loss) for step, loss in smoothed(training.curves.get("loss", []))]
        series.append(Series(one.name, thinned(curve), place, "line"))
        points = [(step * scale, loss) for step, loss in _mean_validation(training)]
        series.append(Series(words["validation_of"].format(name=one.name), thinned(points, 60), place, "points"))
    series = [one for one in series if one.points]
    if not series:
        return None
    values = [y for one in series for _, y in one.points if y > 0]
    log = max(values, default=1.0) > LOG_RANGE * min(values, default=1.0)
    kind = trained[0][2].loss_kind
    x = Axis(words["tokens_axis"] if in_tokens else words["step"])
    y = Axis(words[f"{kind}_log_axis" if log else f"{kind}_axis"], "~g", log)
    title = words[f"losses_{name}"]

    def draw(width: float) -> Markup:
        return line_chart(series, x, y, title, width, 340.0 if width == WIDE else 260.0, quantities.language)

    legend = tuple(Key(one.label, one.color, one.style) for one in series)
    return Figure(title, "", responsive(draw), legend, values_of(x.label, series))


def _mean_validation(training: Training) -> list[Point]:
    """The mean over the validation sets, at the steps at which all of them were looked at."""
    sets = [dict(points) for points in training.validation_curves.values()]
    steps = sorted(set.intersection(*(set(one) for one in sets))) if sets else []
    return [(step, sum(one[step] for one in sets) / len(sets)) for step in steps]


def _scores(found: Comparison, words: dict[str, str], quantities: Quantities) -> Figure | None:
    """The headline metric of every task, a color for each entrant."""
    judged = [(place, one) for place, one in enumerate(found.entrants) if one.evaluation]
    rows = []
    for task in dict.fromkeys(s.task for _, one in judged for s in _shares(one)):
        known = [(place, one, s) for place, one in judged for s in _shares(one) if s.task == task]
        intervals = [Interval(s.value, s.stderr or 0.0, place) for place, _, s in known]
        chance = next((s.chance for _, _, s in known if s.chance is not None), None)
        rows.append(Row(task, intervals, chance))
    if not rows:
        return None
    axis = Axis(words["scores_axis"], ".0%")
    legend = [Key(one.name, place, "points") for place, one in judged]
    if any(row.chance is not None for row in rows):
        legend.append(Key(words["chance"], 0, "chance"))
    label, language = words["scores_label"], quantities.language
    picture = responsive(lambda width: interval_chart(rows, axis, label, width, language, hollow=False))
    return Figure(words["judged"], "", picture, tuple(legend))


def _shares(one: Entrant) -> list[Any]:
    return [s for s in one.evaluation.scores if s.headline and s.is_share] if one.evaluation else []


def _score_lines(found: Comparison, quantities: Quantities) -> list[tuple[str, str, list[str]]]:
    judged = [one.evaluation for one in found.entrants]
    names = dict.fromkeys((s.task, s.metric) for one in judged if one for s in one.scores)
    lines = []
    for task, metric in names:
        scores = [one.score(task, metric) if one else None for one in judged]
        written = [
            quantities.with_error(s.value, s.stderr, as_percent=s.is_share) if s is not None else ABSENT for s in scores
        ]
        lines.append((task, metric, written))
    return lines


def _differences(
    found: Comparison, words: dict[str, str], quantities: Quantities
) -> list[tuple[str, list[dict[str, Any]], list[str]]]:
    return [
        (
            found.entrants[pair.other].name,
            [difference_line(one, words, quantities) for one in pair.differences],
            notes(pair, words),
        )
        for pair in found.paired
    ]


def notes(pair: Paired, words: dict[str, str]) -> list[str]:
    """What must be known of the differences: tasks that were not asked alike, what a metric of an item is."""
    told = []
    if pair.unlike:
        tasks = ", ".join(f"{one.task} ({'; '.join(_reasons(one, words))})" for one in pair.unlike)
        told.append(words["asked_otherwise"].format(tasks=tasks))
    metrics = {one.metric.partition(",")[0] for one in pair.differences}
    told += [words[said] for metric, said in _METRICS.items() if metric in metrics]
    return told


def _reasons(one: Unlike, words: dict[str, str]) -> Iterator[str]:
    if one.questions:
        yield words["other_prompts"].format(count=one.questions)
    if one.versions:
        yield words["other_version"].format(a=one.versions[0], b=one.versions[1])


def difference_line(one: Difference, words: dict[str, str], quantities: Quantities) -> dict[str, Any]:
    """A paired difference, written out."""
    share = is_share(one.metric)
    unit = f" {words['points']}" if share else ""

    def signed(value: float) -> str:
        size = quantities.decimal(100 * abs(value), 1) if share else quantities.number(abs(value))
        return ("+" if value > 0 else "−" if value < 0 else "") + size

    def plain(value: float) -> str:
        return quantities.percent(value) if share else quantities.number(value)

    return {
        "task": one.task,
        "metric": one.metric,
        "a": plain(one.a),
        "b": plain(one.b),
        "difference": signed(one.difference) + unit,
        "interval": words["between"].format(low=signed(one.low), high=signed(one.high)) + unit,
        "items": quantities.count(one.items),
        "real": one.is_real,
    }

"""Scores of other models, from a file of the user's, beside those of a run. None of them is measured here."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from affinage.config.yaml import parse
from affinage.errors import UserError
from affinage.report.charts import Axis, Interval, Row, row_chart
from affinage.report.evaluations import HEADLINES, Evaluation, marked
from affinage.report.facts import TRAININGS, Facts
from affinage.report.figures import Figure, Key, in_chat_note, model_name
from affinage.report.language import Language


class Baseline(BaseModel):
    """A model: the tokens that it was trained on, its scores by task in percent, and who published them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    tokens: float | None = None
    source: str = ""
    scores: dict[str, float]


class Baselines(BaseModel):
    """The file: models, and by task the metric (default: that of the charts) and the number of items of the scores."""

    model_config = ConfigDict(extra="forbid")

    models: list[Baseline]
    metrics: dict[str, str] = {}
    items: dict[str, int] = {}


def read_baselines(file: Path) -> Baselines:
    """Read a file of published scores. Raises UserError if it cannot be read."""
    try:
        return Baselines.model_validate(parse(file.read_text(encoding="utf-8"), str(file)).value)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("cannot be read", where=str(file), fix="Name a YAML file of published scores.") from error
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        what = f"`{'.'.join(map(str, found['loc']))}`: {found['msg'].lower()}"
        raise UserError(what, where=str(file), fix="examples/baselines.yaml shows the form.") from error


def baseline_figures(facts: Facts, baselines: Baselines, t: Language) -> list[Figure]:
    """For each benchmark that both have, bars of all models."""
    own = [(one, score) for one in _evaluated(facts) for score in one.scores]
    keys = (Key(t("this run"), 0, "points"), Key(t("published"), 1, "points"))
    figures = []
    for task in dict.fromkeys(task for model in baselines.models for task in model.scores):
        metric, items = baselines.metrics.get(task, HEADLINES.get(task, "acc")), baselines.items.get(task)
        mine = [(one, score) for one, score in own if (score.task, score.metric) == (task, metric)]
        if not mine:
            continue
        rows = []
        for one, score in mine:
            interval = Interval(score.value, score.stderr or 0.0, 0, t.score(score.value, score.stderr))
            rows.append(Row(marked(model_name(one, t), score.chat_template), [interval]))
        for model in baselines.models:
            if task in model.scores:
                tokens = [t("{count} tokens", count=t.short(model.tokens))] if model.tokens else []
                share = model.scores[task] / 100
                rows.append(Row(", ".join([model.name, *tokens]), [Interval(share, 0.0, 1, t.percent(share))]))
        notes = [in_chat_note(t)] if any(score.chat_template for _, score in mine) else []
        others = [score.items for _, score in mine if items and score.items and score.items != items]
        if others:
            note = t("The published scores are of {count} items, those of this run of {others}.")
            notes.append(note.format(count=t.count(items), others=t.listed(list(dict.fromkeys(others)))))
        title = f"{task} {metric}"
        figures.append(Figure(title, row_chart(rows, Axis(""), title, t.code), keys, " ".join(notes)))
    return figures


def _evaluated(facts: Facts) -> list[Evaluation]:
    """Each model once, in the order of training; scores by hand complete those of the recipe."""
    found = {(one.model, one.step): one for one in facts.by_hand}
    for one in facts.evaluations:
        other = found.get((one.model, None))
        found[one.model, None] = one if other is None else one.completed(other)
    order = list(TRAININGS.values())
    return sorted(found.values(), key=lambda one: (order.index(one.model), one.step is None, one.step or 0))

"""Scores of other models, from a file of the user's, beside those of a run. None of them is measured here."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from affinage.config.yaml import parse
from affinage.errors import UserError
from affinage.report.charts import Axis, Figure, Interval, Key, Row, row_chart
from affinage.report.evaluations import marked
from affinage.report.facts import Facts
from affinage.report.figures import in_chat_note, model_name
from affinage.report.language import Language


class Baseline(BaseModel):
    """A model: the tokens that it was trained on, its headline scores by task in percent, and who published them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    tokens: float | None = None
    source: str = ""
    scores: dict[str, float]


Baselines = dict[str, Baseline]  # by name


def read_baselines(file: Path) -> Baselines:
    """Read a file of published scores. Raises UserError if it cannot be read."""
    try:
        return TypeAdapter(Baselines).validate_python(parse(file.read_text(encoding="utf-8"), str(file)).value)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("cannot be read", where=str(file), fix="Name a YAML file of published scores.") from error
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        what = f"`{'.'.join(map(str, found['loc']))}`: {found['msg'].lower()}"
        raise UserError(what, where=str(file), fix="examples/baselines.yaml shows the form.") from error


def baseline_figures(facts: Facts, baselines: Baselines, t: Language) -> list[Figure]:
    """For each benchmark that both have, the headline scores of all models; scores by hand complete the recipe's."""
    own = [(model_name(one, t), score) for one in (*facts.by_hand, *facts.evaluations) for score in one.headlines]
    keys = (Key(t("this run"), 0, "points"), Key(t("published"), 1, "points"))
    figures = []
    for task in dict.fromkeys(task for model in baselines.values() for task in model.scores):
        mine = {name: score for name, score in own if score.task == task}
        rows = []
        for name, score in mine.items():
            interval = Interval(score.value, score.stderr or 0.0, 0, t.score(score.value, score.stderr))
            rows.append(Row(marked(name, score.chat_template), [interval]))
        for name, model in baselines.items():
            if task in model.scores:
                tokens = [t("{count} tokens", count=t.short(model.tokens))] if model.tokens else []
                share = model.scores[task] / 100
                rows.append(Row(", ".join([name, *tokens]), [Interval(share, 0.0, 1, t.percent(share))]))
        if mine:
            metrics = ", ".join(dict.fromkeys(score.metric for score in mine.values()))
            note = in_chat_note(t) if any(score.chat_template for score in mine.values()) else ""
            drawing = row_chart(rows, Axis("", ".0%"), task, t)
            figures.append(Figure(f"{task} {metrics}", drawing, keys, note))
    return figures

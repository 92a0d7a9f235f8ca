"""The charts of a report: which facts go into which picture, with which words."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from affinage.report.charts import (
    HALF,
    WIDE,
    Axis,
    Interval,
    Row,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    responsive,
)
from affinage.report.curves import smoothed, thinned
from affinage.report.evaluations import Evaluation, Score
from affinage.report.quantities import Quantities
from affinage.report.trainings import Training


class Key(NamedTuple):
    """One entry of a legend."""

    label: str
    colour: int
    style: str  # faint, line, points, hollow, bar or chance


@dataclass(frozen=True)
class Figure:
    """A picture with its title, its legend, and the values a reader can point at (JSON, "" for none)."""

    title: str
    note: str
    drawing: Markup
    legend: tuple[Key, ...] = ()
    values: str = ""


@dataclass(frozen=True)
class Artist:
    """Draws figures in the words and numbers of one language."""

    words: dict[str, str]
    quantities: Quantities

    def loss(self, training: Training) -> Figure | None:
        """Training loss, raw and smoothed, with the loss on each validation set."""
        raw = training.curves.get("loss", [])
        series = [
            Series(self.words["training_raw"], thinned(raw), 0, "faint"),
            Series(self.words["training_loss"], thinned(smoothed(raw)), 0, "line"),
        ]
        for i, (name, points) in enumerate(training.validation.items()):
            label = self.words["validation_of"].format(name=name)
            series.append(Series(label, thinned(points, 60), 1 + i, "points"))
        if not raw and not training.validation:
            return None
        axis = Axis(self.words["loss_axis"], self.quantities.number)
        label = self.words["loss_label"]
        return self._curves(self.words["loss"], series, axis, label, WIDE, 340.0, training.resumed_at)

    def small(self, training: Training) -> list[Figure]:
        """Learning rate, throughput, gradient norm and MFU, where they were logged."""
        ticks: dict[str, Callable[[float], str]] = {
            "learning_rate": lambda v: self.quantities.number(v, 2),
            "tokens_per_second": self.quantities.short,
            "grad_norm": self.quantities.number,
            "mfu": lambda v: self.quantities.percent(v, 0),
        }
        figures = []
        for metric, tick in ticks.items():
            points = training.curves.get(metric, [])
            if not points:
                continue
            if metric == "learning_rate":
                series = [Series(self.words[metric], thinned(points), 0, "line")]
            else:
                series = [
                    Series(self.words["raw"], thinned(points), 0, "faint"),
                    Series(self.words["smoothed"], thinned(smoothed(points)), 0, "line"),
                ]
            title, axis = self.words[metric], Axis(self.words[f"{metric}_axis"], tick)
            figures.append(self._curves(title, series, axis, title, HALF, 210.0, training.resumed_at))
        return figures

    def _curves(
        self,
        title: str,
        series: Sequence[Series],
        y: Axis,
        label: str,
        wide: float,
        height: float,
        marks: Sequence[int],
    ) -> Figure:
        x = Axis(self.words["step"], self.quantities.short)

        def draw(width: float) -> Markup:
            return line_chart(series, x, y, label, width, min(height, 260.0) if width < wide else height, marks)

        legend = tuple(Key(one.label, one.colour, one.style) for one in series) if len(series) > 1 else ()
        return Figure(title, "", responsive(draw, wide), legend, _values(x.label, series))

    def scores(self, evaluations: Sequence[Evaluation]) -> Figure | None:
        """The headline metric of every task, base and fine-tuned model side by side."""
        rows = []
        for task in dict.fromkeys(s.task for e in evaluations for s in e.scores if s.headline and s.is_share):
            found = [(i, e, s) for i, e in enumerate(evaluations) for s in e.scores if s.task == task and s.headline]
            intervals = [Interval(s.value, s.stderr or 0.0, i, self._score_title(e, s)) for i, e, s in found]
            chance = next((s.chance for _, _, s in found if s.chance is not None), None)
            rows.append(Row(task, intervals, chance, f"{self.words['chance']} {self.quantities.percent(chance, 0)}"))
        if not rows:
            return None
        axis = Axis(self.words["scores_axis"], lambda v: self.quantities.percent(v, 0))
        several = len(evaluations) > 1
        legend = [
            Key(self.model_name(e.model), i, "hollow" if several and i == 0 else "points")
            for i, e in enumerate(evaluations)
        ]
        if any(row.chance is not None for row in rows):
            legend.append(Key(self.words["chance"], 0, "chance"))
        picture = responsive(lambda width: interval_chart(rows, axis, self.words["scores_label"], width))
        return Figure(self.words["scores"], "", picture, tuple(legend))

    def _score_title(self, evaluation: Evaluation, score: Score) -> str:
        value = self.quantities.with_error(score.value, score.stderr, as_percent=True)
        return f"{self.model_name(evaluation.model)} {score.metric} {value}"

    def model_name(self, model: str) -> str:
        """What the page calls the base and the fine-tuned model."""
        return {"base": self.words["base"], "sft": self.words["sft_model"]}.get(model, model)

    def compression(self, evaluation: Evaluation) -> Figure | None:
        """Bits per byte of the model beside general compressors, per validation set."""
        if not evaluation.compression:
            return None
        names = list(dict.fromkeys(name for one in evaluation.compression for name in one.others))
        rows = []
        for one in evaluation.compression:
            values = [(self.words["model"], 0, one.model)]
            values += [(name, 1 + names.index(name), value) for name, value in one.others.items()]
            intervals = [Interval(v, 0.0, i, f"{self.quantities.decimal(v)}  {name}") for name, i, v in values]
            rows.append(Row(one.name, intervals))
        axis = Axis(self.words["compression_axis"], self.quantities.number)
        legend = (Key(self.words["model"], 0, "bar"), *(Key(name, 1 + i, "bar") for i, name in enumerate(names)))
        label = self.words["compression_label"]
        return Figure(label, "", responsive(lambda width: bar_chart(rows, axis, label, width)), legend)


def _values(x_label: str, series: Sequence[Series]) -> str:
    listed = [
        {"label": one.label, "colour": one.colour, "points": [[x, float(f"{y:.5g}")] for x, y in one.points]}
        for one in series
        if one.style != "faint"
    ]
    return json.dumps({"x": x_label, "series": listed}, separators=(",", ":"), ensure_ascii=False)

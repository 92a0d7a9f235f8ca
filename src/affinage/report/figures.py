"""The charts of a report: which facts go into which picture, with which words."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup

from affinage.report.charts import (
    COLORS,
    HALF,
    LOG_RANGE,
    THIRD,
    WIDE,
    Axis,
    Interval,
    Point,
    Row,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    responsive,
    smoothed,
    thinned,
)
from affinage.report.evaluations import IN_CHAT, Evaluation, marked_of
from affinage.report.quantities import Quantities
from affinage.report.trainings import Training

SMALL = (  # the small charts beside the loss
    *("learning_rate", "tokens_per_second", "grad_norm", "mfu"),
    *("expert_load_max", "dropped_share"),
)
SHARES = ("mfu", "dropped_share")  # of them, those in percent


class Key(NamedTuple):
    """One entry of a legend."""

    label: str
    color: int
    style: str  # faint, line, points, dots, hollow, bar or chance


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

    @property
    def language(self) -> str:
        """The language of the numbers, "en" or "fr"."""
        return self.quantities.language

    def loss(self, training: Training) -> Figure | None:
        """Training loss, raw and smoothed, with the loss on each validation set."""
        raw = training.curves.get("loss", [])
        series = self._smoothed(raw, "training_raw", "training_loss")
        for i, (name, points) in enumerate(training.validation_curves.items()):
            label = self.words["validation_of"].format(name=name)
            series.append(Series(label, thinned(points, 60), 1 + i, "points"))
        if not raw and not training.validation_curves:
            return None
        values = [y for one in series for _, y in one.points if y > 0]
        log = max(values, default=1.0) > LOG_RANGE * min(values, default=1.0)
        kind = training.loss_kind
        axis = Axis(self.words[f"{kind}_log_axis" if log else f"{kind}_axis"], "~g", log)
        label = self.words["loss_label"]
        return self._curves(self.words["loss"], series, axis, label, WIDE, 340.0, training.resumed_at)

    def benchmarks(self, training: Training) -> list[Figure]:
        """Benchmarks while it was trained, and bits per byte of each language, where there are at least two points."""
        tasks = list(dict.fromkeys(task for point in training.eval_points for task in point.scores))
        scored = []
        for i, task in enumerate(tasks):
            found = [(point.step, point.scores[task]) for point in training.eval_points if task in point.scores]
            known = [(float(step), value, error or 0.0) for step, (value, error, _) in found if value is not None]
            points, errors = [(x, y) for x, y, _ in known], [error for _, _, error in known]
            ringed = [worse for _, (value, _, worse) in found if value is not None]
            scored.append(Series(task, points, i % COLORS, "points", errors, ringed))
        bits = [Series(name, points, i, "points") for i, (name, points) in enumerate(training.bits_per_byte.items())]
        axis = Axis(self.words["looks_axis"], ".0%")
        groups = [scored[first : first + COLORS] for first in range(0, len(scored), COLORS)]
        of_several = [f" ({number})" for number in range(1, len(groups) + 1)] if len(groups) > 1 else [""]
        drawn = [(self.words["looks"] + which, group, axis) for which, group in zip(of_several, groups)]
        drawn.append((self.words["bits_per_byte"], bits, Axis(self.words["bits_per_byte_axis"], "~g")))
        drawn = [each for each in drawn if any(len(one.points) > 1 for one in each[1])]
        wide = WIDE if len(drawn) == 1 else HALF  # one alone stands under the loss step by step
        pictures = [
            self._curves(title, series, axis, title, wide, 240.0, training.resumed_at) for title, series, axis in drawn
        ]
        note = self.words["looks_worse"] if training.worse else ""
        notes = ("" if series is bits else note for _, series, _ in drawn)
        return [replace(picture, note=told) for picture, told in zip(pictures, notes)]

    def worse(self, training: Training) -> str:
        """A sentence on the benchmarks that a training has made worse; "" if it has made none."""
        q = self.quantities
        tasks = (
            self.words["worse_one"].format(
                task=one.task,
                before=q.percent(one.before, 1),
                than=q.count(one.than),
                now=q.percent(one.now, 1),
                step=q.count(one.step),
                p=q.number(one.p),
            )
            for one in training.worse
        )
        listed, first, last = " · ".join(tasks), training.first_loss, training.final_loss
        if not listed:
            return ""
        fell = first is not None and last is not None and last < first
        lead = self.words["worse_lead_loss" if fell else "worse_lead"]
        return lead.format(tasks=listed, first=q.number(first), last=q.number(last))

    def small(self, training: Training) -> list[Figure]:
        """Learning rate, throughput, gradient norm and MFU, where they were logged."""
        shown = [metric for metric in SMALL if training.curves.get(metric)]
        if not any(share for _, share in training.curves.get("dropped_share", ())):
            shown = [metric for metric in shown if metric != "dropped_share"]
        wide = THIRD if len(shown) == 3 else HALF
        return [self._small(training, metric, wide) for metric in shown]

    def _smoothed(self, raw: Sequence[Point], faint: str, line: str) -> list[Series]:
        """A curve smoothed, and as it was logged behind it; of one too short to be smoothed only that."""
        mean = smoothed(raw)
        if mean == list(raw):
            return [Series(self.words[faint], thinned(raw), 0, "line")]
        behind = Series(self.words[faint], thinned(raw), 0, "faint")
        return [behind, Series(self.words[line], thinned(mean), 0, "line")]

    def _small(self, training: Training, metric: str, wide: float) -> Figure:
        points = training.curves[metric]
        title = self.words[metric]
        if metric == "learning_rate":
            series = [Series(title, thinned(points), 0, "line")]
        else:
            series = self._smoothed(points, "raw", "smoothed")
        form = "~%" if metric in SHARES else "~e" if metric == "learning_rate" else "~s"
        axis = Axis(self.words[f"{metric}_axis"], form)
        return self._curves(title, series, axis, title, wide, 200.0, training.resumed_at)

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
        x = Axis(self.words["step"])

        def draw(width: float) -> Markup:
            tall = min(height, 260.0) if width < wide else height
            return line_chart(series, x, y, label, width, tall, self.language, marks)

        told = len(series) > 1 or series[0].label != title
        legend = tuple(Key(one.label, one.color, one.style) for one in series) if told else ()
        note = self.words["resumed"].format(steps=self.quantities.listed(marks)) if marks and wide == WIDE else ""
        return Figure(title, note, responsive(draw, wide), legend, values_of(x.label, series))

    def scores(self, evaluations: Sequence[Evaluation]) -> Figure | None:
        """The headline metric of every task, base and fine-tuned model side by side."""
        rows = []
        for task in dict.fromkeys(s.task for e in evaluations for s in e.scores if s.headline and s.is_share):
            found = [(i, e, s) for i, e in enumerate(evaluations) for s in e.scores if s.task == task and s.headline]
            intervals = [Interval(s.value, s.stderr or 0.0, i) for i, _, s in found]
            chance = next((s.chance for _, _, s in found if s.chance is not None), None)
            label = marked_of(task, [(self.model_name(e.model), s.chat_template) for _, e, s in found])
            rows.append(Row(label, intervals, chance))
        if not rows:
            return None
        axis = Axis(self.words["scores_axis"], ".0%")
        several = len(evaluations) > 1
        legend = [
            Key(self.model_name(e.model), i, "hollow" if several and i == 0 else "points")
            for i, e in enumerate(evaluations)
        ]
        if any(row.chance is not None for row in rows):
            legend.append(Key(self.words["chance"], 0, "chance"))
        picture = responsive(
            lambda width: interval_chart(rows, axis, self.words["scores_label"], width, self.language, hollow=several)
        )
        in_chat = any(IN_CHAT in row.label for row in rows)
        return Figure(self.words["scores"], self.words["in_chat_note"] if in_chat else "", picture, tuple(legend))

    def model_name(self, model: str) -> str:
        """What the page calls the base model and those made of it."""
        names = {"base": "base", "sft": "sft_model", "dpo": "dpo_model"}
        return self.words[names[model]] if model in names else model

    def judged_name(self, evaluation: Evaluation) -> str:
        """What the page calls a model as it was judged."""
        name = self.model_name(evaluation.model)
        step = f"{self.words['step']} {self.quantities.count(evaluation.step)}"
        return name if evaluation.step is None else f"{name}, {step}"

    def compression(self, evaluations: Sequence[Evaluation]) -> Figure:
        """Bits per byte of every model beside general compressors, per validation set."""
        bits: dict[str, dict[str, float]] = {}  # validation set -> who -> bits per byte
        several = len([evaluation for evaluation in evaluations if evaluation.compression]) > 1
        for evaluation in evaluations:
            name = self.model_name(evaluation.model) if several else self.words["this_model"]
            for text, by in evaluation.compression.items():
                bits.setdefault(text, {})[name] = by["model"]
        for evaluation in evaluations:
            for text, by in evaluation.compression.items():
                bits[text].update({who: value for who, value in by.items() if who != "model"})
        names = list(dict.fromkeys(name for values in bits.values() for name in values))
        rows = [
            Row(
                text,
                [Interval(v, 0.0, names.index(n), f"{self.quantities.decimal(v)}  {n}") for n, v in values.items()],
            )
            for text, values in bits.items()
        ]
        label = self.words["compression_label"]
        picture = responsive(lambda width: bar_chart(rows, label, self.words["compression_axis"], width, self.language))
        return Figure(label, "", picture, tuple(Key(name, i, "bar") for i, name in enumerate(names)))


def values_of(x_label: str, series: Sequence[Series]) -> str:
    """What a reader can point at, as JSON."""
    listed = [
        {"label": one.label, "color": one.color, "points": [[x, float(f"{y:.5g}")] for x, y in one.points]}
        for one in series
        if one.style != "faint"
    ]
    return json.dumps({"x": x_label, "series": listed}, separators=(",", ":"), ensure_ascii=False)

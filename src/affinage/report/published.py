"""Our scores among those that others have published: bars per benchmark, and score against training tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from affinage.evaluation.published import PublishedModel, headline_metrics, published, tuned
from affinage.report.charts import HALF, Axis, Interval, Row, Series, bar_chart, line_chart, responsive
from affinage.report.facts import Facts
from affinage.report.figures import Artist, Figure, Key

_TRAINED_BY = {"base": ("pretrain",), "sft": ("pretrain", "sft"), "dpo": ("pretrain", "sft", "dpo")}


_Made = tuple[str, Mapping[str, float], Mapping[str, float]]  # a model's name, its scores, their standard errors


@dataclass(frozen=True)
class _Ours:
    name: str
    tokens: int
    scores: dict[str, float]
    errors: dict[str, float]


@dataclass(frozen=True)
class Beside:
    """What the page shows: figures, and who published what, from where."""

    bars: tuple[Figure, ...]
    curves: tuple[Figure, ...]
    tuned: tuple[Figure, ...]
    sources: tuple[str, ...]


def beside_published(facts: Facts, artist: Artist) -> Beside | None:
    """The figures; None for a run that was judged on no benchmark with published scores."""
    tokens = {training.name: training.tokens or 0 for training in facts.trainings}
    ours = []
    for evaluation in facts.evaluations:
        found = {task: evaluation.score(task, metric) for task, metric in headline_metrics().items()}
        scores = {task: score for task, score in found.items() if score is not None}
        ours.append(
            _Ours(
                artist.model_name(evaluation.model),
                sum(tokens.get(name, 0) for name in _TRAINED_BY.get(evaluation.model, ())),
                {task: score.value for task, score in scores.items()},
                {task: score.stderr or 0.0 for task, score in scores.items()},
            )
        )
    tasks = [task for task in headline_metrics() if any(task in one.scores for one in ours)]
    if not tasks:
        return None
    others = published()
    return Beside(
        bars=tuple(_bars(task, ours, others, artist) for task in tasks),
        curves=tuple(_curve(task, ours, others, artist) for task in tasks),
        tuned=tuple(_tuned_figures(tasks, ours, artist)),
        sources=tuple(dict.fromkeys(model.source for model in others)),
    )


def _bars(task: str, ours: Sequence[_Ours], others: Sequence[PublishedModel], artist: Artist) -> Figure:
    words, write = artist.words, artist.quantities.percent
    rows = []
    for one in ours:
        if task in one.scores:
            score, error = one.scores[task], one.errors[task]
            written = artist.quantities.with_error(score, error, as_percent=True)
            rows.append(Row(one.name, [Interval(score, error, 0, written)]))
    for model in others:
        if task in model.scores:
            rows.append(Row(model.name, [Interval(model.scores[task], 0.0, 1, write(model.scores[task]))]))
    title = f"{task} {headline_metrics()[task]}"
    picture = responsive(lambda width: bar_chart(rows, Axis("", artist.quantities.percent_ticks), title, width))
    return Figure(title, "", picture, (Key(words["this_model"], 0, "bar"), Key(words["published_mark"], 1, "bar")))


def _curve(task: str, ours: Sequence[_Ours], others: Sequence[PublishedModel], artist: Artist) -> Figure:
    words = artist.words
    judged = [one for one in ours if task in one.scores and one.tokens]
    mine = [(float(one.tokens), one.scores[task]) for one in judged]
    series = [Series(words["this_model"], mine, 0, "dots", [one.errors[task] for one in judged])] if mine else []
    for number, family in enumerate(dict.fromkeys(model.family for model in others), 1):
        points = sorted((float(m.tokens), m.scores[task]) for m in others if m.family == family and task in m.scores)
        if points:
            series.append(Series(f"{family} ({words['published_mark']})", points, number, "dots"))
    x = Axis(words["training_tokens"], artist.quantities.decades, log=True)
    y = Axis(words["scores_axis"], artist.quantities.percent_ticks)
    title = f"{task} {headline_metrics()[task]}"
    picture = responsive(lambda width: line_chart(series, x, y, title, width, 260.0))
    return Figure(title, "", picture, tuple(Key(one.label, one.colour, one.style) for one in series))


def _tuned_figures(tasks: Sequence[str], ours: Sequence[_Ours], artist: Artist) -> Iterator[Figure]:
    """What fine-tuning, and more of it, did to the scores: of this run, and as published."""
    if len(ours) < 2:
        return
    yield _steps(artist.words["this_model"], [(one.name, one.scores, one.errors) for one in ours], tasks, artist)
    for family, models in tuned().items():
        stated: list[_Made] = [(model.name.removeprefix(family).strip(), model.scores, {}) for model in models]
        yield _steps(f"{family} ({artist.words['published_mark']})", stated, tasks, artist)


def _steps(title: str, models: Sequence[_Made], tasks: Sequence[str], artist: Artist) -> Figure:
    """A line for each benchmark, over models in the order in which they were made."""
    series = []
    for number, task in enumerate(tasks):
        known = [(float(at), scores[task]) for at, (_, scores, _) in enumerate(models) if task in scores]
        errors = [found[task] for _, scores, found in models if task in scores and task in found]
        if known:
            series.append(Series(task, known, number, "points", errors))

    def names(values: Sequence[float]) -> list[str]:
        return [models[int(value)][0] if value in range(len(models)) else "" for value in values]

    x, y = Axis("", names), Axis(artist.words["scores_axis"], artist.quantities.percent_ticks)
    picture = responsive(lambda width: line_chart(series, x, y, title, width, 300.0), HALF)
    return Figure(title, "", picture, tuple(Key(one.label, one.colour, one.style) for one in series))

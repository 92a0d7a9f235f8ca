"""Our scores among those that others have published: bars per benchmark, and score against training tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from affinage.evaluation.published import PublishedModel, headline_metrics, of_other_items, published, tuned
from affinage.report.charts import HALF, Axis, Interval, Row, Series, bar_chart, line_chart, responsive
from affinage.report.evaluations import Evaluation, marked, marked_of
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
    items: dict[str, int | None]  # of how many each is
    in_chat: frozenset[str]  # tasks that were asked in the chat template
    ended: bool  # it is what a training has made, not one of its checkpoints


@dataclass(frozen=True)
class Beside:
    """What the page shows: figures, and who published what, from where."""

    bars: tuple[Figure, ...]
    curves: tuple[Figure, ...]
    tuned: tuple[Figure, ...]
    sources: tuple[str, ...]


def beside_published(facts: Facts, artist: Artist) -> Beside | None:
    """The figures; None for a run that was judged on no benchmark with published scores."""
    ours = []
    for evaluation in _judged(facts):
        found = {task: evaluation.score(task, metric) for task, metric in headline_metrics().items()}
        scores = {task: score for task, score in found.items() if score is not None}
        ours.append(
            _Ours(
                artist.judged_name(evaluation),
                _tokens(evaluation, facts),
                {task: score.value for task, score in scores.items()},
                {task: score.stderr or 0.0 for task, score in scores.items()},
                {task: score.items for task, score in scores.items()},
                frozenset(task for task, score in scores.items() if score.chat_template),
                ended=evaluation.step is None,
            )
        )
    tasks = [task for task in headline_metrics() if any(task in one.scores for one in ours)]
    if not tasks:
        return None
    others = published()
    return Beside(
        bars=tuple(_bars(task, ours, others, artist) for task in tasks),
        curves=tuple(_curve(task, ours, others, artist) for task in tasks),
        tuned=tuple(_tuned_figures(tasks, [one for one in ours if one.ended], artist)),
        sources=tuple(dict.fromkeys(model.source for model in others)),
    )


def _judged(facts: Facts) -> list[Evaluation]:
    """Each model once, in the order in which they were made: what its recipe has not asked may have been by hand."""
    found = {(one.model, one.step): one for one in facts.by_hand}
    for one in facts.evaluations:
        other = found.get((one.model, None))
        found[one.model, None] = one if other is None else one.filled_up(other)
    order = list(_TRAINED_BY)
    return sorted(found.values(), key=lambda one: (order.index(one.model), one.step is None, one.step))


def _tokens(evaluation: Evaluation, facts: Facts) -> int:
    """That a model was trained on, up to its step."""
    trainings = [facts.training(name) for name in _TRAINED_BY[evaluation.model]]
    tokens = [training.tokens or 0 for training in trainings if training is not None]
    last = trainings[-1]
    if evaluation.step is not None and last is not None and last.steps:
        tokens[-1] = round(tokens[-1] * evaluation.step / last.steps)
    return sum(tokens)


def _bars(task: str, ours: Sequence[_Ours], others: Sequence[PublishedModel], artist: Artist) -> Figure:
    words, write = artist.words, artist.quantities.percent
    rows = []
    for one in ours:
        if task in one.scores:
            score, error = one.scores[task], one.errors[task]
            written = artist.quantities.with_error(score, error, as_percent=True)
            rows.append(Row(marked(one.name, task in one.in_chat), [Interval(score, error, 0, written)]))
    for model in others:
        if task in model.scores:
            name = f"{model.name} ({words['published_mark']})"
            rows.append(Row(name, [Interval(model.scores[task], 0.0, 1, write(model.scores[task]))]))
    title = f"{task} {headline_metrics()[task]}"
    picture = responsive(lambda width: bar_chart(rows, title, "", width, artist.language))
    keys = (Key(words["this_model"], 0, "bar"), Key(words["published_mark"], 1, "bar"))
    return Figure(title, _note(ours, [task], artist), picture, keys)


def _curve(task: str, ours: Sequence[_Ours], others: Sequence[PublishedModel], artist: Artist) -> Figure:
    words = artist.words
    series = []
    for in_chat in (False, True):
        judged = [one for one in ours if task in one.scores and one.tokens and (task in one.in_chat) == in_chat]
        mine = [(float(one.tokens), one.scores[task]) for one in judged]
        if mine:
            name = marked(words["this_model"], in_chat)
            series.append(Series(name, mine, 0, "dots", [one.errors[task] for one in judged]))
    for number, family in enumerate(dict.fromkeys(model.family for model in others), 1):
        points = sorted((float(m.tokens), m.scores[task]) for m in others if m.family == family and task in m.scores)
        if points:
            series.append(Series(f"{family} ({words['published_mark']})", points, number, "dots"))
    x = Axis(words["training_tokens"], log=True)
    y = Axis(words["scores_axis"], ".0%")
    title = f"{task} {headline_metrics()[task]}"
    picture = responsive(lambda width: line_chart(series, x, y, title, width, 260.0, artist.language))
    return Figure(
        title, _note(ours, [task], artist), picture, tuple(Key(one.label, one.color, one.style) for one in series)
    )


def _tuned_figures(tasks: Sequence[str], ours: Sequence[_Ours], artist: Artist) -> Iterator[Figure]:
    """What fine-tuning, and more of it, did to the scores: of this run, and as published."""
    if len(ours) < 2:
        return
    asked = {task: [(one.name, task in one.in_chat) for one in ours if task in one.scores] for task in tasks}
    names = {task: marked_of(task, of_task) for task, of_task in asked.items()}
    mine: list[_Made] = [(one.name, one.scores, one.errors) for one in ours]
    yield _steps(artist.words["this_model"], mine, names, artist, _note(ours, tasks, artist))
    for family, models in tuned().items():
        stated: list[_Made] = [(model.name.removeprefix(family).strip(), model.scores, {}) for model in models]
        yield _steps(f"{family} ({artist.words['published_mark']})", stated, {task: task for task in tasks}, artist)


def _note(ours: Sequence[_Ours], tasks: Sequence[str], artist: Artist) -> str:
    words, count = artist.words, artist.quantities.count
    notes = [words["in_chat_note"]] if any(one.in_chat & set(tasks) for one in ours) else []
    judged = (of_other_items({task: one.items.get(task) for task in tasks}) for one in ours)
    others = dict.fromkeys((task, *counts) for one in judged for task, counts in one.items())
    if others:
        told = (f"{task} {count(items)} ({words['published_mark']} {count(whole)})" for task, items, whole in others)
        notes.append(words["other_items_note"].format(tasks=", ".join(told)))
    return " ".join(notes)


def _steps(title: str, models: Sequence[_Made], names_of: Mapping[str, str], artist: Artist, note: str = "") -> Figure:
    """A line for each benchmark, over models in the order in which they were made."""
    series = []
    for number, (task, called) in enumerate(names_of.items()):
        known = [(float(at), scores[task]) for at, (_, scores, _) in enumerate(models) if task in scores]
        errors = [found[task] for _, scores, found in models if task in scores and task in found]
        if known:
            series.append(Series(called, known, number, "points", errors))

    x, y = Axis("", names=[name for name, _, _ in models]), Axis(artist.words["scores_axis"], ".0%")
    picture = responsive(lambda width: line_chart(series, x, y, title, width, 300.0, artist.language), HALF)
    return Figure(title, note, picture, tuple(Key(one.label, one.color, one.style) for one in series))

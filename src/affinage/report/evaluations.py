"""What an evaluation stage left behind: scores with standard errors, bits per byte, samples."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from affinage.evaluation.published import headline_metrics
from affinage.report.reading import json_file, listing, mapping, mappings, number, string, whole

# What guessing gets, where the number of choices is the same for every item (arc has a few items with 3 or 5).
CHANCE = {"hellaswag": 0.25, "piqa": 0.5, "arc_easy": 0.25, "arc_challenge": 0.25, "winogrande": 0.5, "boolq": 0.5}
SHARES = ("acc", "acc_norm", "acc_bytes", "exact_match", "f1")  # metrics between 0 and 1, higher is better


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 with 1 the best; it may name a filter of answers ("exact_match,strict")."""
    return metric.partition(",")[0] in SHARES


@dataclass(frozen=True)
class Score:
    """One metric of one task, with its standard error. `headline`: the one metric a chart shows for the task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    items: int | None
    shots: int | None
    chat_template: bool
    chance: float | None
    headline: bool

    @property
    def is_share(self) -> bool:
        """Whether the value lies between 0 and 1 with 1 the best."""
        return is_share(self.metric)


@dataclass(frozen=True)
class Compression:
    """Bits per byte of one validation text, by the model and by compressors (`others`: name to bits per byte)."""

    name: str
    model: float
    others: Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """What was asked of a model and what it wrote."""

    prompt: str
    text: str
    chat: bool


@dataclass(frozen=True)
class Item:
    """One question of a benchmark. `right` and `chosen` are places in `choices`; generated answers have `answer`."""

    task: str
    prompt: str
    choices: tuple[str, ...]
    right: int | None
    chosen: int | None
    target: str
    answer: str


@dataclass(frozen=True)
class Contaminated:
    """A task of whose items some stand in the training text, with its headline score with and without them."""

    task: str
    metric: str
    items: int
    found: tuple[int, ...]  # by their place in the task
    common: tuple[int, ...]  # those that only runs in many texts tell of
    value: float | None
    without: float | None
    stderr: float | None  # of the score without them

    @property
    def count(self) -> int:
        """How many of its items stand in the training text."""
        return len(self.found) + len(self.common)


@dataclass(frozen=True)
class Evaluation:
    """One model judged: `model` is base, sft or dpo, as it was after `step`, or in the end."""

    model: str
    scores: tuple[Score, ...]
    compression: tuple[Compression, ...]
    samples: tuple[Sample, ...]
    items: tuple[Item, ...]
    generated: int | None
    stopped: float | None  # share of generated texts that ended by a control token
    seconds: float | None
    items_per_second: float | None
    looked_through: int | None  # texts that were looked through for the items
    boilerplate: int | None  # what is in more texts than this is `common`
    ngram: int | None  # words in a row that they were looked for by
    contaminated: tuple[Contaminated, ...]
    step: int | None = None

    def score(self, task: str, metric: str) -> Score | None:
        """The score of that task and metric, if it was computed."""
        return next((s for s in self.scores if (s.task, s.metric) == (task, metric)), None)

    def filled_up(self, other: "Evaluation") -> "Evaluation":
        """With another's scores of the same model, where this one has none of a task and metric."""
        scores = {(score.task, score.metric): score for score in (*other.scores, *self.scores)}
        return replace(self, scores=tuple(scores.values()))


IN_CHAT = "†"  # marks what was asked in the chat template


def marked(name: str, in_chat: bool) -> str:
    """A name in a chart; with a mark if its score was asked in the chat template."""
    return f"{name} {IN_CHAT}" if in_chat else name


def marked_of(task: str, asked: Sequence[tuple[str, bool]]) -> str:
    """A task's name in a chart of several models, with which of them were asked in the chat template."""
    in_chat = [name for name, templated in asked if templated]
    if not in_chat or len(in_chat) == len(asked):
        return marked(task, bool(in_chat))
    return f"{task} ({IN_CHAT} {', '.join(in_chat)})"


def read_evaluation(model: str, folder: Path, stage_summary: Mapping[str, Any]) -> Evaluation:
    """Reads results.json of an evaluation stage; the stage's own summary fills what is missing."""
    results = {**stage_summary, **json_file(folder / "results.json")}
    tasks, samples = mapping(results.get("tasks")), mapping(results.get("samples"))
    generation = mapping(results.get("generation"))
    return Evaluation(
        model=model,
        scores=tuple(score for task, entry in tasks.items() for score in _scores(task, mapping(entry))),
        compression=tuple(_compression(results.get("bits_per_byte"))),
        samples=(*_samples(samples.get("prompts"), chat=False), *_samples(samples.get("questions"), chat=True)),
        items=tuple(_item(task, entry) for task in tasks for entry in mappings(samples.get(task))),
        generated=whole(generation.get("texts")),
        stopped=number(mapping(generation.get("stopped")).get("value")),
        seconds=number(results.get("seconds")),
        items_per_second=number(results.get("items_per_second")),
        looked_through=whole(mapping(results.get("contamination")).get("texts")),
        boilerplate=whole(mapping(results.get("contamination")).get("boilerplate")),
        ngram=whole(mapping(results.get("contamination")).get("ngram")),
        contaminated=tuple(_contaminated(results)),
    )


def read_by_hand(runs: Path, trainings: Mapping[str, tuple[str, int | None]]) -> list[Evaluation]:
    """What `affinage eval` has found of the models of some trainings, apart from their recipe.

    Args:
        runs: where that keeps its results.
        trainings: by their keys what their models are called, and of how many steps they are.
    """
    found: dict[tuple[str, int | None], Evaluation] = {}
    for file in sorted((runs / "evaluations").glob("*/results.json"), key=lambda file: file.stat().st_mtime):
        of = mapping(json_file(file).get("training"))
        model, steps = trainings.get(string(of.get("key")), ("", None))
        if model:
            step = whole(of.get("step"))
            new = replace(read_evaluation(model, file.parent, {}), step=None if step == steps else step)
            before = found.get((model, new.step))
            found[model, new.step] = new if before is None else new.filled_up(before)
    order = [model for model, _ in trainings.values()]
    return sorted(found.values(), key=lambda one: (order.index(one.model), one.step is None, one.step))


def headline(task: str, metrics: Collection[str]) -> str:
    """The one of the metrics of a task that stands for it; "" if there are none."""
    wanted = (headline_metrics().get(task, "acc"), *SHARES)
    return next((name for name in wanted if name in metrics), next(iter(metrics), ""))


def _scores(task: str, entry: Mapping[str, Any]) -> list[Score]:
    metrics = {name: mapping(value) for name, value in mapping(entry.get("metrics")).items()}
    values = {name: number(value.get("value")) for name, value in metrics.items()}
    known = {name: value for name, value in values.items() if value is not None}
    shown = headline(task, known)
    chance = number(entry.get("chance"))
    return [
        Score(
            task=task,
            metric=name,
            value=value,
            stderr=number(metrics[name].get("stderr")),
            items=whole(entry.get("items")),
            shots=whole(entry.get("shots")),
            chat_template=entry.get("chat_template") is True,
            chance=(CHANCE.get(task) if chance is None else chance) if is_share(name) else None,
            headline=name == shown,
        )
        for name, value in known.items()
    ]


def _contaminated(results: Mapping[str, Any]) -> Iterator[Contaminated]:
    for task, entry in mapping(mapping(results.get("contamination")).get("tasks")).items():
        told = mapping(entry)
        found, common = (
            tuple(place for place in map(whole, listing(told.get(kind))) if place is not None)
            for kind in ("found", "common")
        )
        if found or common:
            scores = mapping(mapping(mapping(results.get("tasks")).get(task)).get("metrics"))
            without = mapping(told.get("without"))
            metric = headline(task, without)
            left = mapping(without.get(metric))
            value = number(mapping(scores.get(metric)).get("value"))
            yield Contaminated(
                task=task,
                metric=metric,
                items=whole(told.get("items")) or 0,
                found=found,
                common=common,
                value=value,
                without=number(left.get("value")),
                stderr=number(left.get("stderr")),
            )


def _compression(value: Any) -> list[Compression]:
    found = []
    for name, entry in mapping(value).items():
        numbers = {k: v for k, v in ((k, number(v)) for k, v in mapping(entry).items()) if v is not None}
        if "model" in numbers:
            found.append(Compression(name, numbers.pop("model"), numbers))
    return found


def _samples(value: Any, *, chat: bool) -> list[Sample]:
    return [
        Sample(string(entry.get("prompt"), entry.get("question")), string(entry.get("text")), chat)
        for entry in mappings(value)
    ]


def _item(task: str, entry: Mapping[str, Any]) -> Item:
    target = entry.get("target")
    return Item(
        task=task,
        prompt=string(entry.get("prompt")),
        choices=tuple(map(str, listing(entry.get("choices")))),
        right=whole(target),
        chosen=whole(entry.get("chosen")),
        target=string(target, entry.get("continuation")),
        answer=string(entry.get("answer")),
    )

"""What an evaluation left behind: scores with standard errors, bits per byte, samples."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from affinage.errors import UserError
from affinage.evaluation.compare import Answers, Difference, compare
from affinage.evaluation.published import headline_metrics
from affinage.results import EvaluationResult, Metric, Sample, TaskContamination, TaskResult, read_json

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
class Contaminated:
    """A task with items in the training text, and its headline score with and without them."""

    task: str
    metric: str
    facts: TaskContamination
    value: float | None
    without: Metric

    @property
    def count(self) -> int:
        """Number of its items that are in the training text."""
        return len(self.facts.found) + len(self.facts.common)


class Evaluation(EvaluationResult):
    """The scores of one model: `model` is base, sft or dpo, as it was after `step`, or at the end of its training."""

    step: int | None
    folder: Path  # of its results

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """All metrics of all tasks."""
        return tuple(score for task, result in self.tasks.items() for score in _scores(task, result))

    @property
    def compression(self) -> dict[str, dict[str, float]]:
        """Bits per byte of validation sets, by the model ("model") and by compressors."""
        return {name: bits for name, bits in self.bits_per_byte.items() if "model" in bits}

    @property
    def prompts(self) -> list[tuple[Sample, bool]]:
        """Prompts and questions with the answers of the model, and whether it was asked in a conversation."""
        return [(one, name == "questions") for name in ("prompts", "questions") for one in self.samples.get(name, ())]

    @property
    def task_items(self) -> dict[str, list[Sample]]:
        """A few items of each task."""
        return {task: self.samples[task] for task in self.tasks if self.samples.get(task)}

    @property
    def contaminated(self) -> list[Contaminated]:
        """The tasks with items in the training text."""
        found = []
        for task, facts in self.contamination.tasks.items():
            if facts.found or facts.common:
                metric = headline(task, facts.without)
                scores = self.tasks[task].metrics if task in self.tasks else {}
                value, without = scores.get(metric, Metric()).value, facts.without.get(metric, Metric())
                found.append(Contaminated(task, metric, facts, value, without))
        return found

    def differences_to(self, other: "Evaluation") -> dict[tuple[str, str], Difference]:
        """The paired differences of `other` from this one by task and metric; none without items in common."""
        try:
            found = compare(Answers(self.folder), Answers(other.folder))
        except UserError:
            return {}
        return {(one.task, one.metric): one for one in found}

    def score(self, task: str, metric: str) -> Score | None:
        """The score of that task and metric, if it was computed."""
        return next((s for s in self.scores if (s.task, s.metric) == (task, metric)), None)

    def filled_up(self, other: "Evaluation") -> "Evaluation":
        """With another's scores of the same model for the metrics that this one does not have."""
        tasks = dict(other.tasks)
        for task, result in self.tasks.items():
            before = other.tasks[task].metrics if task in other.tasks else {}
            tasks[task] = result.model_copy(update={"metrics": {**before, **result.metrics}})
        return self.at(self.step, tasks)

    def at(self, step: int | None, tasks: Mapping[str, TaskResult] | None = None) -> "Evaluation":
        """The same after a step, or with other tasks."""
        fields = {name: getattr(self, name) for name in Evaluation.model_fields}
        return Evaluation.model_construct(**(fields | {"step": step} | ({} if tasks is None else {"tasks": tasks})))


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


def read_evaluation(model: str, folder: Path) -> Evaluation:
    """Reads the results.json of an evaluation, which also `affinage eval` writes."""
    result = EvaluationResult.model_validate(read_json(folder / "results.json"))
    fields = {name: getattr(result, name) for name in EvaluationResult.model_fields}
    return Evaluation.model_construct(**(fields | {"model": model, "step": None, "folder": folder}))


def read_by_hand(runs: Path, trainings: Mapping[str, tuple[str, int | None]]) -> list[Evaluation]:
    """The results of `affinage eval` for the models of some trainings, apart from their recipe.

    Args:
        runs: where these results are.
        trainings: by their keys the names of their models, and their steps.
    """
    found: dict[tuple[str, int | None], Evaluation] = {}
    for file in sorted((runs / "evaluations").glob("*/results.json"), key=lambda file: file.stat().st_mtime):
        new = read_evaluation("", file.parent)
        model, steps = trainings.get(new.training.key, ("", None))
        if model:
            step = None if new.training.step == steps else new.training.step
            new = read_evaluation(model, file.parent).at(step)
            before = found.get((model, step))
            found[model, step] = new if before is None else new.filled_up(before)
    order = [model for model, _ in trainings.values()]
    return sorted(found.values(), key=lambda one: (order.index(one.model), one.step is None, one.step))


def headline(task: str, metrics: Collection[str]) -> str:
    """The one of the metrics of a task that stands for it; "" if there are none."""
    wanted = (headline_metrics().get(task, "acc"), *SHARES)
    return next((name for name in wanted if name in metrics), next(iter(metrics), ""))


def _scores(task: str, result: TaskResult) -> list[Score]:
    known = {name: metric for name, metric in result.metrics.items() if metric.value is not None}
    shown = headline(task, known)
    return [
        Score(
            task=task,
            metric=name,
            value=metric.value,
            stderr=metric.stderr,
            items=result.items,
            shots=result.num_fewshot,
            chat_template=result.chat_template,
            chance=(CHANCE.get(task) if result.chance is None else result.chance) if is_share(name) else None,
            headline=name == shown,
        )
        for name, metric in known.items()
        if metric.value is not None
    ]

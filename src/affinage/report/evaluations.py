"""What an evaluation left behind: scores with standard errors, bits per byte, samples."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.evaluation.results import Difference, compare, read_answers
from affinage.results import EvaluationResult, read_json

# What guessing gets, where the number of choices is the same for every item (arc has a few items with 3 or 5).
CHANCE = {"hellaswag": 0.25, "piqa": 0.5, "arc_easy": 0.25, "arc_challenge": 0.25, "winogrande": 0.5, "boolq": 0.5}
SHARES = ("acc", "acc_norm", "acc_bytes", "exact_match", "f1")  # metrics between 0 and 1, higher is better
HEADLINES = {"hellaswag": "acc_norm", "arc_challenge": "acc_norm"}  # the metrics that papers give, where not acc
IN_CHAT = "†"  # marks scores with the chat template


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 with 1 the best; it may name a filter of answers ("exact_match,strict")."""
    return metric.partition(",")[0] in SHARES


def headline(task: str, metrics: Collection[str]) -> str:
    """The one of the metrics of a task that stands for it; "" if there are none."""
    wanted = (HEADLINES.get(task, "acc"), *SHARES)
    return next((name for name in wanted if name in metrics), next(iter(metrics), ""))


def marked(name: str, in_chat: bool) -> str:
    """A name, with a mark if its score is one with the chat template."""
    return f"{name} {IN_CHAT}" if in_chat else name


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


@dataclass(frozen=True)
class Evaluation:
    """The scores of `model` (base, sft or dpo)."""

    model: str
    result: EvaluationResult
    folder: Path

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """All metrics of all tasks."""
        found = []
        for task, result in self.result.tasks.items():
            known = {name: metric for name, metric in result.metrics.items() if metric.value is not None}
            guessed = CHANCE.get(task) if result.chance is None else result.chance
            for name, one in known.items():
                chance, shown = guessed if is_share(name) else None, name == headline(task, known)
                about = (one.value or 0.0, one.stderr, result.items, result.num_fewshot, result.chat_template)
                found.append(Score(task, name, *about, chance, shown))
        return tuple(found)

    @property
    def headlines(self) -> list[Score]:
        """The score of each task that charts and sentences show."""
        return [score for score in self.scores if score.headline and is_share(score.metric)]

    @property
    def compression(self) -> dict[str, dict[str, float]]:
        """Bits per byte of validation sets, by the model ("model") and by compressors."""
        return {name: bits for name, bits in self.result.bits_per_byte.items() if "model" in bits}

    @property
    def prompts(self) -> list[tuple[bool, str, str]]:
        """Whether it was in a conversation, a prompt or question, and what the model wrote."""
        found = ((name, one) for name in ("prompts", "questions") for one in self.result.samples.get(name, ()))
        return [(name == "questions", one.prompt or one.question, one.text) for name, one in found]

    def score(self, task: str, metric: str) -> Score | None:
        """The score of that task and metric, if it was computed."""
        return next((s for s in self.scores if (s.task, s.metric) == (task, metric)), None)

    @property
    def by_task(self) -> dict[str, dict[str, dict[str, Any]]]:
        """As JSON: task -> metric -> value, stderr, and whether it was asked in the chat template."""
        return {
            task: {
                name: {"value": one.value, "stderr": one.stderr, "in_chat": result.chat_template}
                for name, one in result.metrics.items()
                if one.value is not None
            }
            for task, result in self.result.tasks.items()
        }


def changes(first: Evaluation, last: Evaluation) -> dict[tuple[str, str], Difference]:
    """The paired differences by task and metric; none where only one of the two was asked in the chat template."""
    try:
        found = compare(read_answers(first.folder), read_answers(last.folder))
    except UserError:  # they have no items in common
        return {}
    templated = [{name for name, task in one.result.tasks.items() if task.chat_template} for one in (first, last)]
    return {(one.task, one.metric): one for one in found if one.task not in templated[0] ^ templated[1]}


def read_evaluation(model: str, folder: Path) -> Evaluation:
    """Read the results.json of an evaluation, which also `affinage eval` writes."""
    return Evaluation(model, EvaluationResult.model_validate(read_json(folder / "results.json")), folder)

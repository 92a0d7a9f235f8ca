"""What an evaluation left behind: scores with standard errors, bits per byte, samples."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from affinage.errors import UserError
from affinage.evaluation.results import Difference, compare, read_answers
from affinage.results import EvaluationResult, read_json

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


class Score(NamedTuple):
    """One metric of one task, with its standard error; `chance` is what guessing gets, where that is known."""

    task: str
    metric: str
    value: float
    stderr: float | None
    items: int | None
    shots: int | None
    chat_template: bool
    chance: float | None


class Evaluation(EvaluationResult):
    """The scores of `model` (base, sft or dpo), from the results in a folder."""

    model: str = ""
    folder: Path = Path()

    @cached_property
    def by_task(self) -> dict[str, dict[str, Score]]:
        """All scores: task -> metric -> score."""
        found: dict[str, dict[str, Score]] = {}
        for task, result in self.tasks.items():
            about = (result.items, result.num_fewshot, result.chat_template)
            for name, metric in result.metrics.items():
                if metric.value is not None:
                    chance = result.chance if is_share(name) else None
                    scores = found.setdefault(task, {})
                    scores[name] = Score(task, name, metric.value, metric.stderr, *about, chance)
        return found

    @property
    def headlines(self) -> list[Score]:
        """The score of each task that charts and sentences show."""
        found = [scores[headline(task, scores)] for task, scores in self.by_task.items()]
        return [score for score in found if is_share(score.metric)]

    @property
    def compression(self) -> dict[str, dict[str, float]]:
        """Bits per byte of validation sets, by the model ("model") and by compressors."""
        return {name: bits for name, bits in self.bits_per_byte.items() if "model" in bits}

    @property
    def prompts(self) -> list[tuple[bool, str, str]]:
        """Whether it was in a conversation, a prompt or question, and what the model wrote."""
        found = ((name, one) for name in ("prompts", "questions") for one in self.samples.get(name, ()))
        return [(name == "questions", one.prompt or one.question, one.text) for name, one in found]

    def score(self, task: str, metric: str) -> Score | None:
        """The score of that task and metric, if it was computed."""
        return self.by_task.get(task, {}).get(metric)

    def to_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """As JSON: task -> metric -> value, stderr, and whether it was asked in the chat template."""
        return {
            task: {
                name: {"value": score.value, "stderr": score.stderr, "in_chat": score.chat_template}
                for name, score in scores.items()
            }
            for task, scores in self.by_task.items()
        }


def changes(first: Evaluation, last: Evaluation) -> dict[tuple[str, str], Difference]:
    """The paired differences by task and metric; none where only one of the two was asked in the chat template."""
    try:
        found = compare(read_answers(first.folder), read_answers(last.folder))
    except UserError:  # they have no items in common
        return {}
    in_chat = [{name for name, task in one.tasks.items() if task.chat_template} for one in (first, last)]
    return {(one.task, one.metric): one for one in found if one.task not in in_chat[0] ^ in_chat[1]}


def read_evaluation(model: str, folder: Path) -> Evaluation:
    """Read the results.json of an evaluation, which also `affinage eval` writes."""
    return Evaluation.model_validate(read_json(folder / "results.json") | {"model": model, "folder": folder})

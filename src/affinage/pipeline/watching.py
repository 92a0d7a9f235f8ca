"""Benchmarks looked at while a model is tuned: whether one of them is worse than before, and by what right one says so.

Loss goes on falling when benchmarks do not, and scores of small subsets wander by themselves. So looks are compared
item by item, by McNemar's exact test, corrected for how many comparisons there can be.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich
from rich.markup import escape

from affinage.cluster.processes import Processes
from affinage.config.training import MonitorSettings
from affinage.config.tuning import DpoSettings, TuningSettings
from affinage.errors import UserError
from affinage.pipeline.looks import evaluated, in_percent, model_in_training
from affinage.pipeline.names import KEPT
from affinage.pipeline.step import StepContext
from affinage.pipeline.store import write_json

if TYPE_CHECKING:
    from affinage.data.dataloader import DataLoader
    from affinage.generation.model import LoadedModel
    from affinage.model import Graph
    from affinage.training.state import TrainState

LOOKS = "watch.json"
_YES_OR_NO = ("acc_norm", "acc", "exact_match")

Answers = Mapping[str, list[int]]  # task -> 1 for every item that was right, 0 for the others
Stop = Callable[[], bool]
Tuning = TypeVar("Tuning", bound=TuningSettings)


def worse(before: list[int], now: list[int]) -> float:
    """How probable so many newly wrong answers are, or more, if as many become right as wrong by chance.

    McNemar's test, exact and one-sided: among the items whose answer changed, the new wrong ones are Binomial(n, 1/2).
    """
    lost = sum(b and not n for b, n in zip(before, now, strict=True))
    changed = lost + sum(n and not b for b, n in zip(before, now, strict=True))
    return sum(math.comb(changed, k) for k in range(lost, changed + 1)) / 2**changed


@dataclass
class Watch:
    """Ends a training where a benchmark is worse than at an earlier look, or where its rows have been seen enough."""

    settings: MonitorSettings | None
    folder: Path
    steps: int
    score: "Callable[[TrainState, Stop], Answers | None]"  # None if it was stopped
    keep: "Callable[[int, TrainState], None]"
    last_step: int | None = None  # where the training ends anyhow ...
    ending: str = ""  # ... and why
    looks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.say: Callable[[str], None] = print
        path = self.folder / LOOKS
        looks = json.loads(path.read_text(encoding="utf-8"))["looks"] if path.is_file() else []
        self.looks = Processes.at_work().broadcast("the looks so far", looks)

    def due(self, step: int) -> bool:
        """See `affinage.training.job.Judge`."""
        return step == self.last_step or self._is_look(step)

    def _is_look(self, step: int) -> bool:
        if self.settings is None:
            return False
        return step % self.settings.every_steps == 0 or step in (self.steps, self.last_step)

    def look(self, step: int, state: "TrainState", stop: Stop) -> str:
        """See `affinage.training.job.Judge`."""
        reason = self._looked(step, state, stop) if self._is_look(step) else ""
        if reason == "" and step == self.last_step:
            reason = self.ending
        return reason or ""

    def _looked(self, step: int, state: "TrainState", stop: Stop) -> str | None:
        """Which benchmarks are worse, in words; None if the look was given up."""
        assert self.settings is not None
        found = next((look for look in self.looks if look["step"] == step), None)
        if found is None:
            # Looks after this one are of a run that was killed, and are taken again.
            self.looks = [look for look in self.looks if look["step"] < step]
            scored = self.score(state, stop)
            if scored is None:
                return None
            answers = {task: list(right) for task, right in scored.items()}
            found = {"step": step, "scores": scores(answers), "worse": self.degraded(answers), "right": answers}
            self.looks.append(found)
            if not found["worse"] and self.settings.on_regression != "log":
                self.keep(step, state)
            if Processes.at_work().first:
                write_json(self.folder / LOOKS, {"threshold": self.threshold(len(answers)), "looks": self.looks})
            self.say(f"step {step:,}/{self.steps:,}  watched: {', '.join(_in_words(found))}")
        return "; ".join(_degradations(found)) if self.settings.on_regression == "stop" else ""

    def degraded(self, answers: Answers) -> list[dict[str, Any]]:
        """Which tasks are worse than at which earlier look: {task, than: its step, p}."""
        threshold = self.threshold(len(answers))
        compared = (
            {"task": task, "than": before["step"], "p": worse(before["right"][task], right)}
            for task, right in answers.items()
            for before in self.looks
        )
        return [one for one in compared if one["p"] < threshold]

    def threshold(self, tasks: int) -> float:
        """What `p` is divided down to: by tasks times pairs of looks."""
        assert self.settings is not None
        looks = sum(self._is_look(step) for step in range(min(self.steps, self.last_step or self.steps) + 1))
        return self.settings.alpha / (tasks * max(1, math.comb(looks, 2)))


def _degradations(look: Mapping[str, Any]) -> list[str]:
    return [f"{one['task']} is worse than at step {one['than']:,} (p = {one['p']:.1g})" for one in look["worse"]]


def _in_words(look: Mapping[str, Any]) -> list[str]:
    """The scores in percent with their standard errors, and what is worse."""
    return [in_percent(task, score) for task, score in look["scores"].items()] + _degradations(look)


def scores(answers: Answers) -> dict[str, dict[str, float]]:
    """{task: {value, stderr}}: the share of right answers."""
    found = {}
    for task, right in answers.items():
        share = sum(right) / len(right)
        found[task] = {"value": share, "stderr": math.sqrt(share * (1 - share) / max(1, len(right) - 1))}
    return found


def within_epochs(settings: Tuning, feed: "DataLoader", where: str) -> Tuning:
    """The settings with no more steps than `num_epochs` allows, at the last of which the schedule ends, too.

    A warm-up that is longer than they are becomes a tenth of them. Fewer steps are told of before the training begins.
    Raises UserError if the schedule begins after them.
    """
    if settings.num_epochs is None:
        return settings
    steps, schedule = _last_step(feed, settings.steps, settings.num_epochs), settings.schedule
    if steps == settings.steps:
        return settings
    if schedule.from_step >= steps:
        raise UserError(
            f"the rows have been seen {settings.num_epochs:g} times after step {steps:,}, and the schedule begins at "
            f"step {schedule.from_step:,}",
            where=f"{where}.num_epochs",
            fix="Allow more epochs (null: any number), or give more conversations.",
        )
    if schedule.warmup_steps > steps - schedule.from_step:
        schedule = schedule.model_copy(update={"warmup_steps": (steps - schedule.from_step) // 10})
    if Processes.current.first:
        why = seen_enough(feed, steps, settings.num_epochs)
        rich.print(f"{where}: ends at step {steps:,} of {settings.steps:,}, when {escape(why)}; null lets it go on")
    return settings.model_copy(update={"steps": steps, "schedule": schedule})


def seen_enough(feed: "DataLoader", last_step: int, epochs: float) -> str:
    """Why a training ends at its last step, in words: which rows one step more would see more often than `epochs`."""
    seen = feed.epochs(last_step + 1)
    spent = [name for name, times in seen.items() if times > epochs]
    rows = "its rows" if len(spent) == len(seen) else f"the rows of {', '.join(spent)}"
    return f"{rows} have been seen as often as `num_epochs: {epochs:g}` allows"


def judge_of(
    context: StepContext, settings: TuningSettings, asked: int, graph: "Graph", feed: "DataLoader", system_prompt: str
) -> Watch | None:
    """The judge that a tuning's settings ask for; None if it goes on to its last step in any case.

    `asked` is how many steps the recipe has; those of `settings` may be fewer, see `within_epochs`.
    """
    last_step = settings.steps if settings.steps < asked else None
    if settings.monitor is None and last_step is None:
        return None

    def keep(step: int, state: "TrainState") -> None:
        from affinage.checkpoint import CheckpointStore

        store = CheckpointStore(context.folder / KEPT, keep_last=1)
        store.save(step, {"params": state.params}, {"step": step})
        store.wait()

    def score(state: "TrainState", stop: Stop) -> Answers | None:
        assert settings.monitor is not None
        params = _whole_model(graph, settings, state)
        model = model_in_training(context, settings, graph, feed.context, system_prompt, params)
        setting = "dpo.monitor" if isinstance(settings, DpoSettings) else "sft.monitor"
        return _answers(context, settings.monitor, setting, model, state, stop)

    ending = "" if last_step is None else seen_enough(feed, last_step, settings.num_epochs or 0.0)
    return Watch(settings.monitor, context.folder, settings.steps, score, keep, last_step, ending)


def _whole_model(graph: "Graph", settings: TuningSettings, state: "TrainState") -> Any:
    """The weights at this step, with the adapters in them where such are trained."""
    import jax

    from affinage.training.frozen import frozen_of

    if settings.lora is None:
        return state.params
    like = jax.tree.map(lambda leaf: leaf.sharding, state.frozen)
    return jax.jit(frozen_of(graph, settings).merged, out_shardings=like)(state.params, state.frozen)


def _last_step(feed: "DataLoader", steps: int, epochs: float) -> int:
    """The last step, at least 1, after which no source was seen more often than `epochs` times."""
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if max(feed.epochs(middle).values()) <= epochs else (low, middle - 1)
    return low


def _answers(
    context: StepContext, watch: MonitorSettings, setting: str, model: "LoadedModel", state: "TrainState", stop: Stop
) -> Answers | None:
    lines: dict[str, list[dict[str, Any]]] = {}

    def answered(task: str, line: dict[str, Any]) -> None:
        lines.setdefault(task, []).append(line)

    world = context.inputs.get("synthesize")
    if evaluated(context, watch, setting, model, state, stop, world=world, answered=answered) is None:
        return None
    if not lines:
        what, fix = "all of these are conversations, which only a finished model is asked", "Watch others beside them."
        raise UserError(what, where=f"{setting}.tasks", fix=fix)
    return {task: right_items(task, lines[task], setting) for task in sorted(lines)}


def right_items(task: str, lines: Sequence[dict[str, Any]], setting: str) -> list[int]:
    """1 for each item that was right, 0 for the others: by the first filter of a task, as one answer is one trial."""
    items: dict[Any, dict[str, Any]] = {}
    for line in lines:
        items.setdefault(line["id"], line)  # they come filter by filter
    metric = next((name for name in _YES_OR_NO if name in next(iter(items.values()))), None)
    if metric is None:
        raise UserError(
            f"{task} does not say of an item whether the answer was right",
            where=f"{setting}.tasks",
            fix=f"Watch tasks that have one of {', '.join(_YES_OR_NO)}.",
        )
    return [int(items[name][metric] >= 0.5) for name in sorted(items)]

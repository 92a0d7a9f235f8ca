"""Benchmarks during a training: scored for the log, and compared item by item so that a regression can end it.

Loss goes on falling when benchmarks do not, and scores of small subsets wander by themselves. So points are compared
item by item, by McNemar's exact test, corrected for the number of comparisons.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich
from rich.markup import escape

from affinage.cluster.processes import Processes
from affinage.config.data import POCKET_WORLD
from affinage.config.training import MonitorSettings, PretrainSettings, TrainSettings
from affinage.config.tuning import DpoSettings, TuningSettings
from affinage.errors import UserError
from affinage.pipeline.models import made_from
from affinage.pipeline.names import KEPT
from affinage.pipeline.step import StepContext
from affinage.pipeline.steps_data import chat_tokenizer
from affinage.pipeline.store import write_json

if TYPE_CHECKING:
    from affinage.data.dataloader import DataLoader, ValidationRows
    from affinage.evaluation.run import Answered
    from affinage.generation.model import LoadedModel
    from affinage.model import Graph
    from affinage.training.state import TrainState

POINTS = "monitor.json"
ANSWERS = "benchmarks.db"  # of the scores that are being computed
_BINARY = ("acc_norm", "acc", "exact_match")  # metrics that are 0 or 1 for an item

Answers = Mapping[str, list[int]]  # task -> 1 for every item with a right answer, 0 for the others
Stop = Callable[[], bool]
Tuning = TypeVar("Tuning", bound=TuningSettings)


class _Stopped(Exception):
    """Raised between batches to leave an evaluation."""


class PretrainingMonitor:
    """Scores benchmarks while a model is pretrained; see `affinage.training.job.Benchmarks`."""

    def __init__(
        self, context: StepContext, settings: PretrainSettings, graph: "Graph", sets: "Mapping[str, ValidationRows]"
    ) -> None:
        assert settings.monitor is not None
        self.say: Callable[[str], None] = print
        self._context, self._settings, self._monitor = context, settings, settings.monitor
        self._graph, self._sets = graph, sets
        self._world = made_from(context.inputs["tokenize"], "synthesize")

    def due(self, step: int) -> bool:
        """Whether benchmarks are scored after this step: regularly, and at the beginning and the end."""
        return step % self._monitor.every_steps == 0 or step == self._settings.steps

    def scores(
        self, step: int, state: "TrainState", validation: Mapping[str, Mapping[str, float]], stop: Stop
    ) -> dict[str, Any] | None:
        """{tasks: {task: {metric: {value, stderr}}}, bits_per_byte: {language: bits}}; None if stopped."""
        length = self._context.recipe.packing.seq_len
        model = _current_model(self._context, self._settings, self._graph, length, "", state.params)
        results = _evaluate(self._context, self._monitor, "pretrain.monitor", model, state, stop, world=self._world)
        if results is None:
            return None
        tasks = {task: entry["metrics"] for task, entry in results["tasks"].items()}
        self.say(f"step {step:,}/{self._settings.steps:,}  benchmarks: {', '.join(_headlines(tasks))}")
        return {"tasks": tasks, "bits_per_byte": bits_by_language(validation, self._sets)}


def _headlines(tasks: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> Iterator[str]:
    # Imports pyarrow, which starts a thread: nothing may do that in a process that is forked.
    from affinage.report.evaluations import headline, is_share

    for task, metrics in tasks.items():
        known = {name: score for name, score in metrics.items() if score["value"] is not None}
        metric = headline(task, known)
        if is_share(metric):
            yield _in_percent(task, known[metric])
        elif metric:
            yield f"{task} {metric} {known[metric]['value']:.4g}"


def _in_percent(task: str, score: Mapping[str, float | None]) -> str:
    error = "" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}"
    return f"{task} {100 * (score['value'] or 0.0):.1f}{error} %"


def bits_by_language(
    validation: Mapping[str, Mapping[str, float]], sets: "Mapping[str, ValidationRows]"
) -> dict[str, float]:
    """Bits per UTF-8 byte of all validation text of a language, over its sources (sets are `source.language`)."""
    bits: dict[str, float] = {}
    size: dict[str, int] = {}
    for name, score in validation.items():
        language = name.rpartition(".")[2]
        bits[language] = bits.get(language, 0.0) + score["bits_per_byte"] * sets[name].bytes
        size[language] = size.get(language, 0) + sets[name].bytes
    return {language: bits[language] / size[language] for language in bits}


# ---- regressions during fine-tuning ----


class RegressionMonitor:
    """Ends a fine-tuning where a benchmark is worse than before, or where `num_epochs` ends it.

    See `affinage.training.job.Judge`.

    Args:
        settings: None without benchmarks.
        folder: of the training; the points are stored there.
        steps: of the training.
        score: returns the answers of a state, or None if it was stopped.
        keep: saves the state of a step in place of the training's checkpoints.
        last_step: where `num_epochs` ends the training; None if it does not.
        ending: why it ends there.
    """

    def __init__(
        self,
        settings: MonitorSettings | None,
        folder: Path,
        steps: int,
        score: "Callable[[TrainState, Stop], Answers | None]",
        keep: "Callable[[int, TrainState], None]",
        last_step: int | None = None,
        ending: str = "",
    ) -> None:
        self.say: Callable[[str], None] = print
        self.settings, self.steps, self.last_step = settings, steps, last_step
        self._file, self._score, self._keep, self._ending = folder / POINTS, score, keep, ending
        points = json.loads(self._file.read_text(encoding="utf-8"))["points"] if self._file.is_file() else []
        self.points: list[dict[str, Any]] = Processes.at_work().broadcast("the points of the monitor", points)

    def due(self, step: int) -> bool:
        """Whether the training may end after this step."""
        return step == self.last_step or self._has_point(step)

    def _has_point(self, step: int) -> bool:
        if self.settings is None:
            return False
        return step % self.settings.every_steps == 0 or step in (self.steps, self.last_step)

    def look(self, step: int, state: "TrainState", stop: Stop) -> str:
        """Why the training ends after this step; "" if it does not."""
        reason = self._regressions(step, state, stop) if self._has_point(step) else ""
        return self._ending if reason == "" and step == self.last_step else reason or ""

    def _regressions(self, step: int, state: "TrainState", stop: Stop) -> str | None:
        """The benchmarks that end the training; None if the evaluation was stopped."""
        assert self.settings is not None
        point = next((point for point in self.points if point["step"] == step), None)
        if point is None:
            # Points after this one are of a run that was killed, and are computed again.
            self.points = [point for point in self.points if point["step"] < step]
            answers = self._score(state, stop)
            if answers is None:
                return None
            answers = {task: list(right) for task, right in answers.items()}
            point = {"step": step, "scores": _scores(answers), "worse": self.regressed(answers), "right": answers}
            self.points.append(point)
            if not point["worse"] and self.settings.on_regression != "log":
                self._keep(step, state)
            if Processes.at_work().first:
                write_json(self._file, {"threshold": self.threshold(len(answers)), "points": self.points})
            scores = [_in_percent(task, score) for task, score in point["scores"].items()]
            self.say(f"step {step:,}/{self.steps:,}  monitor: {', '.join(scores + _worse(point))}")
        return "; ".join(_worse(point)) if self.settings.on_regression == "stop" else ""

    def regressed(self, answers: Answers) -> list[dict[str, Any]]:
        """The tasks that are worse than at an earlier point: {task, than: its step, p}."""
        threshold = self.threshold(len(answers))
        compared = (
            {"task": task, "than": before["step"], "p": mcnemar(before["right"][task], right)}
            for task, right in answers.items()
            for before in self.points
        )
        return [one for one in compared if one["p"] < threshold]

    def threshold(self, tasks: int) -> float:
        """`alpha` divided by the number of tasks times pairs of points (Bonferroni)."""
        assert self.settings is not None
        points = sum(self._has_point(step) for step in range(min(self.steps, self.last_step or self.steps) + 1))
        return self.settings.alpha / (tasks * max(1, math.comb(points, 2)))


def _worse(point: Mapping[str, Any]) -> list[str]:
    return [f"{one['task']} is worse than at step {one['than']:,} (p = {one['p']:.1g})" for one in point["worse"]]


def _scores(answers: Answers) -> dict[str, dict[str, float | None]]:
    """{task: {value, stderr}} of the share of right answers."""
    shares = {task: (sum(right) / len(right), len(right)) for task, right in answers.items()}
    return {
        task: {"value": share, "stderr": math.sqrt(share * (1 - share) / max(1, count - 1))}
        for task, (share, count) in shares.items()
    }


def mcnemar(before: list[int], now: list[int]) -> float:
    """The probability of at least this many newly wrong answers if as many become right as wrong by chance.

    McNemar's test, exact and one-sided: among the items whose answer changed, the new wrong ones are Binomial(n, 1/2).
    """
    lost = sum(b and not n for b, n in zip(before, now, strict=True))
    changed = lost + sum(n and not b for b, n in zip(before, now, strict=True))
    return sum(math.comb(changed, k) for k in range(lost, changed + 1)) / 2**changed


def tuning_monitor(
    context: StepContext, settings: TuningSettings, steps: int, graph: "Graph", feed: "DataLoader", system_prompt: str
) -> RegressionMonitor | None:
    """The monitor of a fine-tuning; None if the training goes on to its last step in any case.

    `steps` are those of the recipe; `settings` may have fewer, see `within_epochs`.
    """
    last_step = settings.steps if settings.steps < steps else None
    if settings.monitor is None and last_step is None:
        return None
    key = "dpo.monitor" if isinstance(settings, DpoSettings) else "sft.monitor"

    def keep(step: int, state: "TrainState") -> None:
        from affinage.checkpoint import CheckpointStore

        store = CheckpointStore(context.folder / KEPT, keep_last=1)
        store.save(step, {"params": state.params}, {"step": step})
        store.wait()

    def score(state: "TrainState", stop: Stop) -> Answers | None:
        assert settings.monitor is not None
        params = _merged(graph, settings, state)
        model = _current_model(context, settings, graph, feed.context, system_prompt, params)
        return _right_answers(context, settings.monitor, key, model, state, stop)

    ending = "" if last_step is None else epochs_exceeded(feed, last_step, settings.num_epochs or 0.0)
    return RegressionMonitor(settings.monitor, context.folder, settings.steps, score, keep, last_step, ending)


def _merged(graph: "Graph", settings: TuningSettings, state: "TrainState") -> Any:
    """The weights of this step, with LoRA merged into them."""
    import jax

    from affinage.training.frozen import split_params

    if settings.lora is None:
        return state.params
    like = jax.tree.map(lambda leaf: leaf.sharding, state.frozen)
    return jax.jit(split_params(graph, settings).merge_lora, out_shardings=like)(state.params, state.frozen)


def _right_answers(
    context: StepContext, monitor: MonitorSettings, key: str, model: "LoadedModel", state: "TrainState", stop: Stop
) -> Answers | None:
    lines: dict[str, list[dict[str, Any]]] = {}

    def answered(task: str, line: dict[str, Any]) -> None:
        lines.setdefault(task, []).append(line)

    world = context.inputs.get("synthesize")
    if _evaluate(context, monitor, key, model, state, stop, world=world, answered=answered) is None:
        return None
    if not lines:
        fix = "Add tasks that are scored by log-likelihood."
        raise UserError("all of these are conversations, for finished models only", where=f"{key}.tasks", fix=fix)
    return {task: right_items(task, lines[task], key) for task in sorted(lines)}


def right_items(task: str, lines: Sequence[dict[str, Any]], key: str) -> list[int]:
    """1 for each item with a right answer, 0 for the others, by the task's first filter: one trial per answer."""
    items: dict[Any, dict[str, Any]] = {}
    for line in lines:
        items.setdefault(line["id"], line)  # they come filter by filter
    metric = next((name for name in _BINARY if name in next(iter(items.values()))), None)
    if metric is None:
        fix = f"Choose tasks that have one of {', '.join(_BINARY)}."
        raise UserError(f"{task} has no metric that is right or wrong for an item", where=f"{key}.tasks", fix=fix)
    return [int(items[name][metric] >= 0.5) for name in sorted(items)]


# ---- the end by epochs ----


def within_epochs(settings: Tuning, feed: "DataLoader", where: str) -> Tuning:
    """The settings with at most the steps that `num_epochs` allows, and a schedule that ends with them.

    A warm-up that is longer becomes a tenth of the steps. Raises UserError if the schedule begins after them.
    """
    if settings.num_epochs is None:
        return settings
    steps, schedule = _last_step(feed, settings.steps, settings.num_epochs), settings.schedule
    if steps == settings.steps:
        return settings
    if schedule.from_step >= steps:
        raise UserError(
            f"{settings.num_epochs:g} epochs end at step {steps:,}, and the schedule begins at step "
            f"{schedule.from_step:,}",
            where=f"{where}.num_epochs",
            fix="Allow more epochs (null: any number), or give more conversations.",
        )
    if schedule.warmup_steps > steps - schedule.from_step:
        schedule = schedule.model_copy(update={"warmup_steps": (steps - schedule.from_step) // 10})
    if Processes.current.first:
        why = escape(epochs_exceeded(feed, steps, settings.num_epochs))
        rich.print(f"{where}: ends at step {steps:,} of {settings.steps:,}, when {why}; null lets it go on")
    return settings.model_copy(update={"steps": steps, "schedule": schedule})


def epochs_exceeded(feed: "DataLoader", last_step: int, epochs: float) -> str:
    """Why a training ends at its last step: which rows one step more would read more often than `epochs`."""
    seen = feed.epochs(last_step + 1)
    spent = [name for name, times in seen.items() if times > epochs]
    rows = "its rows" if len(spent) == len(seen) else f"the rows of {', '.join(spent)}"
    return f"{rows} have been seen as often as `num_epochs: {epochs:g}` allows"


def _last_step(feed: "DataLoader", steps: int, epochs: float) -> int:
    """The last step, at least 1, after which no source was read more often than `epochs` times."""
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if max(feed.epochs(middle).values()) <= epochs else (low, middle - 1)
    return low


# ---- evaluation where the weights are ----


def _evaluate(
    context: StepContext,
    monitor: MonitorSettings,
    key: str,
    model: "LoadedModel",
    state: "TrainState",
    stop: Stop,
    *,
    world: Path | None,
    answered: "Answered | None" = None,
) -> dict[str, Any] | None:
    """The results of `affinage.evaluation.run.evaluate`; None if `stop`, called between batches, returned true.

    Answers are stored as they come, under a fingerprint of the weights: a training that was stopped or killed comes to
    the same weights again, bit for bit, and does not compute them again.
    """
    from affinage.evaluation.run import evaluate

    def go_on(_: str) -> None:
        if stop():
            raise _Stopped

    try:
        return evaluate(
            model,
            monitor.tasks,
            keep=context.folder / ANSWERS,
            task_folders={} if world is None else {POCKET_WORLD: world / "tasks"},
            data_dir=monitor.data_dir,
            limit=monitor.limit,
            sample_seed=context.recipe.seed,
            batch_size=free_batch_size(model, state) if monitor.batch_size == "auto" else monitor.batch_size,
            samples=0,
            answered=answered,
            progress=go_on,
        )
    except _Stopped:
        return None
    except UserError as error:
        where = ", ".join(filter(None, (f"{key}.tasks", error.where)))
        raise UserError(error.what, where=where, fix=error.fix) from error


def free_batch_size(model: "LoadedModel", state: "TrainState", platform: str = "") -> int:
    """The rows that fit beside the state of the training; on CPUs, where memory does not decide, the most allowed.

    `platform` is JAX's name of it, by default that of the devices with the weights.
    """
    import jax

    from affinage.evaluation.scoring import MAX_ROWS, bytes_on_a_device, rows_that_fit

    weights = jax.tree.leaves(model.params)
    if (platform or next(iter(weights[0].sharding.device_set)).platform) == "cpu":
        return MAX_ROWS
    counted = {id(leaf) for leaf in weights}
    beside = sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(state) if id(leaf) not in counted)
    return rows_that_fit(model, beside=beside)


def _current_model(
    context: StepContext, settings: TrainSettings, graph: "Graph", length: int, system_prompt: str, params: Any
) -> "LoadedModel":
    """A model with the weights of this step, where they are, and `length` tokens of context."""
    import jax

    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.parallel import MeshLayout, serving_table
    from affinage.training.trainer import compute_dtype

    sharding, table = jax.tree.leaves(params)[0].sharding, serving_table(context.recipe.parallel.sharding)
    device = next(iter(sharding.device_set))
    return LoadedModel(
        graph=graph,
        params=params,
        tokenizer=chat_tokenizer(context),
        name=context.recipe.name,
        context=length,
        layout=MeshLayout(sharding.mesh, table) if len(sharding.device_set) > 1 else None,
        system_prompt=system_prompt,
        compute_dtype=compute_dtype(settings.precision, chip(device.device_kind)).name,
    )

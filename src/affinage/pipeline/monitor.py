"""Benchmarks during a training: scored for the log, and compared item by item so that a regression can end it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from affinage.checkpoint import CheckpointStore
from affinage.cluster.processes import Processes
from affinage.config.training import TrainSettings, TuningSettings
from affinage.errors import UserError
from affinage.generation.engine import LoadedModel
from affinage.hardware.chips import chip
from affinage.json_files import write_json
from affinage.model import Graph
from affinage.parallel.sharding import MeshLayout, serving_table
from affinage.pipeline.models import KEPT, made_from
from affinage.pipeline.step import StepContext
from affinage.pipeline.steps_data import chat_tokenizer
from affinage.results import read_json
from affinage.training.state import TrainState, split_params
from affinage.training.trainer import compute_dtype

POINTS = "monitor.json"
ANSWERS = "benchmarks.db"  # of the scores that are being computed
_BINARY = ("acc_norm", "acc", "exact_match")  # metrics that are 0 or 1 for an item

Answers = Mapping[str, list[int]]  # task -> 1 for every item with a right answer, 0 for the others


class _Stopped(Exception):
    """Raised between batches to leave an evaluation."""


class BenchmarkMonitor:
    """Scores benchmarks while a model is trained, and may end the training; see `affinage.training.trainer.Monitor`."""

    def __init__(
        self, context: StepContext, settings: TrainSettings, graph: Graph, length: int, system_prompt: str = ""
    ) -> None:
        """Of the training of `graph`, a model of `length` tokens of context, by settings that have a `monitor`."""
        assert settings.monitor is not None
        self.say: Callable[[str], None] = print
        self.settings, self.training, self.steps = settings.monitor, settings, settings.steps
        self._context, self._graph, self._length, self._system_prompt = context, graph, length, system_prompt
        points = read_json(context.folder / POINTS).get("points", [])
        self.points: list[dict[str, Any]] = Processes.at_work().broadcast("the points of the monitor", points)

    def due(self, step: int) -> bool:
        """Whether benchmarks are scored after this step: regularly, and at the beginning and the end."""
        return step % self.settings.every_steps == 0 or step == self.steps

    def look(self, step: int, state: TrainState, stop: Callable[[], bool]) -> tuple[dict[str, Any] | None, str]:
        """The scores of a state, and why the training ends here; see `affinage.training.trainer.Monitor`."""
        point = next((point for point in self.points if point["step"] == step), None)
        if point is None:
            # Points after this one are of a run that was killed, and are computed again.
            self.points = [point for point in self.points if point["step"] < step]
            if (scored := self.score(state, stop)) is None:
                return None, ""
            (metrics, right), scores = scored, {}
            for task, items in right.items():
                share = sum(items) / len(items)
                scores[task] = {"value": share, "stderr": math.sqrt(share * (1 - share) / max(1, len(items) - 1))}
            point = {"step": step, "scores": scores, "worse": self.regressed(right), "right": right, "tasks": metrics}
            self.points.append(point)
            if not point["worse"] and self.settings.on_regression != "log":
                self.keep(step, state)
            self._write_points()
            shown = [f"{task} {100 * one['value']:.1f} ± {100 * one['stderr']:.1f} %" for task, one in scores.items()]
            self.say(f"step {step:,}/{self.steps:,}  monitor: {', '.join([*shown, *_worse(point)])}")
        return {"tasks": point["tasks"]}, "; ".join(_worse(point)) if self.settings.on_regression == "stop" else ""

    def rolled_back(self, step: int, state: TrainState) -> None:
        """See `affinage.training.trainer.Monitor`. A model that was kept after the step gives way to this one."""
        was_kept = any(point["step"] > step and not point["worse"] for point in self.points)
        self.points = [point for point in self.points if point["step"] <= step]
        if was_kept and self.settings.on_regression != "log":
            self.keep(step, state)
        self._write_points()

    def _write_points(self) -> None:
        if Processes.at_work().first:
            write_json(self._context.folder / POINTS, {"points": self.points})

    def regressed(self, answers: Answers) -> list[dict[str, Any]]:
        """The tasks that are worse than at an earlier point: {task, than: its step, p}.

        A p-value counts below `alpha`, divided by the number of tasks times pairs of points (Bonferroni).
        """
        points = 1 + math.ceil(self.steps / self.settings.every_steps)
        threshold = self.settings.alpha / max(1, len(answers) * math.comb(points, 2))
        compared = (
            {"task": task, "than": before["step"], "p": mcnemar(before["right"][task], right)}
            for task, right in answers.items()
            for before in self.points
            if len(before["right"].get(task, ())) == len(right)  # other items, of a training that was resumed with them
        )
        return [test for test in compared if test["p"] < threshold]

    def keep(self, step: int, state: TrainState) -> None:
        """Save the state of a step in place of the training's checkpoints."""
        store = CheckpointStore(f"{self._context.saves_to}/{KEPT}", keep_last=1)
        if Processes.at_work().first and max(store.steps(), default=-1) >= step:
            epath.Path(store.folder).rmtree()  # of what a rollback or a kill has undone
        store.save(step, {"params": state.params}, {"step": step})
        store.wait()

    def score(self, state: TrainState, stop: Callable[[], bool]) -> tuple[dict[str, Any], Answers] | None:
        """The metrics {task: {metric: {value, stderr}}} and answers of a state; None once `stop` returns true.

        Answers are stored as they come, under a fingerprint of the weights: a resumed training computes none twice.
        """
        from affinage.evaluation.run import evaluate

        def raise_if_stopped(_: str) -> None:
            if stop():
                raise _Stopped

        context, settings, params = self._context, self.training, state.params  # they stay where they are
        if isinstance(settings, TuningSettings) and settings.lora is not None:
            like = jax.tree.map(lambda leaf: leaf.sharding, state.frozen)
            params = jax.jit(split_params(self._graph, settings).merge_lora, out_shardings=like)(params, state.frozen)
        sharding, table = jax.tree.leaves(params)[0].sharding, serving_table(context.recipe.parallel.sharding)
        kind, name = chip(next(iter(sharding.device_set)).device_kind), context.recipe.name
        layout = MeshLayout(sharding.mesh, table) if len(sharding.device_set) > 1 else None
        of_use: dict[str, Any] = {"layout": layout, "chat": isinstance(settings, TuningSettings)}
        of_use |= {"system_prompt": self._system_prompt, "compute_dtype": compute_dtype(settings.precision, kind).name}
        model = LoadedModel(self._graph, params, chat_tokenizer(context), name, self._length, **of_use)
        rows, world = context.inputs.get("tokenize"), context.inputs.get("synthesize")
        world = world if rows is None else made_from(rows, "synthesize")  # a pretraining reads no world itself
        lines = dict[str, Sequence[dict[str, Any]]]()
        try:
            how: dict[str, Any] = {"keep": context.folder / ANSWERS, "world": world, "sample_seed": context.recipe.seed}
            how |= self.settings.model_dump(include={"data_dir", "limit"})
            results = evaluate(model, self.settings.tasks, answered=lines.update, progress=raise_if_stopped, **how)
            right = {task: items for task in sorted(lines) if (items := right_items(lines[task])) is not None}
            if (len(right) < len(lines) and self.settings.on_regression != "log") or not lines:
                what = f"not all of these have a metric that is right or wrong for an item: {', '.join(_BINARY)}"
                raise UserError(what, fix="Choose tasks that have one and are scored by log-likelihood.")
        except _Stopped:
            return None
        except UserError as error:
            error.where = ": ".join(filter(None, [f"{context.step}.monitor.tasks", error.where]))
            raise
        return {task: entry["metrics"] for task, entry in results["tasks"].items()}, right


def _worse(point: Mapping[str, Any]) -> list[str]:
    return [f"{test['task']} is worse than at step {test['than']:,} (p = {test['p']:.1g})" for test in point["worse"]]


def mcnemar(before: Sequence[int], now: Sequence[int]) -> float:
    """The probability of at least this many newly wrong answers if as many become right as wrong by chance.

    McNemar's test, exact and one-sided: among the items whose answer changed, the new wrong ones are Binomial(n, 1/2).
    """
    changes = [b - n for b, n in zip(before, now, strict=True) if b != n]
    return sum(math.comb(len(changes), k) for k in range(changes.count(1), len(changes) + 1)) / 2 ** len(changes)


def right_items(lines: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """1 for each item with a right answer, 0 for the others, by the task's first filter: one trial per answer.

    None for a task that has no metric which is right or wrong for an item.
    """
    items: dict[Any, Mapping[str, Any]] = {}
    for line in lines:
        items.setdefault(line["id"], line)  # they come filter by filter
    metric = next((name for name in _BINARY if name in next(iter(items.values()))), None)
    return None if metric is None else [int(items[name][metric] >= 0.5) for name in sorted(items)]

"""Benchmarks looked at while a model is tuned: whether one of them is worse than before, and by what right one says so.

Loss goes on falling when benchmarks do not, and scores of small subsets wander by themselves. So looks are compared
item by item, by McNemar's exact test, corrected for how many comparisons there can be.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from affinage.errors import UserError
from affinage.hardware.hosts import Hosts
from affinage.recipe.data import POCKET_WORLD
from affinage.recipe.training import TrainSettings
from affinage.recipe.tuning import TuningSettings, WatchSettings
from affinage.stages.initial import KEPT
from affinage.stages.stage import StageContext
from affinage.stages.store import write_json
from affinage.stages.texts import chat_tokenizer

if TYPE_CHECKING:
    from affinage.data.feed import RowFeed
    from affinage.generation.model import LoadedModel
    from affinage.model import Graph
    from affinage.training.state import TrainState

LOOKS = "watch.json"
_YES_OR_NO = ("acc_norm", "acc", "exact_match")

Answers = Mapping[str, list[int]]  # task -> 1 for every item that was right, 0 for the others


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

    settings: WatchSettings | None
    folder: Path
    steps: int
    score: "Callable[[TrainState], Answers]"
    keep: "Callable[[int, TrainState], None]"
    last_step: int | None = None  # where the training ends anyhow
    looks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = self.folder / LOOKS
        looks = json.loads(path.read_text(encoding="utf-8"))["looks"] if path.is_file() else []
        self.looks = Hosts.at_work().share("the looks so far", looks)

    def due(self, step: int) -> bool:
        """See `affinage.training.job.Judge`."""
        return step == self.last_step or self._is_look(step)

    def _is_look(self, step: int) -> bool:
        if self.settings is None:
            return False
        return step % self.settings.every_steps == 0 or step in (self.steps, self.last_step)

    def look(self, step: int, state: "TrainState") -> str:
        """See `affinage.training.job.Judge`."""
        reason = self._looked(step, state) if self._is_look(step) else ""
        if not reason and step == self.last_step:
            reason = "its rows have been seen as often as `max_epochs` allows"
        return reason

    def _looked(self, step: int, state: "TrainState") -> str:
        assert self.settings is not None
        found = next((look for look in self.looks if look["step"] == step), None)
        if found is None:
            # Looks after this one are of a run that was killed, and are taken again.
            self.looks = [look for look in self.looks if look["step"] < step]
            answers = {task: list(right) for task, right in self.score(state).items()}
            found = {"step": step, "scores": scores(answers), "worse": self._worse(answers), "right": answers}
            self.looks.append(found)
            if step and not found["worse"] and self.settings.when_worse != "tell":
                self.keep(step, state)
            if Hosts.at_work().first:
                write_json(self.folder / LOOKS, {"threshold": self.threshold(len(answers)), "looks": self.looks})
        told = [f"{one['task']} is worse than at step {one['than']:,} (p = {one['p']:.1g})" for one in found["worse"]]
        return "; ".join(told) if self.settings.when_worse == "stop" else ""

    def _worse(self, answers: Answers) -> list[dict[str, Any]]:
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
        return self.settings.p / (tasks * max(1, math.comb(looks, 2)))


def scores(answers: Answers) -> dict[str, dict[str, float]]:
    """{task: {value, stderr}}: the share of right answers."""
    found = {}
    for task, right in answers.items():
        share = sum(right) / len(right)
        found[task] = {"value": share, "stderr": math.sqrt(share * (1 - share) / max(1, len(right) - 1))}
    return found


def judge_of(
    context: StageContext, settings: TuningSettings, graph: "Graph", feed: "RowFeed", system_prompt: str
) -> Watch | None:
    """The judge that a tuning's settings ask for; None if it goes on to its last step in any case."""
    last_step = None
    if settings.max_epochs is not None:
        last_step = _last_step(feed, settings.steps, settings.max_epochs)
        last_step = None if last_step == settings.steps else last_step
    if settings.watch is None and last_step is None:
        return None

    def keep(step: int, state: "TrainState") -> None:
        from affinage.checkpoint import CheckpointStore

        store = CheckpointStore(context.folder / KEPT, keep_last=1)
        store.save(step, {"params": state.params}, {"step": step})
        store.wait()

    def score(state: "TrainState") -> Answers:
        assert settings.watch is not None
        params = _whole_model(graph, settings, state)
        return _answers(context, settings, settings.watch, graph, feed.context, system_prompt, params)

    return Watch(settings.watch, context.folder, settings.steps, score, keep, last_step)


def _whole_model(graph: "Graph", settings: TuningSettings, state: "TrainState") -> Any:
    """The weights at this step, with the adapters in them where such are trained."""
    import jax

    from affinage.training.frozen import frozen_of

    if settings.lora is None:
        return state.params
    like = jax.tree.map(lambda leaf: leaf.sharding, state.frozen)
    return jax.jit(frozen_of(graph, settings).merged, out_shardings=like)(state.params, state.frozen)


def _last_step(feed: "RowFeed", steps: int, epochs: float) -> int:
    """The last step, at least 1, after which no source was seen more often than `epochs` times."""
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if max(feed.epochs(middle).values()) <= epochs else (low, middle - 1)
    return low


def _answers(
    context: StageContext,
    settings: TuningSettings,
    watch: WatchSettings,
    graph: "Graph",
    length: int,
    system_prompt: str,
    params: Any,
) -> Answers:
    from affinage.evaluation.run import evaluate

    model = model_in_training(context, settings, graph, length, system_prompt, params)
    worlds = {POCKET_WORLD: context.inputs["world"] / "tasks"} if "world" in context.inputs else {}
    with TemporaryDirectory() as folder:
        evaluate(
            model,
            watch.tasks,
            folder=Path(folder),
            task_folders=worlds,
            data_dir=watch.data_dir,
            limit=watch.items,
            draw=context.recipe.seed,
            batch=watch.batch,
        )
        return {path.stem: _right(path) for path in sorted((Path(folder) / "items").glob("*.jsonl"))}


def model_in_training(
    context: StageContext, settings: TrainSettings, graph: "Graph", length: int, system_prompt: str, params: Any
) -> "LoadedModel":
    """A model of `length` tokens of context with the weights that it has now, where they are."""
    import jax

    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.parallel import MeshLayout, serving_table
    from affinage.training.program import compute_dtype

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


def _right(path: Path) -> list[int]:
    items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    metric = next((name for name in _YES_OR_NO if name in items[0]), None)
    if metric is None:
        raise UserError(
            f"{path.stem} does not say of an item whether the answer was right",
            where="watch.tasks",
            fix=f"Watch tasks that have one of {', '.join(_YES_OR_NO)}.",
        )
    return [int(item[metric] >= 0.5) for item in sorted(items, key=lambda item: item["id"])]

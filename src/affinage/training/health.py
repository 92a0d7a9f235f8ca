"""What happens to unhealthy steps: updates that were skipped, rollbacks, and a stop with a diagnosis."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from affinage.cluster.processes import Processes
from affinage.config.training import HealthSettings
from affinage.errors import UserError
from affinage.model import ApplyConfig, Graph, apply
from affinage.results import read_json_lines
from affinage.training.metrics import finite, keep_lines
from affinage.training.state import TrainState
from affinage.training.trainer import Trainer

PyTree = Any
HEALTH = "health.jsonl"
_ROLLBACKS = 10  # of a run, after which another one does not help


class TrainingDiverged(Exception):
    """Too many updates were skipped; the run stops."""


class HealthMonitor:
    """Decides about every unhealthy step, in order. Its `facts` are part of every checkpoint.

    Every unhealthy step has a line in health.jsonl: step, cause, action, loss, spike_score, grad_norm, learning_rate.
    A run that resumes drops those after `start`, except of rollbacks. Without a folder none is written.
    """

    def __init__(
        self,
        settings: HealthSettings,
        folder: Path | None,
        start: int,
        facts: Mapping[str, Any],
        say: Callable[[str], None] = print,
    ) -> None:
        self._settings, self._say = settings, say
        self._path = None if folder is None else folder / HEALTH
        self.skipped: list[int] = list(facts.get("skipped", ()))  # steps within the window
        self.rollbacks: list[list[int]] = [list(pair) for pair in facts.get("rollbacks", ())]  # [seen at, back to]
        self.data_offset: int = facts.get("data_offset", 0)  # batches that rollbacks have left out
        self.rollback_from: int | None = None  # the run must roll back; until then later steps are ignored
        self._event: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            # A rollback was seen after the step that it went back to.
            keep_lines(
                self._path, lambda row: row["step"] <= start or [row["step"], row.get("back_to")] in self.rollbacks
            )

    def facts(self) -> dict[str, Any]:
        """What a resumed run must know, JSON-able."""
        return {name: getattr(self, name) for name in ("skipped", "rollbacks", "data_offset")}

    def batch_after(self, step: int) -> int:
        """The number of the batch that follows a step, counted from 0."""
        return step + self.data_offset

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Decide about a step whose update was skipped, or whose loss is a spike. May raise TrainingDiverged."""
        if self.rollback_from is not None:
            return
        # A loss that stands out is often one whose gradient overflows: that is no mere spike.
        is_finite = all(math.isfinite(metrics.get(name, 0.0)) for name in ("loss", "grad_norm"))
        cause = "spike" if metrics.get("spike") and is_finite else "nonfinite"
        policy, torn = getattr(self._settings, f"on_{cause}"), bool(metrics.get("torn"))
        shown = {name: metrics.get(name) for name in ("loss", "spike_score", "grad_norm", "learning_rate")}
        self._event = {"step": step, "cause": cause, **shown}
        if policy == "log" and not torn:
            self._write("logged")
            return
        self.skipped = sorted({*(s for s in self.skipped if s > step - self._settings.window), step})
        if torn or policy == "rollback":  # an update that was applied to some layers only cannot be skipped
            self.rollback_from = step
        why = ""
        if self.rollback_from is not None and len(self.rollbacks) >= _ROLLBACKS:
            why = f"the run has rolled back {_ROLLBACKS} times"
        elif len(self.skipped) >= self._settings.max_skips:
            why = f"{len(self.skipped)} updates within {self._settings.window} steps had to be skipped"
        if why:
            self._write("stopped")
            raise TrainingDiverged(f"{why}, the last at step {step}, whose loss was {self._event['loss']}")
        if self.rollback_from is None:
            self._write("skipped")

    def rolled_back(self, to: int) -> None:
        """The run is back at a checkpoint, and continues with the batch after the unhealthy one."""
        seen_at = self.rollback_from
        assert seen_at is not None
        self._say(f"step {seen_at:,} was unhealthy: back to step {to:,}, without the batches since")
        self._write("rolled back", back_to=to, left_out=seen_at - to)
        self.data_offset += seen_at - to
        self.rollbacks.append([seen_at, to])
        self.skipped = [step for step in self.skipped if step <= to]
        self.rollback_from = None

    def _write(self, action: str, **more: Any) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(self._event | {"action": action, **more})) + "\n")


def data_offset_at(training: Path, step: int) -> int:
    """How many batches a training had left out by rollbacks when it made a step; see `HealthMonitor.data_offset`."""
    total = offset = 0
    for event in read_json_lines(training / HEALTH):
        if "left_out" in event:
            total += event["left_out"]
            offset = total if event["step"] - event["left_out"] < step else offset
    return offset


def explain(trainer: Trainer, state: TrainState, error: TrainingDiverged, step: int, number: int) -> UserError:
    """The error for the user, with a diagnosis of the step and its batch of this number, also in diagnosis.json."""
    batch = trainer.put(next(trainer.batches(number)), trainer.rows)
    params = trainer.split.full_params(state.params, state.frozen)
    diagnosis = diagnose(trainer.job.graph, trainer.apply_config, params, state.ema_params, batch)
    facts, path = {"step": step, **diagnosis}, trainer.job.folder / "diagnosis.json"
    if Processes.current.first:
        path.write_text(json.dumps(finite(facts), indent=1), encoding="utf-8")
    listed = "".join(f"\n    {name}: {value}"[:305] for name, value in facts.items())
    fix = "Look at the curve of grad_norm and the documents (`affinage data lineage`). A lower schedule.peak_lr or more"
    fix += " warm-up help against divergence, health.on_spike: rollback against bad batches."
    return UserError(f"{error}{listed}", where=str(path), fix=fix)


def diagnose(
    graph: Graph, config: ApplyConfig, params: PyTree, ema_params: PyTree, batch: Mapping[str, Array]
) -> dict[str, Any]:
    """Return what is not finite in one forward and backward pass.

    `first` is the first node with something that is not finite: its weights, else its value on the way forward, else
    its gradient on the way back; "nothing" if all are finite. `gradient_norms`: {node: norm}.
    """

    def loss(params: PyTree) -> tuple[Array, dict[str, Bool[Array, ""]]]:
        outputs = apply(graph, params, batch, replace(config, key=None, ema_params=ema_params))
        total = outputs.values[graph.loss]
        return total.sum / jnp.maximum(total.count, 1.0), _all_finite(outputs.values)

    def examine(params: PyTree) -> Any:
        grads, values = jax.grad(loss, has_aux=True)(params)
        norms = {name: optax.tree.norm(tree) for name, tree in grads.items()}
        return _all_finite(params), values, norms

    weights, values, norms = jax.device_get(jax.jit(examine)(params))
    nodes = [node.name for node in graph.nodes]
    nonfinite = [f"the weights of {name}" for name in nodes if not weights.get(name, True)]
    nonfinite += [f"the value of {name}" for name in nodes if not values.get(name, True)]
    nonfinite += [f"the gradient of {name}" for name in reversed(nodes) if not math.isfinite(norms.get(name, 0.0))]
    return {"first": (*nonfinite, "nothing")[0], "gradient_norms": {name: float(norm) for name, norm in norms.items()}}


def _all_finite(trees: Mapping[str, PyTree]) -> dict[str, Bool[Array, ""]]:
    """Whether all numbers of each tree are finite, by its name."""
    arrays = {
        name: [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)] for name, tree in trees.items()
    }
    return {name: jnp.array([jnp.isfinite(leaf).all() for leaf in each]).all() for name, each in arrays.items()}

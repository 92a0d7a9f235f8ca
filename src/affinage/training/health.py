"""What happens to unhealthy steps: updates that were skipped, rollbacks, and a stop with a diagnosis."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from affinage.cluster.processes import Processes
from affinage.config.training import HealthSettings
from affinage.errors import UserError
from affinage.model import ApplyConfig, Graph, apply
from affinage.model.forward import apply_layers
from affinage.model.graph import Node
from affinage.model.layer import LayerContext, Result
from affinage.training.metrics import finite, read_lines, write_lines
from affinage.training.state import TrainState
from affinage.training.trainer import Trainer

PyTree = Any
_Flags = dict[str, list[Bool[Array, ""]]]  # by node, for each of its layers and itself: whether it is finite
FILE = "health.jsonl"
_ROLLBACKS = 10  # of a run, after which another one will not help


class TrainingDiverged(Exception):
    """Too many updates were skipped; the run stops at `step`."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(what)
        self.step = step


class HealthMonitor:
    """Decides about every unhealthy step, in order. Its `facts` are part of every checkpoint.

    Every unhealthy step has a line in health.jsonl: step, cause, action, loss, spike_score, grad_norm, learning_rate,
    and what `documents` knows of its batch.

    Attributes:
        rollback_from: the step from which the run must roll back; while it is set, later steps are ignored.
        data_offset: batches that were left out so far: step N is trained on batch N + data_offset.

    Args:
        settings: policies and limits.
        folder: of the run; None: nothing is written, as in all processes but the first.
        start: the step that it resumes from; later lines of the file are dropped, except those of rollbacks.
        facts: of the checkpoint that it resumes from; {} at the beginning.
        documents: what a batch was made of, by its number from 1.
        say: prints a line.
    """

    def __init__(
        self,
        settings: HealthSettings,
        folder: Path | None,
        start: int,
        facts: Mapping[str, Any],
        documents: Callable[[int], Any] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings, self._documents, self._say = settings, documents, say
        self._path = None if folder is None else folder / FILE
        self.skipped: list[int] = list(facts.get("skipped", ()))  # steps within the window
        self.rollbacks: list[list[int]] = [list(pair) for pair in facts.get("rollbacks", ())]  # [seen at, back to]
        self.data_offset: int = facts.get("data_offset", 0)
        self.spikes: int = facts.get("spikes", 0)
        self.rollback_from: int | None = None
        self._event: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            # A rollback was seen after the step that it went back to.
            known = {f"{seen_at} rolled back to {to}" for seen_at, to in self.rollbacks}
            events = read_lines(self._path)
            kept = (e for e in events if e["step"] <= start or f"{e['step']} {e['action']}" in known)
            write_lines(self._path, kept)

    def facts(self) -> dict[str, Any]:
        """What a resumed run must know, JSON-able."""
        names = ("skipped", "rollbacks", "data_offset", "spikes")
        return {name: getattr(self, name) for name in names}

    @property
    def last_healthy(self) -> int:
        """The newest step to roll back to."""
        assert self.rollback_from is not None
        return max(0, self.rollback_from - self._settings.rollback_batches)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Decide about a step whose update was skipped, or whose loss is a spike.

        Raises:
            TrainingDiverged: too many updates were skipped.
        """
        spike, skipped, torn = (bool(metrics.get(name)) for name in ("spike", "skipped", "torn"))
        self.spikes += spike
        if self.rollback_from is not None or not (spike or skipped):
            return
        # A loss that stands out is often one whose gradient overflows: that is no mere spike.
        is_finite = all(math.isfinite(metrics.get(name, 0.0)) for name in ("loss", "grad_norm"))
        cause = "spike" if spike and is_finite else "nonfinite"
        policy = self._settings.on_spike if cause == "spike" else self._settings.on_nonfinite
        shown = {name: metrics.get(name) for name in ("loss", "spike_score", "grad_norm", "learning_rate")}
        self._event = {"step": step, "cause": cause, **shown}
        if policy == "log" and not torn:
            self._write("logged")
            return
        self.skipped = sorted({*(s for s in self.skipped if s > step - self._settings.window), step})
        # After an update that was applied to some layers only, a rollback is the only way.
        if (torn or policy == "rollback") and len(self.rollbacks) < _ROLLBACKS:
            self.rollback_from = step
        elif torn:
            self._stop(step, f"after {_ROLLBACKS} rollbacks an update was skipped in some layers, not in others")
        self._check_limits(step)
        if self.rollback_from is None:
            if policy == "rollback":
                self._say(f"step {step:,} is skipped: the run has rolled back {_ROLLBACKS} times already")
            self._write("skipped", documents=self._batch(step))

    def rolled_back(self, to: int) -> None:
        """The run is back at a checkpoint, and continues with the batch after the unhealthy one."""
        seen_at = self.rollback_from
        assert seen_at is not None
        documents = {step: self._batch(step) for step in range(max(to, seen_at - 99) + 1, seen_at + 1)}
        self._say(f"step {seen_at:,} was unhealthy: back to step {to:,}, without the batches since")
        self._write(f"rolled back to {to}", left_out=seen_at - to, documents=documents)
        self.data_offset += seen_at - to
        self.rollbacks.append([seen_at, to])
        self.skipped = [step for step in self.skipped if step <= to]
        self.rollback_from = None

    def _check_limits(self, step: int) -> None:
        in_a_row, limits = 0, self._settings
        while step - in_a_row in self.skipped:
            in_a_row += 1
        if in_a_row >= limits.max_consecutive_skips:
            self._stop(step, f"{in_a_row} updates in a row had to be skipped")
        if len(self.skipped) >= limits.max_skips:
            self._stop(step, f"{len(self.skipped)} updates within {limits.window} steps had to be skipped")

    def _stop(self, step: int, why: str) -> NoReturn:
        self._write("stopped", documents=self._batch(step))
        event = self._event
        what = f"{event['loss']}, the norm of its gradient {event['grad_norm']}"
        if event["cause"] == "spike":
            what = f"{event['loss']:.4g}, {event['spike_score']:.1f} deviations above those before"
        raise TrainingDiverged(step, f"{why}, the last at step {step}: its loss was {what}")

    def _batch(self, step: int) -> Any:
        return None if self._documents is None else self._documents(step + self.data_offset)

    def _write(self, action: str, **more: Any) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(self._event | {"action": action, **more})) + "\n")


def data_offset_at(training: Path, step: int) -> int:
    """How many batches a training had left out by rollbacks when it made a step; see `HealthMonitor.data_offset`."""
    total = found = 0
    for event in read_lines(training / FILE):
        if "left_out" in event:
            total += event["left_out"]
            found = total if event["step"] - event["left_out"] < step else found
    return found


# ---- the diagnosis ----


def explain(trainer: Trainer, state: TrainState, error: TrainingDiverged, data_offset: int) -> UserError:
    """The error for the user, with a diagnosis of the step at which the training diverged, also in diagnosis.json."""
    job, split, config, batch_number = trainer.job, trainer.split, trainer.apply_config, error.step + data_offset
    batch = trainer.put_share(next(trainer.batches(batch_number - 1)))
    if split.reference:
        batch = jax.jit(lambda frozen, batch: split.with_reference(frozen, batch, config))(state.frozen, batch)
    params = split.full_params(state.params, state.frozen)
    found = {
        "step": error.step,
        **diagnose(job.graph, config, params, state.ema_params, batch),
        "learning_rate": trainer.learning_rate(error.step),
        "documents": None if job.documents is None else job.documents(batch_number),
    }
    path = job.folder / "diagnosis.json"
    if Processes.current.first:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    names = ("first", "learning_rate", "gradient_norms", "documents")
    listed = "".join(f"\n    {name}: {found[name]}"[:305] for name in names)
    return UserError(
        f"{error}{listed}",
        where=str(path),
        fix="Look at the documents and the curve of grad_norm before it. A lower schedule.peak_lr, more warm-up or "
        "a smaller optimizer.max_grad_norm help against divergence; health.on_spike: rollback against bad batches.",
    )


def diagnose(
    graph: Graph, config: ApplyConfig, params: PyTree, ema_params: PyTree, batch: Mapping[str, Array]
) -> dict[str, Any]:
    """Look for what is not finite in one forward and backward pass.

    Returns:
        first: in words, what is not finite first: a weight, else a value on the way forward, else a gradient on the
        way back; "nothing" if all are finite. gradient_norms: {node: norm}.
    """

    def loss(params: PyTree) -> tuple[Array, _Flags]:
        flags: _Flags = {node.name: [] for node in graph.nodes}

        def layers(node: Node, params: PyTree, x: Any, context: LayerContext) -> Result:
            result = Result(x)
            context = replace(context, prepared=node.layer.prepare((x,), context))
            for layer in range(node.layers):
                own = jax.tree.map(lambda w, at=layer: w[at : at + 1], params)
                step = apply_layers(replace(node, repeat=1), own, result.value, context, layer)
                flags[node.name].append(_finite(step.value))
                result = Result(step.value, None, {}, {})
            return result

        outputs = apply(graph, params, batch, replace(config, key=None, ema_params=ema_params, layers=layers))
        for node in graph.nodes:
            flags[node.name].append(_finite(outputs.values.get(node.name)))
        total = outputs.values[graph.loss]
        return total.sum / jnp.maximum(total.count, 1.0), flags

    def examine(params: PyTree) -> tuple[_Flags, _Flags, _Flags, dict[str, Array]]:
        grads, values = jax.grad(loss, has_aux=True)(params)
        norms = {name: optax.tree.norm(tree) for name, tree in grads.items()}
        return _flags(graph, params), values, _flags(graph, grads), norms

    weights, values, gradients, norms = jax.device_get(jax.jit(examine)(params))
    trained = [node for node in graph.nodes if node.name in norms]
    first = [f"the weights of {part}" for node in trained for part in _sick(node, weights)]
    first += [f"the value of {part}" for node in graph.nodes for part in _sick(node, values)]
    first += [f"the gradient of {part}" for node in reversed(trained) for part in reversed(_sick(node, gradients))]
    # Finite numbers may have a norm that is not.
    sick_norms = (node.name for node in reversed(trained) if not jnp.isfinite(norms[node.name]))
    first += [f"the norm of the gradient of {name}" for name in sick_norms]
    return {"first": (*first, "nothing")[0], "gradient_norms": {n.name: float(norms[n.name]) for n in trained}}


def _flags(graph: Graph, tree: PyTree) -> _Flags:
    """Whether what belongs to each node is finite; of repeated ones what belongs to each of their layers."""

    def of_layers(node: Node, own: PyTree) -> list[Bool[Array, ""]]:
        if node.repeat is None:
            return [_finite(own)]
        return [_finite(jax.tree.map(lambda leaf, at=layer: leaf[at], own)) for layer in range(node.layers)]

    return {node.name: of_layers(node, tree[node.name]) for node in graph.nodes if node.name in tree}


def _sick(node: Node, flags: _Flags) -> list[str]:
    """Those parts of a node, its layers or itself, that are not finite."""
    layers = (
        [] if node.repeat is None else [f"{node.name}, layer {n} of {node.layers}" for n in range(1, node.layers + 1)]
    )
    return [part for part, finite in zip([*layers, node.name], flags[node.name]) if not finite]


def _finite(tree: Any) -> Bool[Array, ""]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all() if floats else jnp.array(True)

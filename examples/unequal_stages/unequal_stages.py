"""Stages of unequal shape on groups of devices that may differ: compiled one by one, driven from one host.

Where a pipeline inside one program (`affinage.parallel.strategy`) needs equal stages on equal devices, here every stage
is a program of its own, on a mesh of its own. The host only dispatches: it sends micro-batch after micro-batch through
the stages and their cotangents back, and as nothing of that waits, the groups work at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from affinage.config.training import TrainSettings
from affinage.errors import UserError
from affinage.model import ApplyConfig, Graph, Loss, abstract_params, decayed, init_params, logical_axes
from affinage.model.forward import apply_part
from affinage.parallel.sharding import MeshLayout, replicated
from affinage.training.optimizer import make_optimizer
from affinage.training.state import Purpose, TrainState, random_key
from affinage.training.step import make_update

PyTree = Any
HostBatch = Mapping[str, np.ndarray]
Arrays = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Group:
    """A stage: the nodes of the graph up to `until` that no stage before it has, and the devices that compute them."""

    until: str
    mesh: Mesh


@dataclass(frozen=True, eq=False)
class _Stage:
    """A group with what it computes. `entering` and `leaving` name values of nodes."""

    names: frozenset[str]
    layout: MeshLayout
    entering: tuple[str, ...]
    leaving: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def own(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a tree of the parameters that is this stage's."""
        return {name: branch for name, branch in tree.items() if name in self.names}


class GroupedTraining:
    """The training step of a graph cut into stages, each on its own devices.

    It is the same step as `make_train_step`'s up to rounding, but for spikes of the loss, which it does not judge. A
    stage keeps the values that enter it for each micro-batch, and computes the rest again in its backward pass.

    Args:
        graph: nodes that share weights must be in one stage.
        settings: of the training; `micro_batches` of them are under way.
        groups: in the graph's order; the last one ends with the loss.
        seed: of the run.
        compute_dtype: of matrix products.

    Raises:
        UserError: where the stages do not make up the graph, the rows do not divide over a group's devices, or layers
            are to be updated one by one.
    """

    def __init__(
        self,
        graph: Graph,
        settings: TrainSettings,
        groups: Sequence[Group],
        *,
        seed: int = 0,
        compute_dtype: Any = jnp.float32,
    ):
        if settings.ema is not None:
            raise UserError("`ema` does not go with groups of devices", where="ema")
        if settings.optimizer_in_backward:
            raise UserError("`optimizer_in_backward` does not go with groups of devices", where="optimizer_in_backward")
        self.graph, self.settings, self.seed = graph, settings, seed
        self.stages = _cut(graph, groups)
        if settings.batch_size is None:
            raise UserError("groups of devices need `batch_size`, the sequences over all of them", where="batch_size")
        for stage in self.stages:
            stage.layout.check_rows(settings.batch_size, settings.gradient_accumulation_steps)
        self._calls = [
            ApplyConfig(compute_dtype=compute_dtype, platform=stage.mesh.devices.flat[0].platform, layout=stage.layout)
            for stage in self.stages
        ]
        self._optimizers = [make_optimizer(settings.optimizer, stage.own(decayed(graph))) for stage in self.stages]
        self._updates = [make_update(optimizer, settings, seed=seed) for optimizer in self._optimizers]
        stages = range(len(self.stages))
        self._forward = [jax.jit(partial(self._run, index)) for index in stages]
        self._backward = [jax.jit(partial(self._pull, index), donate_argnums=0) for index in stages]
        self._squares = jax.jit(_sum_of_squares)
        self._step = [jax.jit(partial(self._move, index), donate_argnums=0) for index in stages]

    # ---- the state ----

    def begin(self) -> list[TrainState]:
        """The states of the stages before the first step; the weights are those that `Trainer.begin` draws."""
        states = []
        dtype = jnp.dtype(self.settings.precision.params)
        key = random_key(self.seed, Purpose.INITIAL_WEIGHTS)
        for stage, optimizer in zip(self.stages, self._optimizers, strict=True):
            shardings = self._shardings(stage, dtype)
            draw = jax.jit(lambda k, own=stage.own: own(init_params(self.graph, k, dtype)), out_shardings=shardings)
            params = draw(jax.device_put(key, replicated(stage.mesh)))
            step = jax.device_put(jnp.zeros((), jnp.int32), replicated(stage.mesh))
            states.append(TrainState(step, params, jax.jit(optimizer.init)(params)))
        return states

    def params(self, states: Sequence[TrainState]) -> dict[str, Any]:
        """All weights in the host's memory, as every other part of affinage takes them."""
        joined: dict[str, Any] = {}
        for state in states:
            joined |= jax.device_get(state.params)
        return {name: joined[name] for name in abstract_params(self.graph) if name in joined}

    def _shardings(self, stage: _Stage, dtype: jnp.dtype) -> PyTree:
        abstract = stage.own(abstract_params(self.graph, dtype))
        return stage.layout.param_shardings(stage.own(logical_axes(self.graph)), abstract)

    # ---- the step ----

    def step(self, states: Sequence[TrainState], batch: HostBatch) -> tuple[list[TrainState], dict[str, Array]]:
        """One update of all stages; the metrics are those of `make_train_step`, on the last group's devices."""
        parts = self.settings.gradient_accumulation_steps
        keys = [random_key(self.seed, Purpose.DROPOUT, state.step) for state in states]
        grads: list[PyTree] = [
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32, device=p.sharding), state.params) for state in states
        ]
        under_way = []
        for part in range(parts):
            rows = {name: array[part::parts] for name, array in batch.items()}
            under_way.append(self._send_forward(states, rows, keys))
        sums: dict[str, Any] = {}
        for entered, batches, found in under_way:
            self._send_back(states, grads, entered, batches, keys, found["loss"][1])
            sums = {name: jax.tree.map(jnp.add, sums[name], new) if sums else new for name, new in found.items()}
        return self._update(states, grads, sums)

    def _send_forward(
        self, states: Sequence[TrainState], rows: HostBatch, keys: Sequence[Array]
    ) -> tuple[list[Arrays], list[Arrays], dict[str, Any]]:
        """(what enters each stage, the batch on each group, sums of the metrics on the last group) of a micro-batch."""
        values: Arrays = {}
        entered: list[Arrays] = []
        batches: list[Arrays] = []
        sums: dict[str, Any] = {}
        for index, stage in enumerate(self.stages):
            batches.append(jax.device_put(dict(rows), stage.layout.batch_sharding))
            entered.append({name: self._sent(values[name], stage) for name in stage.entering})
            leaving, losses, metrics = self._forward[index](states[index].params, entered[-1], batches[-1], keys[index])
            values |= leaving
            for name, pair in {**metrics, "extra": (losses, jnp.ones_like(losses))}.items():
                new = jax.device_put(pair, replicated(self.stages[-1].mesh))
                sums[name] = jax.tree.map(jnp.add, sums[name], new) if name in sums else new
        extra, _ = sums.pop("extra")
        total, count = sums["loss"]
        sums["loss"] = (total + extra * count, count)
        return entered, batches, sums

    def _send_back(
        self,
        states: Sequence[TrainState],
        grads: list[PyTree],
        entered: Sequence[Arrays],
        batches: Sequence[Arrays],
        keys: Sequence[Array],
        count: Array,
    ) -> None:
        """Adds a micro-batch's gradients to `grads`."""
        cotangents: Arrays = {}
        for index in reversed(range(len(self.stages))):
            stage = self.stages[index]
            outer = {name: cotangents.pop(name) for name in stage.leaving}
            here = jax.device_put(count, replicated(stage.mesh))
            grads[index], inner = self._backward[index](
                grads[index], states[index].params, entered[index], batches[index], keys[index], outer, here
            )
            for name, cotangent in inner.items():
                source = next(other for other in self.stages if name in other.names)
                sent = self._sent(cotangent, source)
                cotangents[name] = cotangents[name] + sent if name in cotangents else sent

    def _update(
        self, states: Sequence[TrainState], grads: list[PyTree], sums: dict[str, Any]
    ) -> tuple[list[TrainState], dict[str, Array]]:
        """Every stage's update, clipped by the norm over all of them."""
        last = replicated(self.stages[-1].mesh)
        total, targets = sums["loss"]
        loss = total / jnp.maximum(targets, 1.0)
        squares = sum(jax.device_put(self._squares(each), last) for each in grads)
        grad_norm = jnp.sqrt(squares) / jnp.maximum(targets, 1.0)
        new, report = [], {}
        for index, stage in enumerate(self.stages):
            shared = jax.device_put((targets, loss, grad_norm), replicated(stage.mesh))
            state, report = self._step[index](states[index], grads[index], *shared)
            new.append(state)
        means = {name: each / jnp.maximum(number, 1.0) for name, (each, number) in sums.items()}
        return new, {**means, **report, "loss_tokens": targets}

    def _sent(self, x: Array, stage: _Stage) -> Array:
        return jax.device_put(x, stage.layout.batch_sharding)

    # ---- what the groups compile ----

    def _run(self, index: int, params: PyTree, entering: Arrays, batch: Arrays, key: Array) -> tuple[Any, Array, Any]:
        """(values that leave, sum of by-losses, sums of metrics) of a stage."""
        stage, graph = self.stages[index], self.graph
        given = {**{name: batch[name] for name, _ in graph.inputs if name in batch}, **entering}
        part = apply_part(graph, stage.names, params, given, batch, replace(self._calls[index], key=key))
        metrics: dict[str, Any] = dict(part.metrics)
        if graph.loss in stage.names:
            loss: Loss = part.values[graph.loss]
            metrics["loss"] = (loss.sum, loss.count)
        return {name: part.values[name] for name in stage.leaving}, jnp.asarray(sum(part.losses, 0.0)), metrics

    def _pull(
        self,
        index: int,
        grads: PyTree,
        params: PyTree,
        entering: Arrays,
        batch: Arrays,
        key: Array,
        cotangents: Arrays,
        count: Array,
    ) -> tuple[PyTree, Arrays]:
        """(gradients with this micro-batch's added, cotangents of what entered), by computing the stage again."""
        last = self.graph.loss in self.stages[index].names

        def run(params: PyTree, entering: Arrays) -> tuple[Any, Array, Array]:
            leaving, losses, metrics = self._run(index, params, entering, batch, key)
            return leaving, losses, metrics["loss"][0] if last else jnp.zeros(())

        _, pull = jax.vjp(run, params, entering)
        found, inner = pull((cotangents, count.astype(jnp.float32), jnp.ones(()) if last else jnp.zeros(())))
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), grads, found), inner

    def _move(
        self, index: int, state: TrainState, grads: PyTree, targets: Array, loss: Array, grad_norm: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        mean = jax.tree.map(lambda g: g / jnp.maximum(targets, 1.0), grads)
        return self._updates[index](state, mean, loss, grad_norm)  # the norm over all stages, by which each is clipped


def _sum_of_squares(grads: PyTree) -> Array:
    return optax.tree.norm(grads, squared=True)


def _cut(graph: Graph, groups: Sequence[Group]) -> list[_Stage]:
    """The stages with what passes between them."""
    order = [node.name for node in graph.nodes if node.name in graph.needed_for(graph.loss)]
    ends = [group.until for group in groups]
    places = [order.index(end) if end in order else -1 for end in ends]
    if -1 in places or places != sorted(set(places)) or not ends or ends[-1] != order[-1]:
        raise UserError(
            f"stages that end with {', '.join(ends) or 'nothing'} do not make up the graph",
            where="groups",
            fix=f"Its nodes in order are {', '.join(order)}; the last stage ends with {order[-1]}.",
        )
    names = [frozenset(order[start + 1 : end + 1]) for start, end in zip([-1, *places], places, strict=False)]
    stages = []
    for index, (group, own) in enumerate(zip(groups, names, strict=True)):
        earlier = frozenset[str]().union(*names[:index])
        later = [node for node in graph.nodes if node.name in frozenset[str]().union(*names[index + 1 :])]
        entering = {name for node in graph.nodes if node.name in own for name in node.inputs if name in earlier}
        leaving = {name for node in later for name in node.inputs if name in own}
        for node in (node for node in graph.nodes if node.name in own):
            if node.layer.shares and node.layer.shares not in own:
                raise UserError(
                    f"`{node.name}` shares the weights of `{node.layer.shares}`, which is in another stage",
                    where="groups",
                    fix="Cut elsewhere, or give it weights of its own (`tied: false`).",
                )
        stages.append(_Stage(own, MeshLayout(group.mesh), tuple(sorted(entering)), tuple(sorted(leaving))))
    return stages

"""The one training step: `(state, batch) -> (state, metrics)`, pure, for training, planning and benchmarks alike."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from affinage.config.training import HealthSettings
from affinage.model import Call, Graph, apply, moved_averages
from affinage.parallel import MeshLayout
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.training.accumulation import Batch, Sums, accumulate
from affinage.training.frozen import Frozen
from affinage.training.rounding import stored_like
from affinage.training.schedule import Schedule
from affinage.training.spikes import judged
from affinage.training.state import Purpose, TrainState, random_key

PyTree = Any
Metrics = dict[str, Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Weights = tuple[PyTree, PyTree, PyTree]  # params, averages, frozen


def make_train_step(
    held: Frozen,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    *,
    call: Call,
    micro_batches: int,
    seed: int,
    stochastic_rounding: bool = True,
    health: HealthSettings | None = None,
) -> Step:
    """Build the step of a graph.

    The loss is a sum and a count over all micro-batches and devices, divided once, so the same step on any mesh and
    with any accumulation is the same step up to rounding. An update whose loss or gradient is not finite is left out:
    weights, their moving averages and optimizer state stay bit for bit, only the step is counted. So is one whose loss
    is a spike, where `health` says so.

    Args:
        held: the graph with its loss, and what of it is trained.
        optimizer: as `make_optimizer` makes it; the learning rate is not its business.
        schedule: step -> learning rate.
        call: compute dtype and how the graph is applied; its key is set here.
        micro_batches: parts that a batch goes through one after the other; divides its rows.
        seed: of the run, for dropout, augmentation and rounding.
        stochastic_rounding: of weights that are stored in bfloat16; else to the nearest.
        health: what is a spike, and what becomes of it; None: nothing is.

    Returns:
        The step. Its metrics are float32 scalars: loss (nats per counted token, or what the graph's loss is per
        example), grad_norm (before clipping), learning_rate, targets (tokens or examples that counted), skipped (0 or
        1), with a window in the state loss_z (its z-score) and spike (0 or 1), and what the graph itself reports.
    """
    graph, call = held.graph, held.call(call)
    replicas = replicas_of(graph, call) if micro_batches > 1 else 1
    if replicas > 1:
        call = dataclasses.replace(call, layout=cast(MeshLayout, call.layout).of_a_replica)

    def loss_sum(params: PyTree, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Float[Array, ""], Sums]:
        whole = held.whole(params, state.frozen)
        outputs = apply(graph, whole, batch, dataclasses.replace(call, key=key, averages=state.averages))
        loss = outputs.values[graph.loss]
        return loss.sum, {"loss": (loss.sum, loss.count), **outputs.metrics}

    def gradient(state: TrainState, batch: Batch, key: jax.Array) -> tuple[PyTree, Sums]:
        batch = held.with_reference(state.frozen, batch, call)
        grads, sums = jax.grad(loss_sum, has_aux=True)(state.params, state, batch, key)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

    update = make_update(
        graph,
        optimizer,
        schedule,
        seed=seed,
        stochastic_rounding=stochastic_rounding,
        health=health,
        weights_first=weights_come_first(call),
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = random_key(seed, Purpose.DROPOUT, state.step)
        grads, sums = accumulate(lambda part: gradient(state, part, key), batch, micro_batches, replicas)
        _, targets = sums["loss"]
        means = {name: total / jnp.maximum(count, 1.0) for name, (total, count) in sums.items()}
        # Of the sum, not of the mean: XLA would write the mean out before it has the norm.
        grad_norm = optax.tree.norm(grads) / jnp.maximum(targets, 1.0)
        grads = jax.tree.map(lambda g: g / jnp.maximum(targets, 1.0), grads)
        new, report = update(state, grads, means["loss"], grad_norm)
        return new, {**means, **report, "targets": targets}

    return step


def replicas_of(graph: Graph, call: Call) -> int:
    """Copies of the model that can each add up the gradients of their micro-batches; 1: the devices go together.

    As they must where a node's value, or what it reports, is of all rows together, and in a pipeline. So they do where
    keys go round in a ring, and with cuDNN's attention: JAX 0.10 cannot put a `jax.shard_map` over some of the axes
    into a `jax.vmap` over another, and takes cuDNN's mask for one of every head there.
    """
    layout = call.layout
    if not isinstance(layout, MeshLayout) or layout.mesh.shape[STAGES] > 1:
        return 1
    together = call.rings or call.attention == "cudnn" or any(node.kind.mixes_rows() for node in graph.nodes)
    return 1 if together else layout.replicas


def weights_come_first(call: Call) -> bool:
    """Whether the update is compiled for one CPU device; see `make_update`."""
    return call.platform == "cpu" and isinstance(call.layout, MeshLayout) and call.layout.mesh.size == 1


Update = Callable[[TrainState, PyTree, Float[Array, ""], Float[Array, ""]], tuple[TrainState, Metrics]]


def make_update(
    graph: Graph,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    *,
    seed: int,
    stochastic_rounding: bool = True,
    health: HealthSettings | None = None,
    weights_first: bool = False,
) -> Update:
    """Build the step's second half: (state, gradient of the mean loss, that loss, the gradient's norm) -> next state.

    The loss and the norm say whether the update is healthy; else everything stays but the count of steps. The metrics
    are grad_norm, learning_rate, skipped and those of the window; the arguments are those of `make_train_step`, and

    Args:
        weights_first: compute the weights before the optimizer's state. Both are written over what both are computed
            from, and XLA's CPU compiler, which sees no order between them, would copy all moments first: two thirds
            of the state. Other compilers make both at once. The numbers are the same.
    """

    def update(
        state: TrainState, grads: PyTree, loss: Float[Array, ""], grad_norm: Float[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params, norm=grad_norm)
        moved = jax.tree.map(lambda p, d: p.astype(jnp.float32) - rate * d, state.params, direction)
        rounding = random_key(seed, Purpose.ROUNDING, state.step) if stochastic_rounding else None
        params = stored_like(state.params, moved, rounding)
        averages = None if state.averages is None else moved_averages(graph, state.averages, params)
        window, sound, told = judged(state.window, loss, health)
        healthy = sound & jnp.isfinite(grad_norm)
        chosen, before, moving = _choose(healthy, params, state.params), state.opt_state, healthy
        if weights_first:
            chosen, grads, before, moving = _after(chosen, (grads, before, healthy))
            _, opt_state = optimizer.update(grads, before, state.params, norm=grad_norm)
        new = TrainState(
            state.step + 1,
            chosen,
            _choose(moving, opt_state, before),
            _choose(healthy, averages, state.averages),
            window,
            state.frozen,
        )
        skipped = 1.0 - healthy.astype(jnp.float32)
        return new, {"grad_norm": grad_norm, "learning_rate": rate, "skipped": skipped, **told}

    return update


def make_validation_step(held: Frozen, *, call: Call) -> Callable[[Weights, Batch], dict[str, Any]]:
    """Build `(weights, batch) -> {sum, count, metrics}`: nats summed over the counted tokens of a batch, their number,
    and the sums and counts of what the graph itself reports."""

    def step(weights: Weights, batch: Batch) -> dict[str, Any]:
        params, averages, frozen = weights
        batch, graph = held.with_reference(frozen, batch, call), held.graph
        whole = held.whole(params, frozen)
        outputs = apply(graph, whole, batch, dataclasses.replace(call, key=None, averages=averages))
        loss = outputs.values[graph.loss]
        # The loss may hold what only training needs, such as the balance of experts; bits per byte must not.
        nats, count = outputs.metrics.get("cross_entropy", (loss.sum, loss.count))
        return {"sum": nats, "count": count, "metrics": outputs.metrics}

    return step


def _choose(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _after(weights: PyTree, then: tuple[PyTree, PyTree, Array]) -> tuple[PyTree, PyTree, PyTree, Array]:
    """The weights and the others, of which the last, a truth value, cannot be known before all weights are."""
    grads, moments, truth = then
    weights = jax.lax.optimization_barrier(weights)
    ones = [leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(weights)]
    never = jnp.any(jnp.clip(jnp.stack(ones), 0.0, 1.0) > 1.0)  # XLA does not know
    return jax.lax.optimization_barrier((weights, grads, moments, truth | never))

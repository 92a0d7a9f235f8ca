"""The one training step: `(state, batch) -> (state, metrics)`, pure, for training, planning and benchmarks alike."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Float32, PRNGKeyArray

from affinage.config.training import EmaSettings, HealthSettings
from affinage.model import ApplyConfig, Graph, apply
from affinage.parallel import MeshLayout
from affinage.parallel.layout import REPLICAS
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.training.frozen import Frozen
from affinage.training.optimizer import Schedule
from affinage.training.spikes import detect_spike
from affinage.training.state import Purpose, TrainState, random_key

PyTree = Any
Batch = Mapping[str, Array]
Sums = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]  # name -> (sum, count)
Metrics = dict[str, Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Weights = tuple[PyTree, PyTree, PyTree]  # params, ema_params, frozen


def make_train_step(
    held: Frozen,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    *,
    config: ApplyConfig,
    micro_batches: int,
    seed: int,
    stochastic_rounding: bool = True,
    health: HealthSettings | None = None,
    ema: EmaSettings | None = None,
) -> Step:
    """Build the step of a graph.

    The loss is a sum and a count over all micro-batches and devices, divided once, so the same step on any mesh and
    with any accumulation is the same step up to rounding. An update whose loss or gradient is not finite is left out:
    weights, their moving average and optimizer state stay bit for bit, only the step is counted. So is one whose loss
    is a spike, where `health` says so.

    Args:
        held: the graph with its loss, and what of it is trained.
        optimizer: as `make_optimizer` makes it; the learning rate is not its business.
        schedule: step -> learning rate.
        config: compute dtype and how the graph is applied; its key is set here.
        micro_batches: parts that a batch goes through one after the other; divides its rows.
        seed: of the run, for dropout, augmentation and rounding.
        stochastic_rounding: of weights that are stored in bfloat16; else to the nearest.
        health: what is a spike, and what becomes of it; None: nothing is.
        ema: of the moving average of the parameters, where the state has one.

    Returns:
        The step. Its metrics are float32 scalars: loss (nats per counted token, or what the graph's loss is per
        example), grad_norm (before clipping), learning_rate, loss_tokens (tokens or examples that counted), skipped (0
        or 1), with a window in the state spike_score and spike (0 or 1), and what the graph itself reports.
    """
    graph, config = held.graph, held.apply_config(config)
    replicas = replicas_of(graph, config) if micro_batches > 1 else 1
    if replicas > 1:
        config = dataclasses.replace(config, layout=cast(MeshLayout, config.layout).of_a_replica)

    def loss_sum(params: PyTree, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Float[Array, ""], Sums]:
        whole = held.whole(params, state.frozen)
        outputs = apply(graph, whole, batch, dataclasses.replace(config, key=key, ema_params=state.ema_params))
        loss = outputs.values[graph.loss]
        return loss.sum, {"loss": (loss.sum, loss.count), **outputs.metrics}

    def gradient(state: TrainState, batch: Batch, key: jax.Array) -> tuple[PyTree, Sums]:
        batch = held.with_reference(state.frozen, batch, config)
        grads, sums = jax.grad(loss_sum, has_aux=True)(state.params, state, batch, key)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

    update = make_update(
        optimizer, schedule, seed=seed, stochastic_rounding=stochastic_rounding, health=health, ema=ema
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = random_key(seed, Purpose.DROPOUT, state.step)
        grads, sums = accumulate(lambda part: gradient(state, part, key), batch, micro_batches, replicas)
        _, loss_tokens = sums["loss"]
        means = {name: total / jnp.maximum(count, 1.0) for name, (total, count) in sums.items()}
        # Of the sum, not of the mean: XLA would write the mean out before it has the norm.
        grad_norm = optax.tree.norm(grads) / jnp.maximum(loss_tokens, 1.0)
        grads = jax.tree.map(lambda g: g / jnp.maximum(loss_tokens, 1.0), grads)
        new, report = update(state, grads, means["loss"], grad_norm)
        return new, {**means, **report, "loss_tokens": loss_tokens}

    return step


def accumulate(
    gradient: Callable[[Batch], tuple[PyTree, Sums]], batch: Batch, parts: int, replicas: int = 1
) -> tuple[PyTree, Sums]:
    """Sum `gradient` over `parts` micro-batches of equal size, one after the other.

    Micro-batch m has the rows m, m + parts, m + 2 parts, ...: each device finds its share of every micro-batch among
    the rows it already has.

    Args:
        gradient: of some rows.
        batch: arrays [B, ...].
        parts: divides B.
        replicas: equal parts of the rows, one after the other, that stand side by side along the mesh axis REPLICAS.
            Each has sums of its own until the last micro-batch, which are then summed once. Left to itself, XLA sums
            over the devices in every micro-batch, layer by layer.
    """
    if parts == 1:
        return gradient(batch)
    copies = (replicas,) if replicas > 1 else ()
    axis = len(copies) + 1
    split = {name: jnp.moveaxis(x.reshape(*copies, -1, parts, *x.shape[1:]), axis, 0) for name, x in batch.items()}
    if copies:
        gradient = jax.vmap(gradient, spmd_axis_name=REPLICAS)
    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total: tuple[PyTree, Sums], part: Batch) -> tuple[tuple[PyTree, Sums], None]:
        return jax.tree.map(jnp.add, total, gradient(part)), None

    total = jax.lax.scan(add, zeros, split)[0]
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), total) if copies else total


def replicas_of(graph: Graph, config: ApplyConfig) -> int:
    """Copies of the model that can each add up the gradients of their micro-batches; 1: the devices go together.

    They must where a node's value, or what it reports, is of all rows together, in a pipeline, and where keys go around
    in a ring: JAX 0.10 cannot put a `jax.shard_map` over some of the axes into a `jax.vmap` over another.
    """
    layout = config.layout
    if not isinstance(layout, MeshLayout) or layout.mesh.shape[STAGES] > 1:
        return 1
    together = config.rings or any(node.layer.mixes_rows() for node in graph.nodes)
    return 1 if together else layout.replicas


Update = Callable[[TrainState, PyTree, Float[Array, ""], Float[Array, ""]], tuple[TrainState, Metrics]]


def make_update(
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    *,
    seed: int,
    stochastic_rounding: bool = True,
    health: HealthSettings | None = None,
    ema: EmaSettings | None = None,
) -> Update:
    """Build the step's second half: (state, gradient of the mean loss, that loss, the gradient's norm) -> next state.

    The loss and the norm say whether the update is healthy; else everything stays but the count of steps. The metrics
    are grad_norm, learning_rate, skipped and those of the window; the arguments are those of `make_train_step`.
    """

    def update(
        state: TrainState, grads: PyTree, loss: Float[Array, ""], grad_norm: Float[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params, norm=grad_norm)
        moved = jax.tree.map(lambda p, d: p.astype(jnp.float32) - rate * d, state.params, direction)
        rounding = random_key(seed, Purpose.ROUNDING, state.step) if stochastic_rounding else None
        params = stored_like(state.params, moved, rounding)
        averaged = None
        if ema is not None and state.ema_params is not None:
            averaged = jax.tree.map(
                lambda a, p: ema.decay * a + (1 - ema.decay) * p.astype(jnp.float32), state.ema_params, params
            )
        window, may_update, spike = detect_spike(state.window, loss, health)
        healthy = may_update & jnp.isfinite(grad_norm)
        old, new = (state.params, state.opt_state, state.ema_params), (params, opt_state, averaged)
        kept, kept_opt, kept_average = jax.tree.map(lambda n, o: jnp.where(healthy, n, o), new, old)
        skipped = 1.0 - healthy.astype(jnp.float32)
        metrics = {"grad_norm": grad_norm, "learning_rate": rate, "skipped": skipped, **spike}
        return TrainState(state.step + 1, kept, kept_opt, kept_average, window, state.frozen), metrics

    return update


def make_validation_step(held: Frozen, *, config: ApplyConfig) -> Callable[[Weights, Batch], dict[str, Any]]:
    """Build `(weights, batch) -> {sum, count, metrics}`: nats summed over the counted tokens of a batch, their number,
    and the sums and counts of what the graph itself reports."""

    def step(weights: Weights, batch: Batch) -> dict[str, Any]:
        params, ema_params, frozen = weights
        batch, graph = held.with_reference(frozen, batch, config), held.graph
        whole = held.whole(params, frozen)
        outputs = apply(graph, whole, batch, dataclasses.replace(config, key=None, ema_params=ema_params))
        loss = outputs.values[graph.loss]
        # The loss may hold what only training needs, such as the balance of experts; bits per byte must not.
        nats, count = outputs.metrics.get("cross_entropy", (loss.sum, loss.count))
        return {"sum": nats, "count": count, "metrics": outputs.metrics}

    return step


def stored_like(old: PyTree, new: PyTree, key: PRNGKeyArray | None) -> PyTree:
    """`new` in the dtypes of `old`; what becomes bfloat16 is rounded stochastically if there is a key.

    Args:
        old: tree of arrays, for their dtypes.
        new: the same tree in float32.
        key: of this step; each array has draws of its own. None: to the nearest, ties to even.
    """
    leaves, structure = jax.tree.flatten(old)
    rounded = []
    for index, (before, after) in enumerate(zip(leaves, jax.tree.leaves(new), strict=True)):
        if key is not None and before.dtype == jnp.bfloat16:
            rounded.append(stochastic_bfloat16(after, jax.random.fold_in(key, index)))
        else:
            rounded.append(after.astype(before.dtype))
    return jax.tree.unflatten(structure, rounded)


def stochastic_bfloat16(x: Float32[Array, "..."], key: PRNGKeyArray) -> BFloat16[Array, "..."]:
    """One of the two bfloat16 neighbours of each value, each as probable as the value is near to it.

    The expectation is the value itself, so that updates under half a unit in the last place are not lost. bfloat16 is
    the upper half of a float32: a uniform 16-bit integer is added to the lower half, which is then cut off. What is not
    finite stays as it is.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))

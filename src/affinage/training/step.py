"""The one training step: `(state, batch) -> (state, metrics)`, pure, for training, planning and benchmarks alike."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Bool, Float, Float32, PRNGKeyArray

from affinage.config.training import HealthSettings, TrainSettings
from affinage.model import ApplyConfig, Graph, apply, decayed
from affinage.parallel.sharding import REPLICAS, STAGES, MeshLayout
from affinage.training.optimizer import clipped, learning_rate, make_optimizer
from affinage.training.state import LossWindow, ParamSplit, Purpose, TrainState, random_key

PyTree = Any
Batch = Mapping[str, Array]
Sums = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]  # name -> (sum, count)
Metrics = dict[str, Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Update = Callable[[TrainState, PyTree, Float[Array, ""], Float[Array, ""]], tuple[TrainState, Metrics]]

_SPIKE_DEVIATIONS = 6.0  # robust standard deviations above the median


def make_train_step(split: ParamSplit, settings: TrainSettings, *, config: ApplyConfig, seed: int) -> Step:
    """Build the step of a graph.

    The loss is a sum and a count over all micro-batches and devices, divided once, so the same step on any mesh and
    with any accumulation is the same step up to rounding. An update whose loss or gradient is not finite is left out:
    weights, their average and optimizer state stay, only the step is counted. `settings.health` can add spikes.

    Its metrics are float32 scalars: loss (nats per counted token, or what the graph's loss is per example), grad_norm
    (before clipping), learning_rate, loss_tokens (tokens or examples that counted), skipped (0 or 1), with a window in
    the state spike_score and spike (0 or 1), and what the graph itself reports. The key of `config` is set here; `seed`
    is for dropout, augmentation and rounding.
    """
    graph, parts = split.graph, settings.gradient_accumulation_steps
    replicas = replicas_of(graph, config) if parts > 1 else 1
    if replicas > 1:
        config = dataclasses.replace(config, layout=cast(MeshLayout, config.layout).without(REPLICAS))

    update = make_update(make_optimizer(settings.optimizer, decayed(split.trainable)), settings, seed=seed)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = random_key(seed, Purpose.DROPOUT, state.step)
        with_key = dataclasses.replace(config, key=key, ema_params=state.ema_params)

        def loss_sum(params: PyTree, part: Batch) -> tuple[Float[Array, ""], Sums]:
            outputs = apply(graph, split.full_params(params, state.frozen), part, with_key)
            loss = outputs.values[graph.loss]
            return loss.sum, {"loss": (loss.sum, loss.count), **outputs.metrics}

        def gradient(part: Batch) -> tuple[PyTree, Sums]:
            grads, sums = jax.grad(loss_sum, has_aux=True)(state.params, part)
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

        grads, sums = accumulate(gradient, batch, parts, replicas)
        loss_tokens, means = sums["loss"][1], means_of(sums)
        # Of the sum, not of the mean: XLA would write the mean out before it has the norm.
        grad_norm = optax.tree.norm(grads) / jnp.maximum(loss_tokens, 1.0)
        grads = jax.tree.map(lambda g: g / jnp.maximum(loss_tokens, 1.0), grads)
        new, report = update(state, grads, means["loss"], grad_norm)
        return new, {**means, **report, "loss_tokens": loss_tokens}

    return step


def means_of(sums: Sums) -> Metrics:
    """The mean of each metric of a batch."""
    return {name: total / jnp.maximum(count, 1.0) for name, (total, count) in sums.items()}


def accumulate(
    gradient: Callable[[Batch], tuple[PyTree, Sums]], batch: Batch, parts: int, replicas: int = 1
) -> tuple[PyTree, Sums]:
    """Sum `gradient` over `parts` micro-batches of equal size, one after the other.

    Micro-batch m of a batch of arrays [B, ...] has the rows m, m + parts, m + 2 parts, ...: each device finds its share
    of every micro-batch among the rows it already has. `replicas` are equal parts of the rows, one after the other,
    that stand side by side along the mesh axis REPLICAS. Each has sums of its own until the last micro-batch, which are
    then summed once. Left to itself, XLA sums over the devices in every micro-batch, layer by layer.
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

    They must in a pipeline, and if a node's value, or what it reports, is of all rows together.
    """
    layout = config.layout
    if not isinstance(layout, MeshLayout) or layout.mesh.shape[STAGES] > 1:
        return 1
    together = any(node.layer.mixes_rows() for node in graph.nodes)
    return 1 if together else layout.replicas


# ---- from a gradient to the next state ----


def make_update(optimizer: optax.GradientTransformation, settings: TrainSettings, *, seed: int) -> Update:
    """Build the step's second half: (state, gradient of the mean loss, that loss, the gradient's norm) -> next state.

    The loss and the norm decide whether the update is healthy; otherwise everything stays but the count of steps. The
    metrics are grad_norm, learning_rate, skipped and those of the window.
    """
    schedule = learning_rate(settings.schedule, settings.steps)

    def update(
        state: TrainState, grads: PyTree, loss: Float[Array, ""], grad_norm: Float[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        window, may_update, spike = detect_spike(state.window, loss, settings.health)
        healthy, rate = may_update & jnp.isfinite(grad_norm), jnp.asarray(schedule(state.step), jnp.float32)
        old, key = (state.params, state.opt_state, state.ema_params), random_key(seed, Purpose.ROUNDING, state.step)
        params, opt_state = apply_gradient(optimizer, settings, old[:2], grads, grad_norm, rate, key)
        new = (params, opt_state, moved_ema(state.ema_params, params, settings))
        metrics = {"grad_norm": grad_norm, "learning_rate": rate, "skipped": 1.0 - healthy.astype(jnp.float32), **spike}
        params, opt_state, ema_params = where(healthy, new, old)
        return TrainState(state.step + 1, params, opt_state, ema_params, window, state.frozen), metrics

    return update


def apply_gradient(
    optimizer: optax.GradientTransformation,
    settings: TrainSettings,
    old: tuple[PyTree, PyTree],
    grads: PyTree,
    norm: Float[Array, ""],
    rate: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree]:
    """(weights, optimizer state) after an update by a gradient of this norm; `old` are those before, `key` rounds."""
    params, opt_state = old
    grads = clipped(grads, norm, settings.optimizer.max_grad_norm)
    direction, opt_state = optimizer.update(grads, opt_state, params)
    moved = jax.tree.map(lambda p, d: p.astype(jnp.float32) - rate * d, params, direction)
    return stored_like(params, moved, key), opt_state


def where(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> Any:
    """The new tree where the condition holds, otherwise the old one."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def moved_ema(ema_params: PyTree, params: PyTree, settings: TrainSettings) -> PyTree:
    """The moving average of the weights one step on; None without `ema`."""
    if settings.ema is None:
        return None
    decay = settings.ema.decay
    return jax.tree.map(lambda e, p: decay * e + (1.0 - decay) * p.astype(jnp.float32), ema_params, params)


def detect_spike(
    window: LossWindow | None, loss: Float[Array, ""], health: HealthSettings
) -> tuple[LossWindow | None, Bool[Array, ""], dict[str, Float[Array, ""]]]:
    """The window one step on, whether weights may be updated by this loss, and metrics.

    With a window the metrics are spike_score (see `LossWindow.score`; 0 for what is not finite) and spike (0 or 1).
    """
    finite = jnp.isfinite(loss)
    if window is None:
        return window, finite, {}
    score = jnp.where(finite, window.score(loss), 0.0)
    spike = finite & (score > _SPIKE_DEVIATIONS)
    metrics = {"spike_score": score, "spike": spike.astype(jnp.float32)}
    return window.with_loss(loss), finite if health.on_spike == "log" else finite & ~spike, metrics


def make_validation_step(split: ParamSplit, *, config: ApplyConfig) -> Callable[[PyTree, Batch], dict[str, Any]]:
    """Build `((params, ema_params, frozen), batch) -> {sum, count, metrics}`: nats summed over the counted tokens of a
    batch, their number, and the sums and counts of what the graph itself reports."""

    def step(weights: PyTree, batch: Batch) -> dict[str, Any]:
        params, ema_params, frozen = weights
        without_key = dataclasses.replace(config, key=None, ema_params=ema_params)
        outputs = apply(split.graph, split.full_params(params, frozen), batch, without_key)
        loss = outputs.values[split.graph.loss]
        # The loss may hold what only training needs, such as the balance of experts; bits per byte must not.
        nats, count = outputs.metrics.get("cross_entropy", (loss.sum, loss.count))
        return {"sum": nats, "count": count, "metrics": outputs.metrics}

    return step


def stored_like(old: PyTree, new: PyTree, key: PRNGKeyArray) -> PyTree:
    """`new`, a tree in float32, in the dtypes of `old`; bfloat16 is rounded stochastically."""
    leaves, structure = jax.tree.flatten(old)
    rounded = []
    for index, (before, after) in enumerate(zip(leaves, jax.tree.leaves(new), strict=True)):
        if before.dtype == jnp.bfloat16:
            rounded.append(stochastic_bfloat16(after, jax.random.fold_in(key, index)))
        else:
            rounded.append(after.astype(before.dtype))
    return jax.tree.unflatten(structure, rounded)


def stochastic_bfloat16(x: Float32[Array, "..."], key: PRNGKeyArray) -> BFloat16[Array, "..."]:
    """One of the two bfloat16 neighbors of each value, each as probable as the value is near to it.

    The expectation is the value itself, so that updates under half a unit in the last place are not lost. bfloat16 is
    the upper half of a float32: a uniform 16-bit integer is added to the lower half, which is then cut off, if finite.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))

"""Optimizers and learning rates, by the names that recipes give them; the mathematics is Optax's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.config.settings import Settings
from affinage.config.training import OptimizerSettings, ScheduleSettings, TrainSettings
from affinage.registry import Locate, Registry, build

PyTree = Any
Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


class Optimizer(Settings):
    """Base of all optimizers: the fields are what a recipe may put into `optimizer.settings`."""

    def direction(self, settings: OptimizerSettings) -> optax.GradientTransformation:
        """Clipped float32 gradient -> direction; the weights then move by minus the learning rate times it."""
        raise NotImplementedError


OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer")
optimizer = OPTIMIZERS.register  # decorator of an Optimizer, with the name that recipes call it by


@optimizer("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def direction(self, settings: OptimizerSettings) -> optax.GradientTransformation:
        return optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)


def make_optimizer(settings: OptimizerSettings, decayed: PyTree) -> optax.GradientTransformation:
    """Clipped gradient of the mean loss -> direction; the weights then move by minus the learning rate times it.

    The learning rate stays outside, because it follows the step of the run and not the number of updates that were
    applied. Moments and decay are computed in float32, whatever dtype weights and moments are stored in. `decayed` is a
    tree like the parameters, True where weight decay applies. UserError: there is no such optimizer or setting of it.
    """
    chosen = build(OPTIMIZERS, settings.name, settings.settings)
    return optax.chain(
        _stored_in(jnp.dtype(settings.state_dtype), chosen.direction(settings)),
        # A Python number would be multiplied in the weights' own dtype.
        optax.add_decayed_weights(np.float32(settings.weight_decay), decayed),
    )


def clipped(grads: PyTree, norm: Float[Array, ""], max_norm: float | None) -> PyTree:
    """The gradient, scaled down to a global norm of `max_norm` where its own is larger; None: as it is.

    `optax.clip_by_global_norm` selects one of two gradients in every place: XLA keeps both until the update ends. A
    product with one number goes into whatever reads the gradient.
    """
    if max_norm is None:
        return grads
    scale = jnp.where(norm < max_norm, 1.0, max_norm / norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def map_like_params(
    function: Callable[[Any, Any], Any], state: PyTree, params: PyTree, others: Callable[[Any], Any]
) -> PyTree:
    """Map the arrays of an optimizer's state by `function`, which also gets the parameter that an array stands for.

    It is the one with the same path at the end and shape; `others` takes every other array, such as counts.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def map_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        for start in range(len(path)):
            param = by_path.get(path[start:])
            if param is not None and param.shape == leaf.shape:
                return function(leaf, param)
        return others(leaf)

    return jax.tree_util.tree_map_with_path(map_leaf, state)


def _stored_in(dtype: jnp.dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, computed in float32, with its moments kept in `dtype` between steps.

    A bfloat16 moment follows its average while a step moves it by more than 2^-9 of its value: for b2 up to about 0.99.
    """

    def cast(state: PyTree, params: PyTree, to: Any) -> PyTree:
        return map_like_params(lambda leaf, _: leaf.astype(to), state, params, others=lambda leaf: leaf)

    def init(params: PyTree) -> PyTree:
        return cast(inner.init(optax.tree.cast(params, jnp.float32)), params, dtype)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        grads, params = (optax.tree.cast(tree, jnp.float32) for tree in (grads, params))
        updates, state = inner.update(grads, cast(state, grads, jnp.float32), params)
        return updates, cast(state, grads, dtype)

    return optax.GradientTransformation(init, update)


# ---- learning rates ----


class Shape(Settings):
    """Base of all schedules: the fields are what a recipe may put into `schedule.settings`."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        """The learning rate from the end of the warm-up on.

        `steps` counts the updates after the one at the peak, at least 1; the last of them is the run's last.
        """
        raise NotImplementedError


SCHEDULES: Registry[type[Shape]] = Registry("schedule")
schedule = SCHEDULES.register  # decorator of a Shape, with the name that recipes call it by


@schedule("constant")
class Constant(Shape):
    """The peak for good."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        return optax.constant_schedule(settings.peak_lr)


@schedule("cosine")
class Cosine(Shape):
    """A cosine down to the floor (SGDR without restarts, Loshchilov and Hutter, 2017)."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        return optax.cosine_decay_schedule(settings.peak_lr, steps, alpha=settings.min_lr / settings.peak_lr)


@schedule("linear")
class Linear(Shape):
    """A straight line down to the floor."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        return optax.linear_schedule(settings.peak_lr, settings.min_lr, steps)


@schedule("wsd")
class WarmupStableDecay(Shape):
    """The peak until the last `decay_ratio` of the run, then down to the floor (Hu et al., 2024, arXiv:2404.06395).

    The way down is 1 - sqrt, which Hägele et al. (2024, arXiv:2405.18392) found better than a straight line.
    """

    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Of the steps after the warm-up."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        decay = max(round(steps * self.decay_ratio), 1)

        def down(step: Int[Array, ""]) -> Float[Array, ""]:
            return settings.peak_lr + (settings.min_lr - settings.peak_lr) * (step / decay).clip(0, 1) ** 0.5

        return optax.join_schedules([optax.constant_schedule(settings.peak_lr), down], [steps - decay])


def learning_rate(settings: ScheduleSettings, steps: int) -> Schedule:
    """The learning rate of the update that is number `step`, counted from 0.

    Linear from peak / w at step 0 up to the peak at step w - 1 of a warm-up of w steps, then the schedule
    `settings.name`. Raises UserError for an unknown schedule or setting of it.
    """
    warmup_steps = settings.warmup(steps)
    shape = build(SCHEDULES, settings.name, settings.settings)
    # One update is at the peak (the last of the warm-up, or step 0), and the last one is at the floor.
    after = shape.after_warmup(settings, max(steps - max(warmup_steps, 1), 1))
    if warmup_steps <= 1:
        return after
    warmup = optax.linear_schedule(settings.peak_lr / warmup_steps, settings.peak_lr, warmup_steps - 1)
    return optax.join_schedules([warmup, after], [warmup_steps - 1])


def check_choices(settings: TrainSettings, locate: Locate) -> None:
    """Raise UserError unless the optimizer and the schedule, and their own settings, are known.

    `locate` maps keys of the training's section, such as ("optimizer", "name"), to where they were written.
    """
    optimizer, schedule = settings.optimizer, settings.schedule
    build(OPTIMIZERS, optimizer.name, optimizer.settings, lambda path: locate(("optimizer", *path)))
    build(SCHEDULES, schedule.name, schedule.settings, lambda path: locate(("schedule", *path)))

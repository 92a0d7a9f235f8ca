"""The learning rate as a function of the step."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.config.settings import Settings
from affinage.config.training import ScheduleSettings
from affinage.registry import Registry, build

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


class Shape(Settings):
    """Base of all schedules: the fields are what a recipe may put into `schedule.settings`."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        """The learning rate from the end of the warm-up on.

        Args:
            settings: of the recipe.
            steps: updates after the one at the peak, at least 1; the last of them is the run's last.
        """
        raise NotImplementedError


SCHEDULES: Registry[type[Shape]] = Registry("schedule")

T = TypeVar("T", bound=type[Shape])


def schedule(name: str) -> Callable[[T], T]:
    """Registers a Shape under the name that recipes call it by; a taken name is refused."""
    return SCHEDULES.register(name)


@schedule("constant")
class Constant(Shape):
    """The peak for good."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        """See `Shape.after_warmup`."""
        return optax.constant_schedule(settings.peak_lr)


@schedule("cosine")
class Cosine(Shape):
    """A cosine down to the floor (SGDR without restarts, Loshchilov and Hutter, 2017)."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        """See `Shape.after_warmup`."""
        return optax.cosine_decay_schedule(settings.peak_lr, steps, alpha=settings.min_lr / settings.peak_lr)


@schedule("linear")
class Linear(Shape):
    """A straight line down to the floor."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        """See `Shape.after_warmup`."""
        return optax.linear_schedule(settings.peak_lr, settings.min_lr, steps)


@schedule("wsd")
class WarmupStableDecay(Shape):
    """The peak until the last `decay_ratio` of the run, then down to the floor (Hu et al., 2024, arXiv:2404.06395).

    The 1 - sqrt form is that of Hägele et al. (2024, arXiv:2405.18392), who found it the better one.
    """

    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Of the steps after the warm-up."""
    linear: bool = False
    """A straight line in place of 1 - sqrt."""

    def after_warmup(self, settings: ScheduleSettings, steps: int) -> Schedule:
        """See `Shape.after_warmup`."""
        decay = max(round(steps * self.decay_ratio), 1)
        power = 1.0 if self.linear else 0.5

        def down(step: Int[Array, ""]) -> Float[Array, ""]:
            progress = (step / decay).clip(0, 1) ** power
            return settings.peak_lr + (settings.min_lr - settings.peak_lr) * progress

        return optax.join_schedules([optax.constant_schedule(settings.peak_lr), down], [steps - decay])


def learning_rate(settings: ScheduleSettings, steps: int) -> Schedule:
    """The learning rate of the update that is number `step`, counted from 0.

    Linear from peak / w at step 0 up to the peak at step w - 1 of a warm-up of w steps, then as `settings.name` says.
    With `from_step` it is all that of the steps from there on.

    Raises:
        UserError: a schedule or a setting of it that nobody knows.
    """
    if settings.from_step:
        tail = learning_rate(settings.model_copy(update={"from_step": 0}), steps - settings.from_step)
        return lambda step: tail(jnp.maximum(step - settings.from_step, 0))
    warmup_steps = settings.warmup(steps)
    shape = build(SCHEDULES, settings.name, settings.settings)
    # One update is at the peak (the last of the warm-up, or step 0), and the last one is at the floor.
    after = shape.after_warmup(settings, max(steps - max(warmup_steps, 1), 1))
    if warmup_steps <= 1:
        return after
    first = settings.peak_lr / warmup_steps
    warmup = optax.linear_schedule(first, settings.peak_lr, warmup_steps - 1)
    return optax.join_schedules([warmup, after], [warmup_steps - 1])

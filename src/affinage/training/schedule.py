"""The learning rate as a function of the step."""

from collections.abc import Callable

import optax
from jaxtyping import Array, Float, Int

from affinage.recipe.training import ScheduleSettings

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def learning_rate(settings: ScheduleSettings, steps: int) -> Schedule:
    """The learning rate of the update that is number `step`, counted from 0.

    Linear from peak / w at step 0 up to the peak at step w - 1 of a warm-up of w steps; then the peak for good, or a
    cosine down to the floor, which the last step has (SGDR without restarts, Loshchilov and Hutter, 2017).
    """
    warmup_steps = settings.warmup(steps)
    if settings.name == "constant":
        after = optax.constant_schedule(settings.peak)
    else:
        # One update is at the peak (the last of the warm-up, or step 0), and the last one is at the floor.
        decay_steps = max(steps - max(warmup_steps, 1), 1)
        after = optax.cosine_decay_schedule(settings.peak, decay_steps, alpha=settings.floor / settings.peak)
    if warmup_steps <= 1:
        return after
    first = settings.peak / warmup_steps
    warmup = optax.linear_schedule(first, settings.peak, warmup_steps - 1)
    return optax.join_schedules([warmup, after], [warmup_steps - 1])

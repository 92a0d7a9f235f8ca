"""Losses that stand out, told on the devices: a robust z-score over the losses before."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from affinage.recipe.training import HealthSettings

_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST = 16  # losses that tell what is usual; of 16 the deviation is known to a third, of 64 to a sixth
_SMALLEST_SPREAD = 0.002  # of the median: below it a loss is as good as constant, and rounding would stand out
_SPREAD_OF_FEW = 0.25  # of the median: taken for usual where few losses tell; six of it are 2.5 times the median


class LossWindow(NamedTuple):
    """The last finite losses, in a ring. Part of the training state, so that a resumed run judges as it would have.

    Attributes:
        losses: as many as the window holds; those not yet seen are NaN.
        seen: finite losses since the beginning.
    """

    losses: Float[Array, " W"]
    seen: Int[Array, ""]

    @staticmethod
    def empty(size: int) -> "LossWindow":
        """Before the first step."""
        return LossWindow(jnp.full(size, jnp.nan, jnp.float32), jnp.zeros((), jnp.int32))

    def score(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """By how many standard deviations a loss is above the median of those before; 0 for the first loss.

        The deviation is 1.4826 times the median absolute deviation, which half of the losses can be outliers without
        moving (Leys et al., 2013, J. Exp. Soc. Psych. 49), and at least 0.2 % of the median; a quarter of it after less
        than 16 losses (of a window that holds less than 32: until it is half full).
        """
        median = jnp.nanmedian(self.losses)
        spread = _NORMAL * jnp.nanmedian(jnp.abs(self.losses - median))
        few = self.seen < min(_LEAST, self.losses.size // 2)
        least = jnp.where(few, _SPREAD_OF_FEW, _SMALLEST_SPREAD) * jnp.abs(median)
        score = (loss - median) / jnp.maximum(spread, jnp.maximum(least, 1e-12))
        return jnp.where(self.seen > 0, score, 0.0)

    def with_loss(self, loss: Float[Array, ""]) -> "LossWindow":
        """The window one step on. Spikes go in, so that it gets used to a new level; what is not finite does not."""
        finite = jnp.isfinite(loss)
        at = self.seen % self.losses.size
        losses = self.losses.at[at].set(jnp.where(finite, loss, self.losses[at]))
        return LossWindow(losses, self.seen + finite.astype(jnp.int32))


def judged(
    window: LossWindow | None, loss: Float[Array, ""], health: HealthSettings | None
) -> tuple[LossWindow | None, Bool[Array, ""], dict[str, Float[Array, ""]]]:
    """The window one step on, whether weights may be updated by this loss, and what metrics say of it.

    With a window these are loss_z (the score, 0 for what is not finite) and spike (0 or 1).
    """
    sound = jnp.isfinite(loss)
    if window is None or health is None:
        return window, sound, {}
    score = window.score(loss)
    spike = sound & (score > health.spike_deviations)
    told = {"loss_z": jnp.where(jnp.isfinite(score), score, 0.0), "spike": spike.astype(jnp.float32)}
    return window.with_loss(loss), sound if health.on_spike == "note" else sound & ~spike, told

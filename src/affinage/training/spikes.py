"""Losses that stand out, told on the devices: robust z-scores over the losses before."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from affinage.config.training import HealthSettings

_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST = 16  # losses that tell what is usual; of 16 the deviation is known to a third, of 64 to a sixth
_SMALLEST_SPREAD = 0.002  # of the median: below it a loss is as good as constant, and rounding would stand out
_SPREAD_OF_FEW = 0.25  # of the median: taken for usual where few losses tell; six of it are 2.5 times the median

_LEVEL = 8  # losses whose median is where a fall has come to; three of them may be spikes
_STEPS = 32  # differences of neighbours that tell the noise around a fall; three of the losses may be spikes
_QUARTER = 1.1503  # standard deviations of a normal distribution, of either sign, that a quarter is beyond
# While a model begins to learn its noise grows, up to twofold within these steps: with less than this factor and this
# share of the level, clean starts have spikes.
_GROWTH = 1.75
_SMALLEST_NOISE = 0.03


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
        """By how many standard deviations a loss is above those before: above their median, or, from eight losses on,
        above where a fall has come to, whichever is more; 0 for the first loss."""
        above = self.above_median(loss)
        score = jnp.where(self.seen < _LEVEL, above, jnp.maximum(above, self.above_fall(loss)))
        return jnp.where(self.seen > 0, score, 0.0)

    def above_median(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """By how many deviations of the window it is above the median of it.

        The deviation is 1.4826 times the median absolute deviation, which half of the losses can be outliers without
        moving (Leys et al., 2013, J. Exp. Soc. Psych. 49), and at least 0.2 % of the median; a quarter of it after less
        than 16 losses (of a window that holds less than 32: until it is half full).
        """
        median = _upper(self.losses, 0.5)
        spread = _NORMAL * _upper(jnp.abs(self.losses - median), 0.5)
        few = self.seen < min(_LEAST, self.losses.size // 2)
        least = jnp.where(few, _SPREAD_OF_FEW, _SMALLEST_SPREAD) * jnp.abs(median)
        return (loss - median) / jnp.maximum(spread, jnp.maximum(least, 1e-12))

    def above_fall(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """By how many deviations of the noise around the trend it is above the median of the last eight losses.

        While losses fall, the deviation of the window is that of the fall. A trend adds the same to every difference of
        neighbours (von Neumann et al., 1941, Ann. Math. Stat. 12). So the noise is how far the last 32 differences are
        from their median, by the upper quartile, which is known better than the middle and bears seven outliers; over
        the root of 2, as there are two losses in each. Taken are 1.75 of it, and at least 3 % of the median. The fall
        is not carried on to the next loss: where one ends, clean losses stood out.
        """
        held = min(_STEPS + 1, self.losses.size)
        last = self.losses[(self.seen - held + jnp.arange(held)) % self.losses.size]
        level, steps = _upper(last[-_LEVEL:], 0.5), jnp.diff(last)
        noise = _upper(jnp.abs(steps - _upper(steps, 0.5)), 0.25) / (_QUARTER * math.sqrt(2))
        return (loss - level) / jnp.maximum(_GROWTH * noise, jnp.maximum(_SMALLEST_NOISE * jnp.abs(level), 1e-12))

    def with_loss(self, loss: Float[Array, ""]) -> "LossWindow":
        """The window one step on. Spikes go in, so that it gets used to a new level; what is not finite does not."""
        finite = jnp.isfinite(loss)
        at = self.seen % self.losses.size
        losses = self.losses.at[at].set(jnp.where(finite, loss, self.losses[at]))
        return LossWindow(losses, self.seen + finite.astype(jnp.int32))


def _upper(values: Float[Array, " N"], share: float) -> Float[Array, ""]:
    """The quantile that this share of the values is above, NaN left out, as numpy's `nanquantile` interpolates.

    `top_k` costs a fifth of the sort that a median takes on CPUs.
    """
    known = ~jnp.isnan(values)
    at = share * (known.sum() - 1).astype(jnp.float32)
    largest, _ = jax.lax.top_k(jnp.where(known, values, -jnp.inf), math.ceil(share * (values.size - 1)) + 1)
    low, high = jnp.floor(at), jnp.ceil(at)
    return largest[low.astype(jnp.int32)] * (1 - (at - low)) + largest[high.astype(jnp.int32)] * (at - low)


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
    return window.with_loss(loss), sound if health.on_spike == "log" else sound & ~spike, told

"""Losses that stand out from those before, found on the devices."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from affinage.config.training import HealthSettings

_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST = 16  # losses without which nothing stands out: of 16 the deviation is known to a third, of 64 to a sixth
_SMALLEST_SPREAD = 0.002  # of the median: below it a loss is as good as constant, and rounding would stand out


class LossWindow(NamedTuple):
    """The last finite losses, in a ring. Part of the training state, so that a resumed run decides alike.

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
        """By how many robust standard deviations a loss is above the median of the window; 0 before 16 losses.

        The deviation is 1.4826 times the median absolute deviation, which half of the losses can be outliers without
        moving (Leys et al., 2013, J. Exp. Soc. Psych. 49), and at least 0.2 % of the median.
        """
        median = jnp.nanmedian(self.losses)
        spread = _NORMAL * jnp.nanmedian(jnp.abs(self.losses - median))
        score = (loss - median) / jnp.maximum(spread, jnp.maximum(_SMALLEST_SPREAD * jnp.abs(median), 1e-12))
        return jnp.where(self.seen >= min(_LEAST, self.losses.size), score, 0.0)

    def with_loss(self, loss: Float[Array, ""]) -> "LossWindow":
        """The window one step on. Spikes go in, so that it gets used to a new level; what is not finite does not."""
        finite = jnp.isfinite(loss)
        at = self.seen % self.losses.size
        losses = self.losses.at[at].set(jnp.where(finite, loss, self.losses[at]))
        return LossWindow(losses, self.seen + finite.astype(jnp.int32))


def detect_spike(
    window: LossWindow | None, loss: Float[Array, ""], health: HealthSettings | None
) -> tuple[LossWindow | None, Bool[Array, ""], dict[str, Float[Array, ""]]]:
    """The window one step on, whether weights may be updated by this loss, and metrics.

    With a window the metrics are spike_score (see `LossWindow.score`; 0 for what is not finite) and spike (0 or 1).
    """
    finite = jnp.isfinite(loss)
    if window is None or health is None:
        return window, finite, {}
    score = jnp.where(finite, window.score(loss), 0.0)
    spike = finite & (score > health.spike_deviations)
    metrics = {"spike_score": score, "spike": spike.astype(jnp.float32)}
    return window.with_loss(loss), finite if health.on_spike == "log" else finite & ~spike, metrics

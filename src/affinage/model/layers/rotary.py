"""Rotary position embeddings (Su et al., 2021) in the half-rotation layout of Hugging Face's Llama.

Element i of a head is rotated together with element i + d/2, where papers (and the original Llama weights) pair
2i with 2i + 1. The two are the same model after a permutation of the rows of the query and key projections.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.config.settings import Settings

Tables = tuple[Float[Array, "B S d"], Float[Array, "B S d"]]  # cosines and sines


class RopeScaling(Settings):
    """How a model trained on short rows turns in longer ones."""

    kind: Literal["linear", "llama3"]
    """All waves stretched, or the long ones."""
    factor: float = Field(ge=1)
    """By which the context grows."""
    low_frequency: float = Field(default=1.0, gt=0)
    """Llama3: waves longer than original_context / this are stretched."""
    high_frequency: float = Field(default=4.0, gt=0)
    """Llama3: waves shorter than original_context / this stay."""
    original_context: int = Field(default=8192, ge=1)
    """Llama3: tokens of a row in the first training."""

    def scaled(self, frequencies: Float[Array, "d"]) -> Float[Array, "d"]:
        """All frequencies divided by the factor (Chen et al., 2023), or only the low ones (Llama 3, section 3.4)."""
        if self.kind == "linear":
            return frequencies / self.factor
        waves = self.original_context * frequencies / (2 * jnp.pi)  # in the original context
        unscaled = jnp.clip((waves - self.low_frequency) / (self.high_frequency - self.low_frequency), 0.0, 1.0)
        return frequencies * (unscaled + (1.0 - unscaled) / self.factor)


class RopeSettings(Settings):
    """How positions turn queries and keys."""

    theta: float = Field(default=10_000.0, gt=0)
    """Base of the wavelengths; frequency i is theta ** (-2i / d), i from 0."""
    scaling: RopeScaling | None = None
    """For rows longer than those of the first training."""

    def tables(self, positions: Int[Array, "B S"], head_dim: int, *, stored: bool = False) -> Tables:
        """Cosines and sines in float32 of the angles at these positions.

        `stored` has them computed once: XLA:CPU would otherwise fuse them into every rotation, where they are most of
        the arithmetic, for every head and layer.
        """
        frequencies = self.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
        if self.scaling:
            frequencies = self.scaling.scaled(frequencies)
        angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        # A product is never fused into what uses it, as a barrier does not prevent; with 0 and 1 it is exact.
        same = jnp.eye(head_dim // 2)
        return (cos @ same, sin @ same) if stored else (cos, sin)


def rotate(x: Float[Array, "B S H D"], tables: Tables) -> Float[Array, "B S H D"]:
    """Turns the pairs (i, i + D / 2) of every head by the angle of its position."""
    cos, sin = (table[:, :, None] for table in tables)
    return _turn(x.astype(jnp.float32), cos, sin).astype(x.dtype)


@jax.custom_vjp
def _turn(x: Float[Array, "B S H D"], cos: Float[Array, "B S 1 d"], sin: Float[Array, "B S 1 d"]) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


_turn.defvjp(  # the gradient is turned back by the same angle
    lambda x, cos, sin: (_turn(x, cos, sin), (cos, sin)),
    lambda tables, gradient: (_turn(gradient, tables[0], -tables[1]), None, None),
)

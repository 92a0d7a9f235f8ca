"""Rotary position embeddings (Su et al., 2021) in the half-rotation layout of Hugging Face's Llama.

Element i of a head is rotated together with element i + d/2, where papers (and the original Llama weights) pair
2i with 2i + 1. The two are the same model after a permutation of the rows of the query and key projections.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.recipe.settings import Settings


class RopeScaling(Settings):
    """How a model trained on short rows turns in longer ones."""

    kind: Literal["linear", "llama3"]
    factor: float = Field(ge=1)  # by which the context grows
    low_frequency: float = Field(default=1.0, gt=0)  # llama3: waves longer than original_context / this are stretched
    high_frequency: float = Field(default=4.0, gt=0)  # llama3: waves shorter than original_context / this stay
    original_context: int = Field(default=8192, ge=1)  # llama3: tokens of a row in the first training

    def scaled(self, frequencies: Float[Array, "d"]) -> Float[Array, "d"]:
        """All frequencies divided by the factor (Chen et al., 2023), or only the low ones (Llama 3, section 3.4)."""
        if self.kind == "linear":
            return frequencies / self.factor
        waves = self.original_context * frequencies / (2 * jnp.pi)  # in the original context
        kept = jnp.clip((waves - self.low_frequency) / (self.high_frequency - self.low_frequency), 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


class RopeSettings(Settings):
    """How positions turn queries and keys."""

    theta: float = Field(default=10_000.0, gt=0)  # base of the wavelengths; frequency i is theta ** (-2i / d), i from 0
    fraction: float = Field(default=1.0, gt=0, le=1)  # share of a head, its first elements, that is turned
    scaling: RopeScaling | None = None

    def turned(self, head_dim: int) -> int:
        """How many elements of a head are turned: an even number."""
        return 2 * int(head_dim * self.fraction / 2)


def rotary_tables(
    settings: RopeSettings, positions: Int[Array, "B S"], head_dim: int
) -> tuple[Float[Array, "B S d"], Float[Array, "B S d"]]:
    """Cosines and sines [B, S, turned / 2] in float32 of the angles at these positions."""
    turned = settings.turned(head_dim)
    frequencies = settings.theta ** (-jnp.arange(0, turned, 2, dtype=jnp.float32) / turned)
    if settings.scaling:
        frequencies = settings.scaling.scaled(frequencies)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B H S D"], tables: tuple[Float[Array, "B S d"], Float[Array, "B S d"]]
) -> Float[Array, "B H S D"]:
    """Turns the pairs (i, i + d) of every head by the angle of its position; elements from 2 d on stay."""
    cos, sin = (table[:, None] for table in tables)
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)

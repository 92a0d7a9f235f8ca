"""Rotary position embeddings (Su et al., 2021) in the half-rotation layout of Hugging Face's Llama.

Element i of a head is rotated together with element i + d/2, where papers (and the original Llama weights) pair
2i with 2i + 1. The two are the same model after a permutation of the rows of the query and key projections.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.recipe.settings import Settings


class RopeSettings(Settings):
    """How positions turn queries and keys."""

    theta: float = Field(default=10_000.0, gt=0)  # base of the wavelengths; frequency i is theta ** (-2i / d), i from 0


def rotary_tables(
    settings: RopeSettings, positions: Int[Array, "B S"], head_dim: int
) -> tuple[Float[Array, "B S d"], Float[Array, "B S d"]]:
    """Cosines and sines [B, S, head_dim / 2] in float32 of the angles at these positions."""
    frequencies = settings.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B H S D"], tables: tuple[Float[Array, "B S d"], Float[Array, "B S d"]]
) -> Float[Array, "B H S D"]:
    """Turns the pairs (i, i + D/2) of every head by the angle of its position."""
    cos, sin = (table[:, None] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

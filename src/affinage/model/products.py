"""Products of low-precision arrays with float32 results, and logits that are not yet multiplied out."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Queries = Float[Array, "B S H D"]
Keys = Float[Array, "B S K D"]  # and values; each of the K heads is for H / K heads of queries
Segments = Int[Array, "B S"] | None  # the documents of a row, one after the other; None: a row is one document


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product32(equation: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """An einsum of two arrays with a float32 result; every index stands in two of the three terms.

    JAX would multiply the float32 gradient of the result with the operands in float32, at an eighth of the speed. Here
    it is rounded to the operands' dtype first.
    """
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _backward(equation: str, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    left, right = operands
    terms, result = equation.split("->")
    of_left, of_right = terms.split(",")
    d_left = jnp.einsum(f"{result},{of_right}->{of_left}", gradient.astype(right.dtype), right)
    d_right = jnp.einsum(f"{result},{of_left}->{of_right}", gradient.astype(left.dtype), left)
    return d_left.astype(left.dtype), d_right.astype(right.dtype)


product32.defvjp(lambda equation, left, right: (product32(equation, left, right), (left, right)), _backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Logits not yet multiplied out, so that a loss over a large vocabulary can do it in parts."""

    hidden: Float[Array, "*N D"]  # in the compute dtype
    kernel: Float[Array, "V D"]  # in the compute dtype

    def array(self) -> Float[Array, "*N V"]:
        """The logits in float32."""
        return multiply_out(self.hidden, self.kernel)


def multiply_out(
    hidden: Float[Array, "*N D"], kernel: Float[Array, "V D"], vocabulary: int | None = None
) -> Float[Array, "*N V"]:
    """Logits in float32; from the end of a padded `vocabulary` on they are -1e30."""
    axes = "abc"[: hidden.ndim - 1]
    return without_padding(product32(f"{axes}d,vd->{axes}v", hidden, kernel), vocabulary)


def without_padding(logits: Float[Array, "*N V"], vocabulary: int | None) -> Float[Array, "*N V"]:
    """The logits with -1e30 in the columns from `vocabulary` on, which no softmax gives weight."""
    if vocabulary is None:
        return logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocabulary, logits, -1e30)

"""Products of low-precision arrays with float32 results, and logits that are not yet multiplied out."""

from dataclasses import dataclass, field
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


def _forward(equation: str, left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return product32(equation, left, right), (left, right)


def _backward(equation: str, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    left, right = operands
    terms, result = equation.split("->")
    of_left, of_right = terms.split(",")
    d_left = jnp.einsum(f"{result},{of_right}->{of_left}", gradient.astype(right.dtype), right)
    d_right = jnp.einsum(f"{result},{of_left}->{of_right}", gradient.astype(left.dtype), left)
    return d_left.astype(left.dtype), d_right.astype(right.dtype)


product32.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Logits not yet multiplied out, so that a loss over a large vocabulary can do it in parts."""

    hidden: Float[Array, "*N D"]  # in the compute dtype
    kernel: Float[Array, "V D"]  # in the compute dtype
    softcap: float | None = field(default=None, metadata={"static": True})

    def array(self) -> Float[Array, "*N V"]:
        """The logits in float32."""
        return multiply_out(self.hidden, self.kernel, self.softcap)


def multiply_out(
    hidden: Float[Array, "*N D"], kernel: Float[Array, "V D"], softcap: float | None, vocabulary: int | None = None
) -> Float[Array, "*N V"]:
    """Logits in float32, see `cap`."""
    axes = "abc"[: hidden.ndim - 1]
    return cap(product32(f"{axes}d,vd->{axes}v", hidden, kernel), softcap, vocabulary)


def cap(logits: Float[Array, "*N V"], softcap: float | None, vocabulary: int | None = None) -> Float[Array, "*N V"]:
    """Logits bounded to ±softcap by a tanh where one is given (Gemma 2), and -1e30 from the vocabulary's end on."""
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if vocabulary is None:
        return logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocabulary, logits, -1e30)

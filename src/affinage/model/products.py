"""Products of low-precision arrays with float32 results, whose gradients stay products of low-precision arrays."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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

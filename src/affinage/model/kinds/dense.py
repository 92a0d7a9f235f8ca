"""Linear maps: kernels cast to the compute dtype at use."""

from math import prod

import jax.numpy as jnp
from jaxtyping import Array, Float

from affinage.model.adapters import LORA_A, LORA_B, LORA_SITE
from affinage.model.kind import Context
from affinage.model.kinds.dropout import drop
from affinage.model.parameter import Axes, Parameter, Tree
from affinage.model.product import product


def dense_parameters(
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: Axes,
    *,
    bias: bool,
    std: float,
    residual: bool = False,
) -> Tree:
    """Kernel [*inputs, *outputs] with its logical axes and, if asked for, a bias [*outputs] that starts at zero."""
    contracted = tuple(range(len(inputs)))
    tree: Tree = {"kernel": Parameter((*inputs, *outputs), axes, std=std, residual=residual, inputs=contracted)}
    if bias:
        tree["bias"] = Parameter(outputs, axes[len(inputs) :], init="zeros", decay=False)
    return tree


def dense(params: Tree, x: Float[Array, "..."], context: Context, contracted: int = 1) -> Float[Array, "..."]:
    """x [..., *inputs] times kernel [*inputs, *outputs], plus the bias; `contracted` is the number of input axes.

    Where there is an adapter, what it makes of x is added; see `affinage.model.adapters`.
    """
    y = _product(x, params["kernel"], context, contracted)
    if LORA_A in params:
        rate = context.call.adapter_dropout
        dropped = drop(x, rate, context, params[LORA_SITE]) if rate else x
        y = y + _product(_product(dropped, params[LORA_A], context, contracted), params[LORA_B], context, 1)
    if "bias" in params:
        leading = x.ndim - contracted
        y = y + params["bias"].astype(x.dtype).reshape((1,) * leading + y.shape[leading:])
    return y


def _product(x: Float[Array, "..."], kernel: Array, context: Context, contracted: int) -> Float[Array, "..."]:
    kernel = kernel.astype(x.dtype)
    leading, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    matrix = kernel.reshape(prod(kernel.shape[:contracted]), prod(outputs))
    if context.call.flattens:
        return product(x.reshape(-1, matrix.shape[0]), matrix).reshape(*leading, *outputs)
    return jnp.dot(x.reshape(*leading, -1), matrix).reshape(*leading, *outputs)


def dense_flops(inputs: int, outputs: int, tokens: int) -> int:
    """2 * m * n * k of the product."""
    return 2 * tokens * inputs * outputs

"""Linear maps: kernels cast to the compute dtype at use."""

from math import prod

import jax.numpy as jnp
from jaxtyping import Array, Float

from affinage.model.kind import Context
from affinage.model.parameter import Axes, Parameter, Tree


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
    """x [..., *inputs] times kernel [*inputs, *outputs], plus the bias; `contracted` is the number of input axes."""
    kernel = params["kernel"].astype(x.dtype)
    leading, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    width = prod(kernel.shape[:contracted])
    rows = (prod(leading),) if context.call.flattens else leading
    y = jnp.dot(x.reshape(*rows, width), kernel.reshape(width, prod(outputs))).reshape(*leading, *outputs)
    if "bias" in params:
        y = y + params["bias"].astype(x.dtype).reshape((1,) * len(leading) + outputs)
    return y


def dense_flops(inputs: int, outputs: int, tokens: int) -> int:
    """2 * m * n * k of the product."""
    return 2 * tokens * inputs * outputs

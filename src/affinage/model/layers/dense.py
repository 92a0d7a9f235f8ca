"""Linear maps: kernels cast to the compute dtype at use."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from affinage.model.layer import LayerContext
from affinage.model.layers.dropout import drop
from affinage.model.lora import LORA_A, LORA_B, LORA_SITE
from affinage.model.parameter import Axes, ParamSpec, PyTree


def dense_parameters(
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: Axes,
    *,
    bias: bool,
    std: float,
    residual: bool = False,
) -> PyTree:
    """Kernel [*inputs, *outputs] with its logical axes and, if asked for, a bias [*outputs] that starts at zero."""
    contracted = tuple(range(len(inputs)))
    tree: PyTree = {"kernel": ParamSpec((*inputs, *outputs), axes, std=std, residual=residual, inputs=contracted)}
    if bias:
        tree["bias"] = ParamSpec(outputs, axes[len(inputs) :], init="zeros", decay=False)
    return tree


def dense(
    params: PyTree, x: Float[Array, "..."], context: LayerContext, contracted: int = 1, *, name: str = ""
) -> Float[Array, "..."]:
    """x [..., *inputs] times kernel [*inputs, *outputs], plus the bias; `contracted` is the number of input axes.

    An adapter's product is added; see `affinage.model.lora`. What is without the bias has the `name` for policies
    of `jax.checkpoint`.
    """
    y = _product(x, params["kernel"], context, contracted)
    if LORA_A in params:
        rate = context.config.adapter_dropout
        dropped = drop(x, rate, context, params[LORA_SITE]) if rate else x
        y = y + _product(_product(dropped, params[LORA_A], context, contracted), params[LORA_B], context, 1)
    y = checkpoint_name(y, name) if name else y
    return _with_bias(y, params["bias"]) if "bias" in params else y


def dense_together(
    several: Sequence[PyTree], x: Float[Array, "..."], context: LayerContext, names: Sequence[str] = ()
) -> list[Float[Array, "..."]]:
    """`dense` of the last axis of one x by several kernels; on GPUs one product, where the outputs are whole here.

    One product reads x once, and its gradient needs no sum. For policies of `jax.checkpoint` it has the first name.
    """
    names = names or [""] * len(several)
    plain = all(LORA_A not in params for params in several)
    if context.config.platform != "gpu" or not plain or context.config.layout.parts("heads", "kv_heads", "ffn") > 1:
        return [dense(params, x, context, name=name) for params, name in zip(several, names, strict=True)]
    kernels = [params["kernel"].astype(x.dtype) for params in several]
    matrix = jnp.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1)
    y = _joined_product(x, matrix)
    y = checkpoint_name(y, names[0]) if names[0] else y
    parts = jnp.split(y, list(accumulate(kernel.size // len(kernel) for kernel in kernels))[:-1], axis=-1)
    results = []
    for params, kernel, part in zip(several, kernels, parts, strict=True):
        part = part.reshape(*part.shape[:-1], *kernel.shape[1:])
        results.append(_with_bias(part, params["bias"]) if "bias" in params else part)
    return results


@jax.custom_vjp
def _joined_product(x: Float[Array, "*N D"], matrix: Float[Array, "D F"]) -> Float[Array, "*N F"]:
    return jnp.dot(x, matrix)


def _joined_forward(x: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.dot(x, matrix), (x, matrix)


def _joined_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = kept
    gradient = jax.lax.optimization_barrier(gradient)  # else XLA joins the parts' gradients once for each product
    d_matrix = jnp.dot(x.reshape(-1, x.shape[-1]).T, gradient.reshape(-1, gradient.shape[-1]))
    return jnp.dot(gradient, matrix.T), d_matrix


_joined_product.defvjp(_joined_forward, _joined_backward)


def _product(x: Float[Array, "..."], kernel: Array, context: LayerContext, contracted: int) -> Float[Array, "..."]:
    kernel = kernel.astype(x.dtype)
    leading, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    matrix = kernel.reshape(prod(kernel.shape[:contracted]), prod(outputs))
    if context.config.flattens:
        return jnp.dot(x.reshape(-1, matrix.shape[0]), matrix).reshape(*leading, *outputs)
    return jnp.dot(x.reshape(*leading, -1), matrix).reshape(*leading, *outputs)


def _with_bias(y: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def dense_flops(inputs: int, outputs: int, tokens: int) -> int:
    """2 * m * n * k of the product."""
    return 2 * tokens * inputs * outputs

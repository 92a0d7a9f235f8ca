"""Linear maps, with kernels cast to the compute dtype at use, and the feed-forward layer."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from pydantic import Field

from affinage.config.settings import Settings
from affinage.model.layer import LayerContext
from affinage.model.layers.dropout import drop
from affinage.model.lora import LORA_A, LORA_B, LORA_SITE
from affinage.model.parameter import Axes, ParamSpec, PyTree
from affinage.registry import Registry, one_of

Elementwise = Callable[[Array], Array]


def dense_parameters(
    inputs: tuple[int, ...], outputs: tuple[int, ...], axes: Axes, *, bias: bool, std: float, residual: bool = False
) -> PyTree:
    """Kernel [*inputs, *outputs] with its logical axes and, on request, a bias [*outputs] that starts at zero."""
    contracted = tuple(range(len(inputs)))
    tree: PyTree = {"kernel": ParamSpec((*inputs, *outputs), axes, std=std, residual=residual, inputs=contracted)}
    if bias:
        tree["bias"] = ParamSpec(outputs, axes[len(inputs) :], init="zeros", decay=False)
    return tree


def dense(
    params: PyTree, x: Float[Array, "..."], context: LayerContext, contracted: int = 1, *, name: str = ""
) -> Float[Array, "..."]:
    """x [..., *inputs] times kernel [*inputs, *outputs], plus the bias; `contracted` is the number of input axes.

    An adapter's product is added, see `affinage.model.lora`. The sum without the bias has the `name` for policies of
    `jax.checkpoint`.
    """
    y = _product(x, params["kernel"], context, contracted)
    if LORA_A in params:
        rate = context.config.adapter_dropout
        dropped = drop(x, rate, context, params[LORA_SITE]) if rate else x
        y = y + _product(_product(dropped, params[LORA_A], context, contracted), params[LORA_B], context, 1)
    return _with_bias(checkpoint_name(y, name) if name else y, params)


def dense_together(
    several: Sequence[PyTree], x: Float[Array, "..."], context: LayerContext, names: Sequence[str] = ()
) -> list[Float[Array, "..."]]:
    """`dense` of the last axis of one x by several kernels; on GPUs one product, where the outputs are whole here.

    One product reads x once, and its gradient needs no sum. For policies of `jax.checkpoint` it has the first name.
    """
    names = names or [""] * len(several)
    adapted = any(LORA_A in params for params in several)
    if context.config.platform != "gpu" or adapted or context.config.layout.parts("heads", "kv_heads", "ffn") > 1:
        return [dense(params, x, context, name=name) for params, name in zip(several, names, strict=True)]
    kernels = [params["kernel"].astype(x.dtype) for params in several]
    y = _joined_product(x, jnp.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1))
    y = checkpoint_name(y, names[0]) if names[0] else y
    parts = jnp.split(y, list(accumulate(kernel.size // len(kernel) for kernel in kernels))[:-1], axis=-1)
    shaped = [part.reshape(*x.shape[:-1], *kernel.shape[1:]) for part, kernel in zip(parts, kernels, strict=True)]
    return [_with_bias(part, params) for part, params in zip(shaped, several, strict=True)]


@jax.custom_vjp
def _joined_product(x: Float[Array, "*N D"], matrix: Float[Array, "D F"]) -> Float[Array, "*N F"]:
    return jnp.dot(x, matrix)


def _joined_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = saved
    gradient = jax.lax.optimization_barrier(gradient)  # else XLA joins the parts' gradients once for each product
    d_matrix = jnp.dot(x.reshape(-1, x.shape[-1]).T, gradient.reshape(-1, gradient.shape[-1]))
    return jnp.dot(gradient, matrix.T), d_matrix


_joined_product.defvjp(lambda x, matrix: (jnp.dot(x, matrix), (x, matrix)), _joined_backward)


def _product(x: Float[Array, "..."], kernel: Array, context: LayerContext, contracted: int) -> Float[Array, "..."]:
    leading, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    matrix = kernel.astype(x.dtype).reshape(-1, prod(outputs))
    rows = (-1,) if context.config.flattens else leading
    return jnp.dot(x.reshape(*rows, len(matrix)), matrix).reshape(*leading, *outputs)


def _with_bias(y: Float[Array, "..."], params: PyTree) -> Float[Array, "..."]:
    if "bias" not in params:
        return y
    bias = params["bias"].astype(y.dtype)
    return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def dense_flops(inputs: int, outputs: int, tokens: int) -> int:
    """2 * m * n * k of the product."""
    return 2 * tokens * inputs * outputs


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)  # the tanh form, as in GPT-2 and Gemma


# Kinds with a gate have three matrices: down(activation(gate(x)) * up(x)) (Shazeer, 2020); the others two.
GATED: Registry[Elementwise] = Registry("activation", {"swiglu": jax.nn.silu, "geglu": _gelu})
PLAIN: Registry[Elementwise] = Registry("activation", {"gelu": _gelu, "relu2": lambda x: jnp.square(jax.nn.relu(x))})
Activation = Annotated[str, one_of(GATED, PLAIN)]


def activation(name: str, *, gated: bool = False) -> Callable[[Elementwise], Elementwise]:
    """Registers a function of every element as the feed-forward layer's `kind: name`, with a gate or without."""
    return (GATED if gated else PLAIN).register(name)


def activate(kind: str, up: Array, gate: Array | None) -> Array:
    """The hidden layer of its products; `gate` is that of the gate's matrix, where the kind has one."""
    hidden = PLAIN[kind](up) if gate is None else GATED[kind](gate) * up
    return checkpoint_name(hidden, "ffn_hidden")


class FfnSettings(Settings):
    """The feed-forward half of a block."""

    kind: Activation
    """Gated (swiglu, geglu ...) has a third matrix."""
    width: int = Field(ge=1)
    """Of the hidden layer."""
    bias: bool = False
    """On each matrix."""

    def parameters(self, width: int, std: float) -> PyTree:
        """Kernels [D, F] and [F, D]."""
        inward = dense_parameters((width,), (self.width,), ("embed", "ffn"), bias=self.bias, std=std)
        outward = dense_parameters((self.width,), (width,), ("ffn", "embed"), bias=self.bias, std=std, residual=True)
        return {"up": inward} | ({"gate": inward} if self.kind in GATED else {}) | {"down": outward}

    def apply(self, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Float[Array, "B S D"]:
        """The hidden layer is sharded over its width."""
        names = ("up", "gate") if self.kind in GATED else ("up",)
        products = dense_together([params[n] for n in names], x, context, [f"ffn_{n}" for n in names])
        hidden = activate(self.kind, products[0], products[1] if len(products) > 1 else None)
        return dense(params["down"], context.config.constrain(hidden, ("batch", "sequence", "ffn")), context)

    def flops(self, width: int, rows: int, length: int) -> int:
        """Of the two or three products."""
        return dense_flops(width, self.width, rows * length) * (3 if self.kind in GATED else 2)

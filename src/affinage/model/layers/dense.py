"""Linear maps, the feed-forward layer, norms and dropout."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from pydantic import Field

from affinage.config.settings import Settings
from affinage.model.layer import Axes, Layer, LayerContext, ParamSpec, PyTree, Shape, register_layer
from affinage.model.lora import LORA_A, LORA_B
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
    """x [..., *inputs] times kernel [*inputs, *outputs], plus an adapter's product and the bias.

    `contracted` is the number of input axes; the sum without the bias has the `name` for policies of `jax.checkpoint`.
    """
    y = _product(x, params["kernel"], context, contracted)
    if LORA_A in params:
        y = y + _product(_product(x, params[LORA_A], context, contracted), params[LORA_B], context, 1)
    return _with_bias(checkpoint_name(y, name) if name else y, params, context.config.platform == "gpu")


def dense_together(
    several: Sequence[PyTree], x: Float[Array, "..."], context: LayerContext, names: Sequence[str] = ()
) -> list[Float[Array, "..."]]:
    """`dense` of the last axis of one x by several kernels; on GPUs one product, which has the first name."""
    names = names or [""] * len(several)
    adapted = any(LORA_A in params for params in several)
    if context.config.platform != "gpu" or adapted or context.config.layout.parts("heads", "kv_heads", "ffn") > 1:
        return [dense(params, x, context, name=name) for params, name in zip(several, names, strict=True)]
    kernels = [params["kernel"].astype(x.dtype) for params in several]
    y = product(x, jnp.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1), False)
    y = checkpoint_name(y, names[0]) if names[0] else y
    parts = jnp.split(y, list(accumulate(kernel.size // len(kernel) for kernel in kernels))[:-1], axis=-1)
    shaped = [part.reshape(*x.shape[:-1], *kernel.shape[1:]) for part, kernel in zip(parts, kernels, strict=True)]
    return [_with_bias(part, params, True) for part, params in zip(shaped, several, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: Float[Array, "*N D"], matrix: Float[Array, "D F"], on_cpu: bool = True) -> Float[Array, "*N F"]:
    """x times the matrix, whose gradient has the form that XLA computes fastest on a CPU or on a GPU."""
    return jnp.dot(x, matrix)


def _product_backward(on_cpu: bool, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    (x, matrix), stored = saved, jax.lax.optimization_barrier
    gradient = gradient if on_cpu else stored(gradient)  # else GPUs join the gradients of parts once for each product
    columns, rows = x.reshape(-1, x.shape[-1]).T, gradient.reshape(-1, gradient.shape[-1])
    if swapped := on_cpu and len(columns) > rows.shape[1]:
        columns, rows = rows.T, columns.T
    d_matrix = stored(jnp.dot(stored(columns), rows)) if on_cpu else jnp.dot(columns, rows)
    return jnp.dot(gradient, matrix.T), d_matrix.T if swapped else d_matrix


product.defvjp(lambda x, matrix, _: (jnp.dot(x, matrix), (x, matrix)), _product_backward)


def _product(
    x: Float[Array, "..."], kernel: Float[Array, "..."], context: LayerContext, contracted: int
) -> Float[Array, "..."]:
    leading, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    matrix = kernel.astype(x.dtype).reshape(-1, prod(outputs))
    rows, multiply = ((-1,), product) if context.config.flattens else (leading, jnp.dot)
    return multiply(x.reshape(*rows, len(matrix)), matrix).reshape(*leading, *outputs)


def _with_bias(y: Float[Array, "..."], params: PyTree, on_gpu: bool) -> Float[Array, "..."]:
    if "bias" not in params:
        return y  # else a sum in float32, and so are the sums of the bias's gradient
    total = ((wide := y.astype(jnp.float32)) + _along_last(params["bias"], wide)).astype(y.dtype)
    return _of_one_gradient(total) if on_gpu else total


# The same, whose gradient is stored: GPUs would else store that of a bias and of a product apart, one in float32.
_of_one_gradient = jax.custom_vjp(lambda x: x)
_of_one_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),))


def _along_last(x: Float[Array, "..."], of: Float[Array, "..."]) -> Float[Array, "..."]:
    """The values of the last axes, for products and sums with an array that has more of them in front."""
    return x.astype(of.dtype).reshape((1,) * (of.ndim - x.ndim) + x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product32(equation: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """An einsum of two arrays with a float32 result; every index stands in two of the three terms.

    Its gradient is rounded to the operands' dtype: JAX would multiply in float32, at an eighth of the speed.
    """
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _product32_backward(equation: str, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    left, right = operands
    terms, result = equation.split("->")
    of_left, of_right = terms.split(",")
    d_left = jnp.einsum(f"{result},{of_right}->{of_left}", gradient.astype(right.dtype), right)
    d_right = jnp.einsum(f"{result},{of_left}->{of_right}", gradient.astype(left.dtype), left)
    return d_left.astype(left.dtype), d_right.astype(right.dtype)


product32.defvjp(lambda equation, left, right: (product32(equation, left, right), (left, right)), _product32_backward)


# ---- the feed-forward layer ----


_gelu = partial(jax.nn.gelu, approximate=True)  # the tanh form, as in GPT-2 and Gemma

# Functions of every element, by the feed-forward layer's `kind`; plug-ins register theirs. Kinds with a gate have three
# matrices: down(activation(gate(x)) * up(x)) (Shazeer, 2020); the others two.
GATED: Registry[Elementwise] = Registry("activation", {"swiglu": jax.nn.silu, "geglu": _gelu})
PLAIN: Registry[Elementwise] = Registry("activation", {"gelu": _gelu, "relu2": lambda x: jnp.square(jax.nn.relu(x))})
Activation = Annotated[str, one_of(GATED, PLAIN)]


def activate(kind: str, up: Float[Array, "*N F"], gate: Float[Array, "*N F"] | None) -> Float[Array, "*N F"]:
    """The hidden layer, computed in float32, of its products; `gate` is that of the gate's matrix, if it has one."""
    wide = up.astype(jnp.float32)
    hidden = PLAIN[kind](wide) if gate is None else GATED[kind](gate.astype(jnp.float32)) * wide
    return checkpoint_name(hidden.astype(up.dtype), "ffn_hidden")


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
        hidden = context.config.layout.constrain(hidden, ("batch", "sequence", "ffn"))
        return dense(params["down"], hidden, context)

    def flops(self, width: int, rows: int, length: int) -> int:
        """Of the two or three products."""
        return 2 * rows * length * width * self.width * (3 if self.kind in GATED else 2)


# ---- normalizations, computed in float32 ----

Normalization = Callable[[PyTree, Array, float], Array]  # of the last axis, with a scale, maybe an offset, and eps
_centered = jax.custom_vjp(lambda x: x - jnp.mean(x, axis=-1, keepdims=True))
# Written as one term: with the two of autodiff, XLA:CPU sums the residual stream's gradient again for every layer.
_centered.defvjp(lambda x: (_centered(x), None), lambda _, gradient: (_centered(gradient),))


def _normalize(params: PyTree, x: Float[Array, "*N D"], eps: float, *, center: bool) -> Float[Array, "*N D"]:
    """Root mean square (Zhang and Sennrich, 2019) or, centered, layer normalization (Ba, Kiros and Hinton, 2016)."""
    x32 = _centered(x.astype(jnp.float32)) if center else x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    y = y * _along_last(params["scale"], y)
    return (y + _along_last(params["bias"], y) if center else y).astype(x.dtype)


NORMS: Registry[Normalization] = Registry(
    "norm", {"rms": partial(_normalize, center=False), "layer": partial(_normalize, center=True)}
)


class NormSettings(Settings):
    """Which normalization stands inside a block."""

    kind: Annotated[str, one_of(NORMS)] = "rms"
    """Rms, layer, or one of a plug-in."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square or variance."""

    def parameters(self, width: int, axis: str | None = "embed") -> PyTree:
        """Scale [width], and for a layer norm also an offset."""
        scale = ParamSpec((width,), (axis,), init="ones", decay=False)
        return {"scale": scale} | ({"bias": replace(scale, init="zeros")} if self.kind == "layer" else {})

    def apply(self, params: PyTree, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Normalizes the last axis."""
        return NORMS[self.kind](params, x, self.eps)


@register_layer("rms_norm", joins=True)
class RmsNorm(Layer):
    """Root mean square normalization over the last axis."""

    norm_kind: ClassVar[str] = "rms"
    eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square or variance."""

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        return NormSettings(kind=self.norm_kind).parameters(inputs[0].width)

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "*N D"]:
        return NORMS[self.norm_kind](params, inputs[0], self.eps)


@register_layer("layer_norm", joins=True)
class LayerNorm(RmsNorm):
    """Layer normalization over the last axis, with an offset."""

    norm_kind = "layer"


def drop(x: Float[Array, "B ..."], rate: float, context: LayerContext, site: int) -> Float[Array, "B ..."]:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    The mask is of the step's key, the layer, the `site` within it and the global row, however a batch is split.
    """
    if rate == 0.0 or context.key is None:
        return x
    key = jax.random.fold_in(context.key, site)
    rows = context.batch.get("rows", jnp.arange(x.shape[0]))

    keys = jax.vmap(partial(jax.random.fold_in, key))(rows)
    kept = jax.vmap(partial(jax.random.bernoulli, p=1.0 - rate, shape=x.shape[1:]))(keys)
    mask = checkpoint_name(kept, "dropout_mask")
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros((), x.dtype))


@register_layer("dropout", joins=True)
class Dropout(Layer):
    """Dropout as a node of its own, e.g. after GPT-2's embeddings."""

    rate: float = Field(ge=0, lt=1)
    """Probability of zeroing an element."""

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B ..."]:
        return drop(inputs[0], self.rate, context, site=0)

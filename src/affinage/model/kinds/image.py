"""From images to vectors, and the small networks that BYOL puts on top of them.

Layer norms and standardised kernels stand where the paper has batch norms: a row's loss must not depend on the other
rows, or accumulation and the mesh would change it. That this replaces batch statistics in BYOL is due to Richemond et
al. (2020); with layer norms alone, all vectors became one within 50 steps.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod, sqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field
from typing_extensions import override

from affinage.model.kind import Context, Cost, NodeKind, node_kind
from affinage.model.kinds.dense import dense, dense_flops, dense_parameters
from affinage.model.kinds.norm import NormSettings
from affinage.model.parameter import Parameter, Tree
from affinage.model.shape import Shape, ShapeMismatch

_NORM = NormSettings(kind="layer", eps=1e-5)
_SMALLEST = 1e-8  # sum of squares below which a kernel has no direction
_WINDOW = 3  # height and width of a convolution


def _layers_parameters(widths: tuple[int, ...], *, norm_last: bool) -> Tree:
    """Dense layers from the first width to the last, with a norm and a ReLU between them, and on request one after."""
    tree: Tree = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        last = layer == len(widths) - 2
        tree[f"dense_{layer}"] = dense_parameters(
            (inputs,), (outputs,), ("ffn", "embed"), bias=True, std=sqrt(2 / inputs)
        )
        if not last or norm_last:
            tree[f"norm_{layer}"] = _NORM.parameters(outputs)
    return tree


def standardised(kernel: Float[Array, "*I O"]) -> Float[Array, "*I O"]:
    """The kernel with mean 0 and variance 1 / inputs for every output, float32 (Qiao et al., 2019).

    What all inputs have in common then reaches no output, which keeps the vectors of different images apart.
    """
    kernel = kernel.astype(jnp.float32)
    inputs = tuple(range(kernel.ndim - 1))
    centred = kernel - jnp.mean(kernel, axis=inputs, keepdims=True)
    total = jnp.sum(jnp.square(centred), axis=inputs, keepdims=True)
    return centred * jax.lax.rsqrt(total + _SMALLEST)


def _layers(params: Tree, x: Float[Array, "*N D"], context: Context) -> Float[Array, "*N E"]:
    for layer in range(sum(name.startswith("dense_") for name in params)):
        own = params[f"dense_{layer}"]
        x = dense({**own, "kernel": standardised(own["kernel"])}, x, context)
        if f"norm_{layer}" in params:
            x = jax.nn.relu(_NORM.apply(params[f"norm_{layer}"], x))
    return x


def _layers_cost(widths: tuple[int, ...], rows: int) -> Cost:
    flops = [dense_flops(inputs, outputs, rows) for inputs, outputs in pairwise(widths)]
    return Cost(matmul=sum(flops), of_input=flops[0])


@node_kind("encoder")
class Encoder(NodeKind):
    """Vectors [B, ..., width] of images [B, ..., H, W, C]."""

    takes = ("images",)
    net: Literal["mlp", "conv"] = "mlp"
    """Of the flattened image, or of it as it is with kernels of 3 x 3."""
    hidden: tuple[int, ...] = ()
    """Mlp: widths of its hidden layers; conv: channels, the size halved after each."""
    width: int = Field(ge=1)
    """Of the vectors."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        dims = inputs[0].dims
        if len(dims) < 4 or not all(isinstance(size, int) for size in dims[-3:]):
            raise ShapeMismatch(f"expected images [B, ..., height, width, channels], got {inputs[0]}")
        if self.net == "conv" and min(_image(inputs[0])[:2]) >> len(self.hidden) < 1:
            raise ShapeMismatch(f"images {inputs[0]} cannot be halved {len(self.hidden)} times")
        return Shape((*dims[:-3], self.width))

    @override
    def mixes_rows(self) -> bool:
        return self.net == "conv"  # a kernel's gradients of several copies become one program that XLA does not divide

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> Tree:
        tree: Tree = {}
        channels = (_image(inputs[0])[2], *self.hidden)
        for layer, (before, after) in enumerate(pairwise(channels) if self.net == "conv" else ()):
            shape, std = (_WINDOW, _WINDOW, before, after), sqrt(2 / (_WINDOW**2 * before))
            tree[f"conv_{layer}"] = {
                "kernel": Parameter(shape, (None, None, None, "embed"), std=std),
                **_NORM.parameters(after),
            }
        return tree | _layers_parameters(self._widths(inputs[0]), norm_last=True)

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Float[Array, "*N D"]:
        x = inputs[0].astype(context.call.compute_dtype)
        leading = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:])
        for layer in range(len(self.hidden) if self.net == "conv" else 0):
            own = params[f"conv_{layer}"]
            x = jax.lax.conv_general_dilated(
                x,
                standardised(own["kernel"]).astype(x.dtype),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = _halved(jax.nn.relu(_NORM.apply(own, x)))
        return _layers(params, x.reshape(*leading, prod(x.shape[1:])), context)

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        rows = prod(inputs[0].bind(sizes)[:-3])
        total = _layers_cost(self._widths(inputs[0]), rows)
        height, width, channels = _image(inputs[0])
        flops = []
        for layer, after in enumerate(self.hidden if self.net == "conv" else ()):
            pairs = _taps(height >> layer) * _taps(width >> layer)
            flops.append(dense_flops(channels, after, rows * pairs))
            channels = after
        return replace(total, matmul=total.matmul + sum(flops), of_input=flops[0]) if flops else total

    def _widths(self, images: Shape) -> tuple[int, ...]:
        """Of the dense layers, from the flat image or the last channels to the vector."""
        height, width, channels = _image(images)
        if self.net == "mlp":
            return (height * width * channels, *self.hidden, self.width)
        halvings = len(self.hidden)
        return ((height >> halvings) * (width >> halvings) * (self.hidden or (channels,))[-1], self.width)


def _taps(size: int) -> int:
    """Pairs of a pixel and a place in its window along an axis, those in the border of zeros left out."""
    return sum(0 <= pixel + tap < size for pixel in range(size) for tap in range(-(_WINDOW // 2), _WINDOW // 2 + 1))


def _image(images: Shape) -> tuple[int, int, int]:
    height, width, channels = (int(size) for size in images.dims[-3:])
    return height, width, channels


def _halved(x: Float[Array, "N H W C"]) -> Float[Array, "N h w C"]:
    """Means over 2 x 2 pixels; an odd last row or column is left out."""
    count, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.mean(x.reshape(count, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


class _Mlp(NodeKind):
    hidden: int = Field(ge=1)
    """Width of the hidden layer; BYOL: 4096."""
    width: int = Field(ge=1)
    """Of the vectors; BYOL: 256."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        if inputs[0].dtype != "float" or len(inputs[0].dims) < 2:
            raise ShapeMismatch(f"expected vectors [B, ..., width], got {inputs[0]}")
        return Shape((*inputs[0].dims[:-1], self.width))

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> Tree:
        return _layers_parameters((inputs[0].width, self.hidden, self.width), norm_last=False)

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Float[Array, "*N D"]:
        return _layers(params, inputs[0], context)

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        rows = prod(inputs[0].bind(sizes)[:-1])
        return _layers_cost((inputs[0].width, self.hidden, self.width), rows)


@node_kind("projector")
class Projector(_Mlp):
    """Vectors in which views are compared, so that the encoder's need not forget how the views differ."""


@node_kind("predictor")
class Predictor(_Mlp):
    """The online branch's guess of the target's vector; without it the two would collapse to a constant."""

"""Normalizations, computed in float32."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field
from typing_extensions import override

from affinage.config.settings import Settings
from affinage.model.layer import Layer, LayerContext, Shape, register_layer
from affinage.model.parameter import ParamSpec, PyTree
from affinage.registry import Registry, one_of

Normalization = Callable[[PyTree, Array, float], Array]  # of the last axis, with a scale, maybe an offset, and eps


def rms(params: PyTree, x: Float[Array, "*N D"], eps: float) -> Float[Array, "*N D"]:
    """Root mean square normalization (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (y * _along_last(params["scale"], x)).astype(x.dtype)


def layer_norm(params: PyTree, x: Float[Array, "*N D"], eps: float) -> Float[Array, "*N D"]:
    """Layer normalization (Ba, Kiros and Hinton, 2016)."""
    x32 = x.astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    y = y * _along_last(params["scale"], x)
    return (y + _along_last(params["bias"], x) if "bias" in params else y).astype(x.dtype)


def _along_last(vector: Float[Array, "D"], x: Float[Array, "*N D"]) -> Float[Array, "*n D"]:
    return vector.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + vector.shape)


NORMS: Registry[Normalization] = Registry("norm", {"rms": rms, "layer": layer_norm})
WITH_OFFSET = {"layer"}  # those that `bias` applies to


def norm(name: str, *, offset: bool = False) -> Callable[[Normalization], Normalization]:
    """Registers a function as the norm's `kind: name`; with `offset` it is given a bias beside the scale."""
    if offset:
        WITH_OFFSET.add(name)
    return NORMS.register(name)


class NormSettings(Settings):
    """Which normalization stands inside a block."""

    kind: Annotated[str, one_of(NORMS)] = "rms"
    """Rms, layer, or one of a plug-in."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square or variance."""
    bias: bool = True
    """Layer only: with an offset."""

    def parameters(self, width: int, axis: str | None = "embed") -> PyTree:
        """Scale [width], and for a layer norm with bias also an offset."""
        tree: PyTree = {"scale": ParamSpec((width,), (axis,), init="ones", decay=False)}
        if self.kind in WITH_OFFSET and self.bias:
            tree["bias"] = ParamSpec((width,), (axis,), init="zeros", decay=False)
        return tree

    def apply(self, params: PyTree, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Normalizes the last axis."""
        return NORMS[self.kind](params, x, self.eps)


@register_layer("rms_norm")
class RmsNorm(Layer):
    """Root mean square normalization over the last axis."""

    joins = True

    eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square or variance."""

    def settings(self) -> NormSettings:
        """The same normalization as it would stand inside a block."""
        return NormSettings(kind="rms", eps=self.eps)

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        return Shape((*inputs[0].dims[:-1], inputs[0].width))

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        return self.settings().parameters(inputs[0].width)

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Array:
        return self.settings().apply(params, inputs[0])


@register_layer("layer_norm")
class LayerNorm(RmsNorm):
    """Layer normalization over the last axis."""

    bias: bool = True
    """With an offset."""

    @override
    def settings(self) -> NormSettings:
        return NormSettings(kind="layer", eps=self.eps, bias=self.bias)

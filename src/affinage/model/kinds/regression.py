"""BYOL's objective."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from affinage.model.call import Loss
from affinage.model.kind import Context, NodeKind, node_kind
from affinage.model.parameter import Tree
from affinage.model.shape import Shape, ShapeMismatch

_SMALLEST = 1e-12  # length below which a vector has no direction


@node_kind("cosine_regression_loss")
class CosineRegressionLoss(NodeKind):
    """Every view's prediction against every other view's target, per example: 2 - 2 cos, summed over ordered pairs.

    With two views it is the symmetrised loss of Grill et al. (2020, equation 2). The count is of examples.
    """

    takes = ("predictions", "targets")
    is_loss = True

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        predictions, targets = inputs
        if len(predictions.dims) != 3 or predictions != targets:
            raise ShapeMismatch(f"expected two inputs [B, views, width] of one shape, got {predictions} and {targets}")
        if not isinstance(predictions.dims[1], int) or predictions.dims[1] < 2:
            raise ShapeMismatch(f"expected at least two views to compare, got {predictions}")
        return Shape(())

    @override
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Loss:
        predictions, targets = (_directions(x.astype(jnp.float32)) for x in inputs)
        size, views, _ = predictions.shape
        # Pair by pair: an einsum would round to bfloat16 on some chips what must be exact near a cosine of 1.
        cosines = jnp.sum(predictions[:, :, None] * targets[:, None], axis=-1)
        others = 1.0 - jnp.eye(views, dtype=jnp.float32)
        return Loss(jnp.sum((2.0 - 2.0 * cosines) * others[None]), jnp.float32(size))


def _directions(x: Float[Array, "B V D"]) -> Float[Array, "B V D"]:
    return x / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), _SMALLEST**2))

"""AdamW as Optax has it, with what a recipe adds: decay on matrices only, and moments in bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from affinage.recipe.training import OptimizerSettings

PyTree = Any

# A stack of layers or of experts does not make a matrix out of a vector, and the heads of a projection are one axis.
_STACKING = frozenset({"layers", "experts"})
_ONE_AXIS = {"kv_heads": "heads", "head_dim": "heads"}


def make_optimizer(settings: OptimizerSettings, logical_axes: PyTree) -> optax.GradientTransformation:
    """Gradient of the mean loss -> direction; the weights then move by minus the learning rate times it.

    The learning rate stays outside, because it follows the step of the run and not the number of updates that were
    applied. Clipping, moments and decay are computed in float32, whatever dtype weights and moments are stored in.

    Args:
        settings: of the recipe.
        logical_axes: tree of the parameters with a tuple of logical axis names for each leaf.
    """
    moments = optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        _stored_in(jnp.dtype(settings.moments), moments),
        optax.add_decayed_weights(settings.weight_decay, decay_mask(logical_axes)),
    )


def decay_mask(logical_axes: PyTree) -> PyTree:
    """True for parameters that are matrices: weights and embeddings, but no norms and biases."""
    return jax.tree.map(_is_matrix, logical_axes, is_leaf=lambda node: isinstance(node, tuple))


def _is_matrix(axes: tuple[str | None, ...]) -> bool:
    named = [_ONE_AXIS.get(axis, axis) for axis in axes if axis is not None and axis not in _STACKING]
    return len(set(named)) + axes.count(None) >= 2


def _stored_in(dtype: jnp.dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, computed in float32, with its state kept in `dtype` between steps.

    A bfloat16 moment follows its average as long as one step moves it by more than half a unit in the last place,
    2^-9 of its value: true for b2 up to about 0.99.
    """

    def cast(tree: PyTree, to: jnp.dtype) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(to) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)

    def init(params: PyTree) -> PyTree:
        return cast(inner.init(params), dtype)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        updates, state = inner.update(cast(grads, jnp.dtype("float32")), cast(state, jnp.dtype("float32")), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)

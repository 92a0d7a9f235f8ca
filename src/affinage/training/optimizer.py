"""AdamW as Optax has it, with what a recipe adds: decay on matrices only, and moments in bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from affinage.recipe.training import OptimizerSettings

PyTree = Any


def make_optimizer(settings: OptimizerSettings, decayed: PyTree) -> optax.GradientTransformation:
    """Gradient of the mean loss -> direction; the weights then move by minus the learning rate times it.

    The learning rate stays outside, because it follows the step of the run and not the number of updates that were
    applied. Clipping, moments and decay are computed in float32, whatever dtype weights and moments are stored in.

    Args:
        settings: of the recipe.
        decayed: tree of the parameters with True where weight decay applies; see `affinage.model.decayed`.
    """
    moments = optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        _stored_in(jnp.dtype(settings.moments), moments),
        optax.add_decayed_weights(settings.weight_decay, decayed),
    )


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

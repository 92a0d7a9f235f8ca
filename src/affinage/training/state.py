"""What a training run knows between two steps, and how it begins."""

import enum
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from affinage.parallel.sharding import param_shardings, replicated

PyTree = Any


class TrainState(NamedTuple):
    """Everything that a step changes. With the seed and the settings it determines the rest of the run.

    Attributes:
        step: int32 scalar, updates made so far, skipped ones included.
        params: nested dict of weights.
        opt_state: the optimizer's, a tree of Optax.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree


class Purpose(enum.IntEnum):
    """What a random draw is for. The numbers are part of every run's result: never reuse one."""

    INITIAL_WEIGHTS = 0
    DROPOUT = 1


def random_key(seed: int, purpose: Purpose, step: int | Int[Array, ""] = 0) -> jax.Array:
    """The key for all draws of one purpose in one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), step)


def abstract_state(
    abstract_params: PyTree, logical_axes: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    The optimizer's arrays are split like the parameter they belong to.
    """
    shardings = param_shardings(mesh, logical_axes, abstract_params)
    params = jax.tree.map(_with_sharding, abstract_params, shardings)
    opt_state = optax.tree.map_params(
        optimizer,
        _with_sharding,
        jax.eval_shape(optimizer.init, abstract_params),
        shardings,
        transform_non_params=lambda leaf: _with_sharding(leaf, replicated(mesh)),
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    return TrainState(cast(Any, step), params, opt_state)


def begin(abstract: TrainState, params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, with the given weights."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
    return TrainState(step, params, opt_state)


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

"""What a training run knows between two steps, and how it begins."""

import enum
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from affinage.model import abstract_params, logical_axes
from affinage.parallel import MeshLayout
from affinage.parallel.sharding import param_shardings, replicated
from affinage.training.frozen import Frozen
from affinage.training.optimizer import map_like_params
from affinage.training.spikes import LossWindow

PyTree = Any


class TrainState(NamedTuple):
    """Everything that a step changes. With the seed and the settings it determines the rest of the run.

    Attributes:
        step: int32 scalar, updates made so far, skipped ones included.
        params: nested dict of weights.
        opt_state: the optimizer's, a tree of Optax.
        ema_params: the moving average of `params`, in float32; None where the settings ask for none.
        window: the losses that a spike is told from; None where nobody looks.
        frozen: weights that no step changes, see `affinage.training.frozen`; None where there are none.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    ema_params: PyTree = None
    window: LossWindow | None = None
    frozen: PyTree = None

    def named(self) -> dict[str, PyTree]:
        """The trees by name, as checkpoints hold them: those that a step changes and that are not None."""
        return {name: tree for name, tree in self._asdict().items() if tree is not None and name != "frozen"}


class Purpose(enum.IntEnum):
    """What a random draw is for. The numbers are part of every run's result: never reuse one."""

    INITIAL_WEIGHTS = 0
    DROPOUT = 1
    ROUNDING = 2


def random_key(seed: int, purpose: Purpose, step: int | Int[Array, ""] = 0) -> jax.Array:
    """The key for all draws of one purpose in one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), step)


def abstract_state(
    held: Frozen,
    dtype: jnp.dtype,
    optimizer: optax.GradientTransformation,
    layout: MeshLayout,
    *,
    window: int = 0,
    ema: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    The arrays of the optimizer and of the moving average are split like the parameter they belong to. `window` is how
    many losses a spike is told from, 0 for none; `ema` says whether there is a moving average.
    """
    mesh, table, graph = layout.mesh, layout.table, held.graph
    abstract_weights, axes = abstract_params(held.trained, dtype), logical_axes(held.trained)
    # Of the two matrices of an adapter one is whole wherever the mesh splits only one side of its weight.
    shardings = param_shardings(mesh, axes, abstract_weights, table, mostly_split=held.adapters is None)
    params = jax.tree.map(_with_sharding, abstract_weights, shardings)
    frozen = None
    if held.held:
        whole_model = abstract_params(graph, dtype)
        frozen = jax.tree.map(
            _with_sharding, whole_model, param_shardings(mesh, logical_axes(graph), whole_model, table)
        )
    opt_state = map_like_params(
        lambda leaf, _, sharding: _with_sharding(leaf, sharding),
        jax.eval_shape(optimizer.init, abstract_weights),
        abstract_weights,
        shardings,
        others=lambda leaf: _with_sharding(leaf, replicated(mesh)),
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    averaged = jax.tree.map(_with_sharding, abstract_params(held.trained), shardings) if ema else None
    whole = partial(_with_sharding, sharding=replicated(mesh))
    losses = jax.tree.map(whole, jax.eval_shape(partial(LossWindow.empty, window))) if window else None
    return TrainState(cast(Any, step), params, opt_state, averaged, losses, frozen)


def begin(
    abstract: TrainState, params: PyTree, optimizer: optax.GradientTransformation, frozen: PyTree = None
) -> TrainState:
    """The state before the first step, with the given weights."""

    def others(params: PyTree) -> TrainState:
        averaged = None
        if abstract.ema_params is not None:
            averaged = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        window = None if abstract.window is None else LossWindow.empty(abstract.window.losses.size)
        return TrainState(jnp.zeros((), jnp.int32), None, optimizer.init(params), averaged, window)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract._replace(params=None, frozen=None))
    return jax.jit(others, out_shardings=shardings)(params)._replace(params=params, frozen=frozen)


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

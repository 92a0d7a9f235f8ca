"""What a training knows between two steps, which of its parameters it changes, and how it begins."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from affinage.checkpoint import CheckpointStore
from affinage.config.training import TrainSettings, TuningSettings
from affinage.model import Adapters, Declared, Graph, abstract_params, logical_axes
from affinage.model.graph import Node, analyze
from affinage.model.layer import BATCH, SEQUENCE
from affinage.parallel.sharding import MeshLayout, replicated
from affinage.training.optimizer import map_like_params

PyTree = Any
FROZEN = "frozen"  # the folder of the frozen weights' one checkpoint, beside those of a training
_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST = 16  # losses without which nothing stands out: of 16 the deviation is known to a third, of 64 to a sixth
_SMALLEST_SPREAD = 0.002  # of the median: below it a loss is as good as constant, and rounding would stand out


class LossWindow(NamedTuple):
    """The last finite losses, in a ring; a spike stands out from them."""

    losses: Float[Array, " W"]  # those not yet seen are NaN
    seen: Int[Array, ""]  # finite losses since the beginning

    @staticmethod
    def empty(size: int) -> "LossWindow":
        """Before the first step."""
        return LossWindow(jnp.full(size, jnp.nan, jnp.float32), jnp.zeros((), jnp.int32))

    def score(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """By how many robust standard deviations a loss is above the median of the window; 0 before 16 losses.

        The deviation is 1.4826 times the median absolute deviation, which half of the losses can be outliers without
        moving (Leys et al., 2013, J. Exp. Soc. Psych. 49), and at least 0.2 % of the median.
        """
        median = jnp.nanmedian(self.losses)
        spread = _NORMAL * jnp.nanmedian(jnp.abs(self.losses - median))
        score = (loss - median) / jnp.maximum(spread, jnp.maximum(_SMALLEST_SPREAD * jnp.abs(median), 1e-12))
        return jnp.where(self.seen >= min(_LEAST, self.losses.size), score, 0.0)

    def with_loss(self, loss: Float[Array, ""]) -> "LossWindow":
        """The window one step on. Spikes go in, so that it gets used to a new level; what is not finite does not."""
        finite = jnp.isfinite(loss)
        at = self.seen % self.losses.size
        losses = self.losses.at[at].set(jnp.where(finite, loss, self.losses[at]))
        return LossWindow(losses, self.seen + finite.astype(jnp.int32))


class TrainState(NamedTuple):
    """Everything that a step changes. With the seed and the settings it determines the rest of the run."""

    step: Int[Array, ""]  # int32, updates made so far, skipped ones included
    params: PyTree  # nested dict of the trainable weights
    opt_state: PyTree  # a tree of Optax
    ema_params: PyTree = None  # float32 moving average of `params`, see the setting `ema`
    window: LossWindow | None = None  # None if nobody looks for spikes
    frozen: PyTree = None  # weights under adapters, which no step changes

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


# ---- trainable and frozen parameters ----


@dataclass(frozen=True)
class ParamSplit:
    """The trainable and the frozen parameters of a training."""

    graph: Graph  # with the loss
    adapters: Adapters | None = None  # trained in place of the weights, which are frozen

    @property
    def trainable(self) -> Declared:
        """What declares the trained parameters."""
        return self.adapters or self.graph

    def full_params(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The tree that the graph is applied to."""
        return params if self.adapters is None else self.adapters.beside(frozen, params)

    def merge_lora(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The weights of the model that the trained parameters make, as any other model has them."""
        return params if self.adapters is None else self.adapters.merged(frozen, params)

    def step_flops(self, rows: int, context: int) -> int:
        """Floating point operations of one training step, by the convention of `affinage.model.graph`."""
        total = sum(node["training_flops"] for node in analyze(self.graph, rows, context))
        return total + sum(self.adapted_flops(node, rows, context) for node in self.graph.nodes)

    def adapted_flops(self, node: Node, rows: int, context: int) -> int:
        """What adapters add to the operations of a node's training step, less the gradient of its frozen matrices."""
        if self.adapters is None:
            return 0
        sizes = {BATCH: rows, SEQUENCE: context}
        products = node.layer.cost(node.takes, sizes).matmul * node.layers
        declared = jax.tree.leaves(self.adapters.parameters.get(node.name, {}))
        return 6 * rows * context * sum(p.active for p in declared) - products


def split_params(graph: Graph, settings: TrainSettings) -> ParamSplit:
    """Split the parameters of a graph as the settings require. Raises UserError for matrices that it does not have."""
    lora = settings.lora if isinstance(settings, TuningSettings) else None
    return ParamSplit(graph, None if lora is None else Adapters(graph, lora))


def kept_frozen(training: Path, abstract: PyTree) -> PyTree:
    """The frozen weights of a training, on the devices and shardings of `abstract`; None if that is None."""
    return None if abstract is None else CheckpointStore(training / FROZEN).restore(0, {"params": abstract})["params"]


# ---- the beginning ----


def abstract_state(
    split: ParamSplit, settings: TrainSettings, optimizer: optax.GradientTransformation, layout: MeshLayout
) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    The optimizer's arrays and the average are split like the parameter they belong to.
    """
    dtype, whole = jnp.dtype(settings.precision.params), replicated(layout.mesh)

    def on(sharding: NamedSharding, leaf: jax.ShapeDtypeStruct) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def placed(declared: Declared) -> PyTree:
        tree = abstract_params(declared, dtype)
        return jax.tree.map(on, layout.param_shardings(logical_axes(declared), tree), tree)

    params = placed(split.trainable)
    opt_state = map_like_params(
        lambda leaf, param: on(param.sharding, leaf),
        jax.eval_shape(optimizer.init, abstract_params(split.trainable, dtype)),
        params,
        others=lambda leaf: on(whole, leaf),
    )
    empty = jax.eval_shape(lambda: LossWindow.empty(settings.health.spike_window))
    return TrainState(
        on(whole, jax.ShapeDtypeStruct((), jnp.int32)),
        params,
        opt_state,
        None if settings.ema is None else jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), params),
        jax.tree.map(lambda leaf: on(whole, leaf), empty),
        None if split.adapters is None else placed(split.graph),
    )

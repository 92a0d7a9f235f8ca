"""The training step that updates each layer as soon as its gradient is there, so that no two layers' gradients exist.

The forward pass keeps the input of every layer. A loop from the last layer to the first computes one layer again, its
gradient, and its new weights and moments in place of the old ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from affinage.config.parallel import ParallelSettings, RematChoice, RematPreset
from affinage.config.training import TrainSettings
from affinage.errors import UserError
from affinage.model import ApplyConfig, Graph, apply, decayed, logical_axes, matrices
from affinage.model.forward import context_of
from affinage.model.graph import Node
from affinage.model.layer import Result
from affinage.training.frozen import Frozen
from affinage.training.optimizer import Weights, learning_rate, make_optimizer
from affinage.training.spikes import detect_spike
from affinage.training.state import Purpose, TrainState, random_key
from affinage.training.step import Batch, Metrics, Step, stored_like

PyTree = Any
_Updated = tuple[PyTree, PyTree, Array, Array]  # weights, optimizer's state, squared norm, 1 if it was applied
LAYERWISE_REMAT: RematPreset = "block"  # what it comes to, whatever `parallel.remat` says
_ELEMENTWISE = ("adamw", "lion")  # their state has one array like each weight, and nothing that layers share


def make_layerwise_step(held: Frozen, settings: TrainSettings, *, config: ApplyConfig, seed: int) -> Step:
    """Build the step, with the metrics of `make_train_step`, and torn: 1 where only some weights were updated.

    It is the same step but for two things that the gradient of all layers would be needed for: the norm that gradients
    are clipped to, `optimizer.max_grad_norm`, holds for each layer, and for everything outside the layers together, not
    for all; and a gradient that is not finite leaves the weights of its layer as they were, and so of the layers below
    it, not of those above it, which `Health` has the loop go back from. A loss that is not finite leaves all. Draws of
    stochastic rounding are others, too.

    Args:
        held: the graph, with a loss node and one repeated node.
        settings: of the training.
        config: compute dtype and how the graph is applied; its key is set here.
        seed: of the run, for dropout and rounding.

    Raises:
        UserError: for models and settings that it does not go with.
    """
    check_update(held, settings, in_stages=config.layers is not None)
    return _Layerwise(held.graph, _repeated(held.graph), settings, config, seed).step


def make_layerwise_optimizer(graph: Graph, settings: TrainSettings) -> optax.GradientTransformationExtraArgs:
    """Build what holds the optimizer's state of that step: `layers`, a state for each layer stacked along the first
    axis, and `rest`, the state of all other parameters. Only its `init` is used."""

    def init(params: PyTree) -> dict[str, PyTree]:
        name = _repeated(graph).name
        layers, rest = {name: params[name]}, {key: tree for key, tree in params.items() if key != name}
        return {
            "layers": jax.vmap(_optimizer(graph, settings, layers).init)(layers),
            "rest": _optimizer(graph, settings, rest).init(rest),
        }

    def update(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("layers are updated by the step itself")

    return optax.GradientTransformationExtraArgs(init, update)


def _repeated(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.repeat is not None)


def _optimizer(graph: Graph, settings: TrainSettings, params: PyTree) -> optax.GradientTransformationExtraArgs:
    weights = Weights(*({name: tree[name] for name in params} for tree in (decayed(graph), matrices(graph))))
    return make_optimizer(settings.optimizer, weights)


def check_update(held: Frozen, settings: TrainSettings, *, in_stages: bool) -> None:
    """Refuse `optimizer_in_backward` where it does not go with the model, the settings, or the stages of a pipeline.

    Raises:
        UserError: with what it goes with.
    """
    if not settings.optimizer_in_backward:
        return
    graph = held.graph
    nodes = [node for node in graph.nodes if node.repeat is not None]
    reasons = {
        f"the model has {len(nodes)} repeated nodes, not one": len(nodes) != 1,
        "the training has `ema`": settings.ema is not None,
        "the model has a mixture of experts": "experts" in str(graph.parameters),
        f"the optimizer is {settings.optimizer.name}": settings.optimizer.name not in _ELEMENTWISE,
        f"gradient_accumulation_steps is {settings.gradient_accumulation_steps}": settings.gradient_accumulation_steps
        > 1,
        "the mesh has a pipeline": in_stages,
        "the training has `lora`": held.adapters is not None,
        "the training holds a reference": held.reference,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(
                f"layers cannot be updated one by one: {reason}",
                where="optimizer_in_backward",
                fix="Leave out `optimizer_in_backward: true`; it takes one repeated node without experts, "
                f"{' or '.join(_ELEMENTWISE)}, gradient_accumulation_steps 1 and no pipeline.",
            )


def check_remat(settings: TrainSettings, remat: RematChoice) -> None:
    """Refuse what `optimizer_in_backward: true` would not do: it keeps the input of every layer, neither more nor less.

    Raises:
        UserError: for all but `block`, which is that, `none`, the default, and `auto`.
    """
    if settings.optimizer_in_backward and remat not in ("none", "block", "auto"):
        asked = f"`{remat}`" if isinstance(remat, str) else "activations by name"
        raise UserError(
            f"layers that are updated one by one keep their input and are computed again, whatever {asked} would keep",
            where="parallel.remat",
            fix="Leave `remat` out, or set it to block; or leave out `optimizer_in_backward: true`.",
        )


def as_it_is_done(settings: TrainSettings, parallel: ParallelSettings) -> ParallelSettings:
    """What a training does of `parallel`: layers that are updated one by one are computed again in any case."""
    if not settings.optimizer_in_backward:
        return parallel
    return parallel.model_copy(update={"remat": LAYERWISE_REMAT})


@dataclass(frozen=True, eq=False)
class _Layerwise:
    graph: Graph
    node: Node
    settings: TrainSettings
    config: ApplyConfig
    seed: int

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update of all weights."""
        name = self.node.name
        config = replace(self.config, key=random_key(self.seed, Purpose.DROPOUT, state.step))
        rest = {key: tree for key, tree in state.params.items() if key != name}
        first, first_back = jax.vjp(lambda rest: self._first(rest, batch, config), rest)
        layer = self._layer(batch, config, first)
        last, inputs = jax.lax.scan(
            lambda x, xs: (layer(xs[0], x, xs[1]), x), first, (state.params[name], jnp.arange(self.node.layers))
        )
        loss = jax.value_and_grad(lambda rest, y: self._loss(rest, y, batch, config), argnums=(0, 1), has_aux=True)
        (_, sums), (rest_grads, grad) = loss(rest, last)
        _, loss_tokens = sums["loss"]
        means = {key: total / jnp.maximum(count, 1.0) for key, (total, count) in sums.items()}
        window, may_update, spike = detect_spike(state.window, means["loss"], self.settings.health)
        update = self._updater(state, loss_tokens, may_update)

        layers, opt_layers, grad, squares, applied = self._backward(state, update, layer, inputs, grad)
        (below,) = first_back(grad)
        rest_grads = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32), rest_grads, below)
        rest, opt_rest, square, good = update(rest, state.opt_state["rest"], rest_grads, 0)

        norm, applied = jnp.sqrt(squares + square), applied + good
        new = TrainState(
            state.step + 1,
            {**rest, name: layers},
            {"layers": opt_layers, "rest": opt_rest},
            state.ema_params,
            window,
        )
        healthy = may_update & jnp.isfinite(norm)
        return new, {
            **means,
            "grad_norm": norm,
            "learning_rate": self._rate(state),
            "loss_tokens": loss_tokens,
            "skipped": 1.0 - healthy.astype(jnp.float32),
            "torn": (~healthy & (applied > 0)).astype(jnp.float32),
            **spike,
        }

    def _rate(self, state: TrainState) -> Float[Array, ""]:
        return jnp.asarray(learning_rate(self.settings.schedule, self.settings.steps)(state.step), jnp.float32)

    def _first(self, rest: PyTree, batch: Batch, config: ApplyConfig) -> Array:
        """The input of the first layer."""
        (name,) = self.node.inputs
        value: Array = apply(self.graph, rest, batch, replace(config, until=name)).values[name]
        return config.constrain(value, ("batch", "residual", "width"))

    def _layer(self, batch: Batch, config: ApplyConfig, first: Array) -> Callable[[PyTree, Array, Any], Array]:
        context = context_of(self.node, {}, batch, config)
        context = replace(context, prepared=self.node.layer.prepare((first,), context))

        def layer(weights: PyTree, x: Array, index: Array) -> Array:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            result = self.node.layer.apply(weights, (x,), replace(context, key=key, layer=index))
            return result.value if isinstance(result, Result) else result

        return layer

    def _loss(self, rest: PyTree, y: Array, batch: Batch, config: ApplyConfig) -> tuple[Float[Array, ""], Any]:
        """The loss of what comes out of the last layer."""
        outputs = apply(self.graph, rest, batch, replace(config, layers=lambda *_: Result(y)))
        loss = outputs.values[self.graph.loss]
        return loss.sum, {"loss": (loss.sum, loss.count), **outputs.metrics}

    def _updater(self, state: TrainState, loss_tokens: Array, may_update: Array) -> Callable[..., _Updated]:
        """(weights, their optimizer's state, gradients of the sum, number of the draws for rounding) -> `_Updated`."""
        rate, rounds = self._rate(state), self.settings.precision.rounding == "stochastic"
        key = random_key(self.seed, Purpose.ROUNDING, state.step)

        def update(params: PyTree, opt_state: PyTree, grads: PyTree, number: Any) -> _Updated:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.maximum(loss_tokens, 1.0), grads)
            norm = optax.tree.norm(grads)
            optimizer = _optimizer(self.graph, self.settings, params)
            direction, new_state = optimizer.update(grads, opt_state, params, norm=norm)
            moved = jax.tree.map(lambda p, d: p.astype(jnp.float32) - rate * d, params, direction)
            new = stored_like(params, moved, jax.random.fold_in(key, number) if rounds else None)
            good = may_update & jnp.isfinite(norm)
            chosen = jax.tree.map(lambda n, o: jnp.where(good, n, o), (new, new_state), (params, opt_state))
            return *chosen, norm**2, good.astype(jnp.int32)

        return update

    def _backward(
        self, state: TrainState, update: Callable[..., _Updated], layer: Callable[..., Array], inputs: Array, grad: Any
    ) -> tuple[PyTree, PyTree, Array, Array, Array]:
        """Of all layers after their update: weights, optimizer's states, gradient of the first's input, squared norm,
        and how many were updated."""
        name, last = self.node.name, self.node.layers - 1
        axes = jax.tree.map(lambda a: a[1:], logical_axes(self.graph)[name], is_leaf=_is_axes)

        def one(number: Any, carry: Any) -> Any:
            params, states, grad, squares, applied = carry
            index = last - number
            weights = _at(params, index)
            _, pullback = jax.vjp(lambda w, x: layer(w, x, index), weights, _at(inputs, index))
            grads, grad = pullback(grad)
            pinned = jax.tree.map(lambda a, g: self.config.constrain(g, a), axes, grads, is_leaf=_is_axes)
            new, new_state, square, good = update({name: weights}, _at(states, index), {name: pinned}, number + 1)
            return (
                _put(params, new[name], index),
                _put(states, new_state, index),
                grad,
                squares + square,
                applied + good,
            )

        zero = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        begun = (state.params[name], state.opt_state["layers"], grad, *zero)
        done: tuple[PyTree, PyTree, Array, Array, Array] = jax.lax.fori_loop(0, last + 1, one, begun)
        return done


def _is_axes(tree: Any) -> bool:
    return isinstance(tree, tuple)


def _at(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def _put(tree: PyTree, new: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda a, n: jax.lax.dynamic_update_index_in_dim(a, n, index, 0), tree, new)

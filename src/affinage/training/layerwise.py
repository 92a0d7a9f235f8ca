"""The training step that updates each layer as soon as its gradient is there, so that no two layers' gradients exist.

The forward pass keeps the input of every layer. A loop from the last layer to the first computes one layer again, its
gradient, and its new weights and moments in place of the old ones.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from affinage.config.training import RematPreset, TrainSettings
from affinage.errors import UserError
from affinage.model import ApplyConfig, Graph, apply, decayed, logical_axes
from affinage.model.forward import context_of
from affinage.model.graph import Node
from affinage.model.layer import Result
from affinage.training.optimizer import learning_rate, make_optimizer
from affinage.training.state import ParamSplit, Purpose, TrainState, random_key
from affinage.training.step import Batch, Metrics, Step, apply_gradient, detect_spike, means_of, moved_ema, where

PyTree = Any
LAYERWISE_REMAT: RematPreset = "block"  # what it comes to, whatever `parallel.remat` is


def make_layerwise_step(split: ParamSplit, settings: TrainSettings, *, config: ApplyConfig, seed: int) -> Step:
    """Build the step, with the arguments and metrics of `make_train_step`, and torn: 1 if only some weights moved.

    It is the same step but for what would need the gradient of all layers: `optimizer.max_grad_norm` holds for each
    layer, and for everything outside the layers together; and a gradient that is not finite leaves the weights of its
    layer and of those below as they were, not of those above, from which `HealthMonitor` rolls back. A loss that is not
    finite leaves all. The draws of stochastic rounding are others, too.

    Raises:
        UserError: for models and settings that it does not go with.
    """
    check_update(split, settings, in_stages=config.layers is not None)
    graph, schedule = split.graph, learning_rate(settings.schedule, settings.steps)
    node = _repeated(graph)
    name, last_layer = node.name, node.layers - 1
    layer_axes = jax.tree.map(lambda axes: axes[1:], logical_axes(graph)[name], is_leaf=lambda x: isinstance(x, tuple))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with_key = replace(config, key=random_key(seed, Purpose.DROPOUT, state.step))
        rest = {key: tree for key, tree in state.params.items() if key != name}

        def first_input(rest: PyTree) -> Array:
            (before,) = node.inputs
            value: Array = apply(graph, rest, batch, replace(with_key, until=before)).values[before]
            return config.layout.constrain(value, ("batch", "residual", "width"))

        def loss_after(rest: PyTree, last: Array) -> tuple[Float[Array, ""], Any]:
            outputs = apply(graph, rest, batch, replace(with_key, layers=lambda *_: Result(last)))
            loss = outputs.values[graph.loss]
            return loss.sum, {"loss": (loss.sum, loss.count), **outputs.metrics}

        first, first_pullback = jax.vjp(first_input, rest)
        context = context_of(node, {}, batch, with_key)
        context = replace(context, prepared=node.layer.prepare((first,), context))

        def layer(weights: PyTree, x: Array, index: Any) -> Array:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            result = node.layer.apply(weights, (x,), replace(context, key=key, layer=index))
            return result.value if isinstance(result, Result) else result

        last, inputs = jax.lax.scan(
            lambda x, xs: (layer(xs[0], x, xs[1]), x), first, (state.params[name], jnp.arange(node.layers))
        )
        differentiated = jax.value_and_grad(loss_after, argnums=(0, 1), has_aux=True)
        (_, sums), (rest_grads, grad) = differentiated(rest, last)
        loss_tokens, means = sums["loss"][1], means_of(sums)
        window, may_update, spike = detect_spike(state.window, means["loss"], settings.health)
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        key = random_key(seed, Purpose.ROUNDING, state.step)

        def update(params: PyTree, opt_state: PyTree, grads: PyTree, number: Any) -> tuple[PyTree, PyTree, Array]:
            """New weights, optimizer state, and [squared norm of their gradient, 1 if they were updated]."""
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.maximum(loss_tokens, 1.0), grads)
            norm, old = optax.tree.norm(grads), (params, opt_state)
            healthy = may_update & jnp.isfinite(norm)
            optimizer, own_key = _optimizer(graph, settings, params), jax.random.fold_in(key, number)
            new = apply_gradient(optimizer, settings, old, grads, norm, rate, own_key)
            return *where(healthy, new, old), jnp.stack([norm**2, healthy.astype(jnp.float32)])

        def one_layer(number: Any, carry: Any) -> Any:
            params, states, grad, total = carry
            index = last_layer - number
            weights = _at(params, index)
            _, pullback = jax.vjp(lambda w, x: layer(w, x, index), weights, _at(inputs, index))
            grads, grad = pullback(grad)
            grads = jax.tree.map(config.layout.constrain, grads, layer_axes)
            new, new_state, facts = update({name: weights}, _at(states, index), {name: grads}, number + 1)
            return _put(params, new[name], index), _put(states, new_state, index), grad, total + facts

        carry = (state.params[name], state.opt_state["layers"], grad, jnp.zeros(2, jnp.float32))
        layers, opt_layers, grad, total = jax.lax.fori_loop(0, last_layer + 1, one_layer, carry)
        (below,) = first_pullback(grad)
        rest_grads = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32), rest_grads, below)
        rest, opt_rest, facts = update(rest, state.opt_state["rest"], rest_grads, 0)

        square, updated = total + facts
        norm, params = jnp.sqrt(square), {**rest, name: layers}
        healthy = may_update & jnp.isfinite(norm)
        ema_params = where(healthy, moved_ema(state.ema_params, params, settings), state.ema_params)
        opt_state = {"layers": opt_layers, "rest": opt_rest}
        skipped, torn = 1.0 - healthy.astype(jnp.float32), (~healthy & (updated > 0)).astype(jnp.float32)
        report = {"grad_norm": norm, "learning_rate": rate, "skipped": skipped, "torn": torn, **spike}
        new = TrainState(state.step + 1, params, opt_state, ema_params, window, state.frozen)
        return new, {**means, **report, "loss_tokens": loss_tokens}

    return step


def make_layerwise_optimizer(graph: Graph, settings: TrainSettings) -> optax.GradientTransformation:
    """Build what holds the optimizer's state of that step: `layers`, a state for each layer stacked along the first
    axis, and `rest`, the state of all other parameters. Only its `init` is used."""

    def init(params: PyTree) -> dict[str, PyTree]:
        name = _repeated(graph).name
        layers, rest = {name: params[name]}, {key: tree for key, tree in params.items() if key != name}
        of_layers = jax.vmap(_optimizer(graph, settings, layers).init)(layers)
        return {"layers": of_layers, "rest": _optimizer(graph, settings, rest).init(rest)}

    return optax.GradientTransformation(init, optax.identity().update)


def check_update(split: ParamSplit, settings: TrainSettings, *, in_stages: bool) -> None:
    """Refuse `optimizer_in_backward` where it does not go with the model, the settings, or the stages of a pipeline."""
    if not settings.optimizer_in_backward:
        return
    reasons = {
        "the model has not one repeated node": sum(node.repeat is not None for node in split.graph.nodes) != 1,
        "the model has a mixture of experts": "experts" in str(split.graph.parameters),
        # Another one's state may have arrays that layers share.
        f"the optimizer is {settings.optimizer.name}, not adamw": settings.optimizer.name != "adamw",
        "gradient_accumulation_steps is not 1": settings.gradient_accumulation_steps > 1,
        "the mesh has a pipeline": in_stages,
        "the training has `lora`": split.adapters is not None,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        what, fix = f"layers cannot be updated one by one: {reason}", "Leave out `optimizer_in_backward: true`."
        raise UserError(what, where="optimizer_in_backward", fix=fix)


def _repeated(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.repeat is not None)


def _optimizer(graph: Graph, settings: TrainSettings, params: PyTree) -> optax.GradientTransformation:
    return make_optimizer(settings.optimizer, {name: decayed(graph)[name] for name in params})


def _at(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def _put(tree: PyTree, new: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda a, n: jax.lax.dynamic_update_index_in_dim(a, n, index, 0), tree, new)

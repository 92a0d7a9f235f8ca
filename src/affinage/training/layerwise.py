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
from affinage.model import Call, Graph, apply, decayed, logical_axes, matrices
from affinage.model.kind import Result
from affinage.model.module import context_of
from affinage.model.node import Node
from affinage.training.frozen import Frozen
from affinage.training.optimizer import Weights, make_optimizer
from affinage.training.rounding import stored_like
from affinage.training.schedule import learning_rate
from affinage.training.spikes import judged
from affinage.training.state import Purpose, TrainState, random_key
from affinage.training.step import Batch, Metrics, Step

PyTree = Any
_Updated = tuple[PyTree, PyTree, Array, Array]
LAYERWISE_REMAT: RematPreset = "block"  # what it comes to, whatever `parallel.remat` says
_ELEMENTWISE = ("adamw", "lion")  # their state has one array like each weight, and nothing that layers share


def make_layerwise_step(held: Frozen, settings: TrainSettings, *, call: Call, seed: int) -> Step:
    """Build the step, with the metrics of `make_train_step`, and torn: 1 where only some weights were updated.

    It is the same step but for two things that the gradient of all layers would be needed for: the norm that gradients
    are clipped to, `optimizer.max_grad_norm`, holds for each layer, and for everything outside the layers together, not
    for all; and a gradient that is not finite leaves the weights of its layer as they were, and so of the layers below
    it, not of those above it, which `Health` has the loop go back from. A loss that is not finite leaves all. Draws of
    stochastic rounding are others, too.

    Args:
        held: the graph, with a loss node and one repeated node.
        settings: of the training.
        call: compute dtype and how the graph is applied; its key is set here.
        seed: of the run, for dropout and rounding.

    Raises:
        UserError: for models and settings that it does not go with.
    """
    check_update(held, settings, in_stages=call.layers is not None)
    (node,) = (node for node in held.graph.nodes if node.repeat is not None)
    return _Layerwise(held.graph, node, settings, call, seed).step


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
        "the model has moving averages": bool(graph.averages),
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
    call: Call
    seed: int

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update of all weights."""
        name = self.node.name
        call = replace(self.call, key=random_key(self.seed, Purpose.DROPOUT, state.step))
        outer = {key: tree for key, tree in state.params.items() if key != name}
        first, first_back = jax.vjp(lambda outer: self._first(outer, batch, call), outer)
        layer = self._layer(batch, call, first)
        last, inputs = jax.lax.scan(
            lambda x, xs: (layer(xs[0], x, xs[1]), x), first, (state.params[name], jnp.arange(self.node.layers))
        )
        rest = jax.value_and_grad(lambda outer, y: self._rest(outer, y, batch, call), argnums=(0, 1), has_aux=True)
        (_, sums), (outer_grads, grad) = rest(outer, last)
        _, targets = sums["loss"]
        means = {key: total / jnp.maximum(count, 1.0) for key, (total, count) in sums.items()}
        window, sound, told = judged(state.window, means["loss"], self.settings.health)
        update = self._updater(state, targets, sound)
        params, moments, grad, squares, updated = self._backward(state, update, layer, inputs, grad)
        (below,) = first_back(grad)
        outer_grads = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32), outer_grads, below)
        new_outer, opt_outer, square, good = update(outer, _part(state, tuple(outer)), outer_grads, 0)
        norm, updated = jnp.sqrt(squares + square), updated + good
        new = TrainState(
            state.step + 1,
            {**new_outer, name: params},
            _together(state, opt_outer, name, moments),
            state.averages,
            window,
        )
        healthy = sound & jnp.isfinite(norm)
        return new, {
            **means,
            "grad_norm": norm,
            "learning_rate": self._rate(state),
            "targets": targets,
            "skipped": 1.0 - healthy.astype(jnp.float32),
            "torn": (~healthy & (updated > 0)).astype(jnp.float32),
            **told,
        }

    def _rate(self, state: TrainState) -> Float[Array, ""]:
        return jnp.asarray(learning_rate(self.settings.schedule, self.settings.steps)(state.step), jnp.float32)

    def _first(self, outer: PyTree, batch: Batch, call: Call) -> Array:
        """What goes into the first layer."""
        (name,) = self.node.inputs
        value: Array = apply(self.graph, outer, batch, replace(call, until=name)).values[name]
        return call.constrain(value, ("batch", "residual", "width"))

    def _layer(self, batch: Batch, call: Call, first: Array) -> Callable[[PyTree, Array, Any], Array]:
        context = context_of(self.node, {}, batch, call)
        context = replace(context, prepared=self.node.kind.prepare((first,), context))

        def layer(weights: PyTree, x: Array, index: Array) -> Array:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            result = self.node.kind.apply(weights, (x,), replace(context, key=key, layer=index))
            return result.value if isinstance(result, Result) else result

        return layer

    def _rest(self, outer: PyTree, y: Array, batch: Batch, call: Call) -> tuple[Float[Array, ""], Any]:
        """The loss of what comes out of the last layer."""
        outputs = apply(self.graph, outer, batch, replace(call, layers=lambda *_: Result(y)))
        loss = outputs.values[self.graph.loss]
        return loss.sum, {"loss": (loss.sum, loss.count), **outputs.metrics}

    def _updater(self, state: TrainState, targets: Array, healthy: Array) -> Callable[..., _Updated]:
        """(weights, their part of the optimizer's state, gradients of the sum, number) -> new ones, squared norm, done.

        The last is 0 where they were left as they are, else 1.
        """
        rate, rounds = self._rate(state), self.settings.precision.rounding == "stochastic"
        key = random_key(self.seed, Purpose.ROUNDING, state.step)

        def update(
            params: PyTree, opt_state: PyTree, grads: PyTree, number: Any
        ) -> tuple[PyTree, PyTree, Array, Array]:
            optimizer = make_optimizer(self.settings.optimizer, _weights(self.graph, tuple(params)))
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.maximum(targets, 1.0), grads)
            norm = optax.tree.norm(grads)
            direction, new_state = optimizer.update(grads, opt_state, params, norm=norm)
            moved = jax.tree.map(lambda p, d: p.astype(jnp.float32) - rate * d, params, direction)
            new = stored_like(params, moved, jax.random.fold_in(key, number) if rounds else None)
            good = healthy & jnp.isfinite(norm)
            chosen = jax.tree.map(lambda n, o: jnp.where(good, n, o), (new, new_state), (params, opt_state))
            return *chosen, norm**2, good.astype(jnp.int32)

        return update

    def _backward(
        self, state: TrainState, update: Callable[..., Any], layer: Callable[..., Array], inputs: Array, grad: Array
    ) -> tuple[PyTree, list[PyTree], Array, Array, Array]:
        """Of all layers after their update: weights, moments, gradient of the first's input, squared norm, how many."""
        name, last = self.node.name, self.node.layers - 1
        axes = jax.tree.map(lambda a: a[1:], logical_axes(self.graph)[name], is_leaf=_is_axes)

        def turn(number: Any, carry: Any) -> Any:
            params, moments, grad, squares, updated = carry
            index = last - number
            weights, opt_state = _at(params, index), _part(state, (name,), [_at(m, index) for m in moments])
            _, pullback = jax.vjp(lambda w, x: layer(w, x, index), weights, _at(inputs, index))
            grads, grad = pullback(grad)
            pinned = jax.tree.map(lambda a, g: self.call.constrain(g, a), axes, grads, is_leaf=_is_axes)
            new, new_state, square, good = update({name: weights}, opt_state, {name: pinned}, number + 1)
            placed = [_put(m, n[name], index) for m, n in zip(moments, _trees(new_state, {name}), strict=True)]
            return _put(params, new[name], index), placed, grad, squares + square, updated + good

        moments = [tree[name] for tree in _trees(state.opt_state, set(state.params))]
        begun = (state.params[name], moments, grad, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
        done: tuple[PyTree, list[PyTree], Array, Array, Array] = jax.lax.fori_loop(0, last + 1, turn, begun)
        return done


def _weights(graph: Graph, names: tuple[str, ...]) -> Weights:
    def part(tree: PyTree) -> PyTree:
        return {name: tree[name] for name in names}

    return Weights(part(decayed(graph)), part(matrices(graph)))


def _is_axes(tree: Any) -> bool:
    return isinstance(tree, tuple)


def _trees(opt_state: PyTree, names: set[str]) -> list[PyTree]:
    """The trees like the parameters in an optimizer's state, in their order."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda tree: isinstance(tree, dict) and set(tree) == names)
    return [leaf for leaf in leaves if isinstance(leaf, dict)]


def _part(state: TrainState, names: tuple[str, ...], given: list[PyTree] | None = None) -> PyTree:
    """The optimizer's state of some parameters; `given` are their moments, by default those that the state has."""
    every = set(state.params)
    moments = iter(given or ())

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, dict):
            return leaf
        return {names[0]: next(moments)} if given is not None else {name: leaf[name] for name in names}

    return jax.tree.map(one, state.opt_state, is_leaf=lambda tree: isinstance(tree, dict) and set(tree) == every)


def _together(state: TrainState, outer: PyTree, name: str, moments: list[PyTree]) -> PyTree:
    """The optimizer's state of all parameters from that of those outside the layers, and the layers' moments."""
    names, given = set(state.params) - {name}, iter(moments)

    def one(leaf: Any) -> Any:
        return {**leaf, name: next(given)} if isinstance(leaf, dict) else leaf

    return jax.tree.map(one, outer, is_leaf=lambda tree: isinstance(tree, dict) and set(tree) == names)


def _at(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def _put(tree: PyTree, new: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda a, n: jax.lax.dynamic_update_index_in_dim(a, n, index, 0), tree, new)

"""Where a step becomes unhealthy: the first parameter, layer or gradient that is not finite."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from affinage.cluster.processes import Processes
from affinage.errors import UserError
from affinage.model import ApplyConfig, Graph, apply
from affinage.model.forward import apply_layers
from affinage.model.graph import Node
from affinage.model.layer import LayerContext, Result
from affinage.training.health import TrainingDiverged
from affinage.training.state import TrainState
from affinage.training.trainer import Trainer

PyTree = Any
_Flags = dict[str, list[Bool[Array, ""]]]  # by node, for each of its layers and itself: whether it is finite


def explain(trainer: Trainer, state: TrainState, error: TrainingDiverged, data_offset: int) -> UserError:
    """The error for the user, with a diagnosis of the step at which the training diverged, also in diagnosis.json."""
    job, split, config, batch_number = trainer.job, trainer.split, trainer.apply_config, error.step + data_offset
    batch = trainer.put_share(next(trainer.batches(batch_number - 1)))
    if split.reference:
        batch = jax.jit(lambda frozen, batch: split.with_reference(frozen, batch, config))(state.frozen, batch)
    params = split.full_params(state.params, state.frozen)
    found = {
        "step": error.step,
        **diagnose(job.graph, config, params, state.ema_params, batch),
        "learning_rate": trainer.learning_rate(error.step),
        "documents": None if job.documents is None else job.documents(batch_number),
    }
    path = job.folder / "diagnosis.json"
    if Processes.current.first:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    names = ("first", "learning_rate", "gradient_norms", "documents")
    listed = "".join(f"\n    {name}: {found[name]}"[:305] for name in names)
    return UserError(
        f"{error}{listed}",
        where=str(path),
        fix="Look at the documents and the curve of grad_norm before it. A lower schedule.peak_lr, more warm-up or "
        "a smaller optimizer.max_grad_norm help against divergence; health.on_spike: rollback against bad batches.",
    )


def diagnose(
    graph: Graph, config: ApplyConfig, params: PyTree, ema_params: PyTree, batch: Mapping[str, Array]
) -> dict[str, Any]:
    """Look for what is not finite in one forward and backward pass.

    Returns:
        first: in words, what is not finite first: a weight, else a value on the way forward, else a gradient on the
        way back; "nothing" if all are finite. gradient_norms: {node: norm}.
    """

    def loss(params: PyTree) -> tuple[Array, _Flags]:
        flags: _Flags = {node.name: [] for node in graph.nodes}

        def layers(node: Node, params: PyTree, x: Any, context: LayerContext) -> Result:
            result = Result(x)
            context = replace(context, prepared=node.layer.prepare((x,), context))
            for layer in range(node.layers):
                own = jax.tree.map(lambda w, at=layer: w[at : at + 1], params)
                step = apply_layers(replace(node, repeat=1), own, result.value, context, layer)
                flags[node.name].append(_finite(step.value))
                result = Result(step.value, None, {}, {})
            return result

        outputs = apply(graph, params, batch, replace(config, key=None, ema_params=ema_params, layers=layers))
        for node in graph.nodes:
            flags[node.name].append(_finite(outputs.values.get(node.name)))
        total = outputs.values[graph.loss]
        return total.sum / jnp.maximum(total.count, 1.0), flags

    def examine(params: PyTree) -> tuple[_Flags, _Flags, _Flags, dict[str, Array]]:
        grads, values = jax.grad(loss, has_aux=True)(params)
        norms = {name: optax.tree.norm(tree) for name, tree in grads.items()}
        return _flags(graph, params), values, _flags(graph, grads), norms

    weights, values, gradients, norms = jax.device_get(jax.jit(examine)(params))
    trained = [node for node in graph.nodes if node.name in norms]
    first = [f"the weights of {part}" for node in trained for part in _sick(node, weights)]
    first += [f"the value of {part}" for node in graph.nodes for part in _sick(node, values)]
    first += [f"the gradient of {part}" for node in reversed(trained) for part in reversed(_sick(node, gradients))]
    # Finite numbers may have a norm that is not.
    sick_norms = (node.name for node in reversed(trained) if not jnp.isfinite(norms[node.name]))
    first += [f"the norm of the gradient of {name}" for name in sick_norms]
    return {"first": (*first, "nothing")[0], "gradient_norms": {n.name: float(norms[n.name]) for n in trained}}


def _flags(graph: Graph, tree: PyTree) -> _Flags:
    """Whether what belongs to each node is finite; of repeated ones what belongs to each of their layers."""

    def of_layers(node: Node, own: PyTree) -> list[Bool[Array, ""]]:
        if node.repeat is None:
            return [_finite(own)]
        return [_finite(jax.tree.map(lambda leaf, at=layer: leaf[at], own)) for layer in range(node.layers)]

    return {node.name: of_layers(node, tree[node.name]) for node in graph.nodes if node.name in tree}


def _sick(node: Node, flags: _Flags) -> list[str]:
    """Those parts of a node, its layers or itself, that are not finite."""
    layers = (
        [] if node.repeat is None else [f"{node.name}, layer {n} of {node.layers}" for n in range(1, node.layers + 1)]
    )
    return [part for part, finite in zip([*layers, node.name], flags[node.name]) if not finite]


def _finite(tree: Any) -> Bool[Array, ""]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all() if floats else jnp.array(True)

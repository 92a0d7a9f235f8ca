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
_Finite = dict[str, list[Bool[Array, ""]]]  # by node: whether it is finite, for each layer


def explain(trainer: Trainer, state: TrainState, error: TrainingDiverged, data_offset: int) -> UserError:
    """The error for the user, with a diagnosis of the step at which the training diverged, also in diagnosis.json."""
    job, held, config, batch_number = trainer.job, trainer.held, trainer.apply_config, error.step + data_offset
    batch = trainer.put_share(next(trainer.batches(batch_number - 1)))
    if held.reference:
        batch = jax.jit(lambda frozen, batch: held.with_reference(frozen, batch, config))(state.frozen, batch)
    found = {
        "step": error.step,
        **diagnose(job.graph, config, held.whole(state.params, state.frozen), state.ema_params, batch),
        "learning_rate": trainer.learning_rate(error.step),
        "documents": None if job.documents is None else job.documents(batch_number),
    }
    if Processes.current.first:
        (job.folder / "diagnosis.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return error.explained(job.folder, found)


def diagnose(
    graph: Graph, config: ApplyConfig, params: PyTree, ema_params: PyTree, batch: Mapping[str, Array]
) -> dict[str, Any]:
    """Look for what is not finite in one forward and backward pass.

    Returns:
        first: in words, what is not finite first: a weight, else a value on the way forward, else a gradient on the
        way back; "nothing" if all are finite. gradient_norms: {node: norm}.
    """
    finite_weights = jax.jit(lambda params: _sound_parts(graph, params))(params)
    values, gradients, norms = jax.jit(lambda *of: _passes(graph, config, *of))(params, ema_params, batch)
    gradient_norms = {name: float(norms[name]) for name in _in_order(graph, norms)}
    forward: dict[str, bool] = {}
    for node in graph.nodes:
        for layer, finite in enumerate(values["layers"].get(node.name, []), 1):
            forward[_part(node, layer)] = bool(finite)
        forward[node.name] = bool(values["nodes"].get(node.name, True))
    weights, back = _named(graph, finite_weights), reversed(_named(graph, gradients))
    first = next((f"the weights of {name}" for name, finite in weights if not finite), None)
    first = first or next((f"the value of {name}" for name, finite in forward.items() if not finite), None)
    first = first or next((f"the gradient of {name}" for name, finite in back if not finite), None)
    # Finite numbers may have a norm that is not.
    large = (name for name in reversed(gradient_norms) if not jnp.isfinite(gradient_norms[name]))
    first = first or next((f"the norm of the gradient of {name}" for name in large), "nothing")
    return {"first": first, "gradient_norms": gradient_norms}


def _passes(
    graph: Graph, config: ApplyConfig, params: PyTree, ema_params: PyTree, batch: Mapping[str, Array]
) -> tuple[dict[str, Any], _Finite, dict[str, Array]]:
    """Whether the values and the gradients of all nodes, and of all layers of repeated nodes, are finite.

    And the norms of gradients by node.
    """

    def loss(params: PyTree) -> tuple[Array, dict[str, Any]]:
        seen: dict[str, list[Bool[Array, ""]]] = {}

        def layers(node: Node, params: PyTree, x: Any, context: LayerContext) -> Result:
            result = Result(x)
            context = replace(context, prepared=node.layer.prepare((x,), context))
            for layer in range(node.layers):
                own = jax.tree.map(lambda w, at=layer: w[at : at + 1], params)
                step = apply_layers(replace(node, repeat=1), own, result.value, context, layer)
                seen.setdefault(node.name, []).append(_finite(step.value))
                result = Result(step.value, None, {}, {})
            return result

        outputs = apply(graph, params, batch, replace(config, key=None, ema_params=ema_params, layers=layers))
        nodes = {node.name: _finite(outputs.values[node.name]) for node in graph.nodes if node.name in outputs.values}
        total = outputs.values[graph.loss]
        return total.sum / jnp.maximum(total.count, 1.0), {"nodes": nodes, "layers": seen}

    grads, seen = jax.grad(loss, has_aux=True)(params)
    norms = {name: optax.tree.norm(grads[name]) for name in _in_order(graph, grads)}
    return seen, _sound_parts(graph, grads), norms


def _sound_parts(graph: Graph, tree: PyTree) -> _Finite:
    """Whether what belongs to each node is finite; of repeated ones what belongs to each of their layers."""
    return {node.name: _of_layers(node, tree[node.name]) for node in graph.nodes if node.name in tree}


def _of_layers(node: Node, tree: PyTree) -> list[Bool[Array, ""]]:
    if node.repeat is None:
        return [_finite(tree)]
    return [_finite(jax.tree.map(lambda leaf, at=layer: leaf[at], tree)) for layer in range(node.layers)]


def _named(graph: Graph, sound: _Finite) -> list[tuple[str, bool]]:
    nodes = [node for node in graph.nodes if node.name in sound]
    return [(_part(node, n), bool(finite)) for node in nodes for n, finite in enumerate(sound[node.name], 1)]


def _part(node: Node, layer: int) -> str:
    return node.name if node.repeat is None else f"{node.name}, layer {layer} of {node.layers}"


def _in_order(graph: Graph, tree: PyTree) -> list[str]:
    return [node.name for node in graph.nodes if node.name in tree]


def _finite(tree: Any) -> Bool[Array, ""]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all() if floats else jnp.array(True)

"""A pass of a model with layers of plug-ins, traced before anything runs, so that their mistakes are named."""

import dataclasses
import warnings
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from affinage.config.training import LogicalAxis
from affinage.errors import UserError, UserWarned
from affinage.model import ApplyConfig, Graph, Loss, abstract_params
from affinage.model.apply_config import PyTree
from affinage.model.forward import apply_part, batch_shapes
from affinage.model.graph import Node
from affinage.model.layer import Batch, Cost
from affinage.model.layers.embedding import LearnedPositions
from affinage.registry import calling, is_foreign

AXES = get_args(LogicalAxis)


def check_rows(graph: Graph, length: int) -> None:
    """Check a model, see `check_model`, that is to be trained on rows of `length` tokens.

    UserError: it learns fewer positions.
    """
    for node in graph.nodes:
        if isinstance(node.layer, LearnedPositions) and length > node.layer.length:
            what = f"rows of {length} tokens are longer than the {node.layer.length} positions of `{node.name}`"
            raise UserError(what, where=node.where, fix="Shorten `seq_len`, or give the node a larger `length`.")
    check_model(graph, length)


def check_model(graph: Graph, context: int) -> None:
    """Trace the loss of two rows of `context` tokens if a layer is a plug-in's; nothing is computed.

    UserError: a layer fails, or its value is not what it declares. Warns of parameters that the loss does not use.
    """
    if not any(is_foreign(node.layer) for node in graph.nodes):
        return
    for path, declared in jax.tree_util.tree_leaves_with_path(graph.parameters):
        if len(declared.axes) != len(declared.shape) or not {*declared.axes} <= {None, *AXES}:
            with calling(graph[path[0].key], "parameters"):
                name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
                what = f"parameter `{name}` {declared.shape} has the axes {declared.axes}"
                raise UserError(f"{what}; each dimension has None or one of {', '.join(AXES)}")
    params, batch = abstract_params(graph), batch_shapes(graph, 2, context)
    sizes = graph.sizes(batch)

    def loss(params: PyTree, ema_params: PyTree, batch: Batch) -> Any:
        config = ApplyConfig(key=jax.random.key(0), ema_params=ema_params, platform="cpu", capability=None)
        values: dict[str, Any] = {name: batch[name] for name, _ in graph.inputs}
        further: list[Array] = []
        for node in graph.nodes:
            if node.name in graph.needed_for(graph.loss):
                with calling(node, "apply"):
                    made = apply_part(graph, [node.name], params, values, batch, config)
                    values, further = made.values, further + made.losses
                    _check_value(graph, node, values, sizes)
            with calling(node, "cost"):
                if not isinstance(cost := node.layer.cost(node.takes, sizes), Cost):
                    raise UserError(f"`cost` returns {cost!r}, not a Cost")
            with calling(node, "cache"):
                dict(node.layer.cache(node.takes, 1, context))
        return values[graph.loss].sum, further

    jaxpr = jax.make_jaxpr(loss)(params, params, batch).jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    unused: dict[str, list[str]] = {}
    for (path, _), is_used in zip(jax.tree_util.tree_leaves_with_path(params), used, strict=False):
        if not is_used and not graph[path[0].key].layer.constant:
            unused.setdefault(path[0].key, []).append(jax.tree_util.keystr(path[1:], simple=True, separator="."))
    for name, parameters in unused.items():
        what = f"{graph[name].where}: the loss does not depend on {', '.join(parameters)} of node `{name}`"
        warnings.warn(f"{what}: training does not change them", UserWarned, stacklevel=2)


def _check_value(graph: Graph, node: Node, values: dict[str, Any], sizes: dict[str, int]) -> None:
    """UserError: the value of a plug-in's layer is not as its `shape` declares; what is no array, such as logits, is
    not looked at."""
    value, declared = values[node.name], graph.shapes[node.name]
    got, wanted = type(value).__name__, "a Loss" if node.layer.is_loss else "an array"
    if node.layer.is_loss or not isinstance(value, jax.Array):
        fits = isinstance(value, Loss) if node.layer.is_loss else dataclasses.is_dataclass(value)
    else:
        dtype = jnp.dtype(jnp.int32 if declared.dtype == "int" else jnp.float32)
        got, wanted = (f"{kind}{[*dims]}" for kind, dims in ((value.dtype, value.shape), (dtype, declared.bind(sizes))))
        wanted += f" of float32 inputs, as `shape` declares by {declared}"
        known = value.dtype == dtype or (declared.dtype == "int" and jnp.issubdtype(value.dtype, jnp.integer))
        fits = known and value.shape == declared.bind(sizes)
    if is_foreign(node.layer) and not fits:
        raise UserError(f"`apply` returns {got}, not {wanted}")

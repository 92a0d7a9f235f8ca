"""The model as a graph: parsed from a recipe, analysed before it is built, applied as pure functions."""

from affinage.model.call import Call, Logits, Loss, Outputs
from affinage.model.graph import Graph, parse
from affinage.model.module import (
    Model,
    abstract_params,
    apply,
    decayed,
    init_cache,
    init_params,
    logical_axes,
)
from affinage.model.node import Node

__all__ = [
    "Call",
    "Graph",
    "Logits",
    "Loss",
    "Model",
    "Node",
    "Outputs",
    "abstract_params",
    "apply",
    "decayed",
    "init_cache",
    "init_params",
    "logical_axes",
    "parse",
]

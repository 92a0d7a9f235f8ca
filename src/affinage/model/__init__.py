"""The model as a graph: parsed from a recipe, analysed before it is built, applied as pure functions."""

from affinage.model.adapters import Adapters
from affinage.model.call import Call, Logits, Loss, Outputs
from affinage.model.graph import Graph, parse
from affinage.model.module import (
    Declared,
    abstract_averages,
    abstract_params,
    apply,
    apply_part,
    average_axes,
    decayed,
    first_averages,
    init_cache,
    init_params,
    logical_axes,
    matrices,
    moved_averages,
)
from affinage.model.nnx_bridge import GraphModule, from_nnx, to_nnx
from affinage.model.node import Node

__all__ = [
    "Adapters",
    "Call",
    "Declared",
    "Graph",
    "GraphModule",
    "Logits",
    "Loss",
    "Node",
    "Outputs",
    "abstract_averages",
    "abstract_params",
    "apply",
    "apply_part",
    "average_axes",
    "decayed",
    "first_averages",
    "from_nnx",
    "init_cache",
    "init_params",
    "logical_axes",
    "matrices",
    "moved_averages",
    "parse",
    "to_nnx",
]

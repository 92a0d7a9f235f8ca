"""The model as a graph: parsed from a recipe, analysed before it is built, applied as pure functions."""

from affinage.model.adapters import Adapters
from affinage.model.call import Call, Logits, Loss, Outputs
from affinage.model.graph import Graph, parse
from affinage.model.module import (
    Declared,
    abstract_params,
    apply,
    apply_part,
    decayed,
    init_cache,
    init_params,
    logical_axes,
    matrices,
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
    "abstract_params",
    "apply",
    "apply_part",
    "decayed",
    "from_nnx",
    "init_cache",
    "init_params",
    "logical_axes",
    "matrices",
    "parse",
    "to_nnx",
]

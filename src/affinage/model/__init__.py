"""The model as a graph: parsed from a recipe, analyzed before it is built, applied as pure functions."""

from affinage.model.apply_config import ApplyConfig as ApplyConfig
from affinage.model.forward import Declared as Declared
from affinage.model.forward import abstract_params as abstract_params
from affinage.model.forward import apply as apply
from affinage.model.forward import decayed as decayed
from affinage.model.forward import from_nnx as from_nnx
from affinage.model.forward import init_params as init_params
from affinage.model.forward import logical_axes as logical_axes
from affinage.model.forward import to_nnx as to_nnx
from affinage.model.graph import Graph as Graph
from affinage.model.graph import parse as parse
from affinage.model.layer import Loss as Loss
from affinage.model.lora import Adapters as Adapters

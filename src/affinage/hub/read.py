"""A Hugging Face folder as a graph with its weights. Only JSON and safetensors are read: nothing in it can run."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from affinage.data.foreign_json import read_object
from affinage.errors import UserError
from affinage.hub.architectures import Architecture, architecture_of
from affinage.hub.decoder import Decoder
from affinage.hub.families import family_of
from affinage.hub.weights import HubWeights
from affinage.model.graph import Graph, parse
from affinage.model.parameter import Parameter, Tree, map_parameters

CONFIG = "config.json"


@dataclass(frozen=True)
class HubModel:
    """What a folder of the hub holds, tokenizer aside."""

    architecture: Architecture
    graph: Graph
    params: Tree  # float32, which holds every dtype of the hub exactly
    digest: str  # SHA-256 of the weight files


def read_hub_folder(folder: Path) -> HubModel:
    """Read config.json and the weights, in one file or in several with an index.

    Raises:
        UserError: for a family, a configuration value or a tensor that has no place in a graph; it is named.
    """
    config = folder / CONFIG
    if not config.is_file():
        fix = "A model of Hugging Face is a folder with config.json, safetensors and tokenizer.json."
        raise UserError(f"this is no model: there is no {CONFIG}", where=str(folder), fix=fix)
    values = read_object(config)
    try:
        architecture = architecture_of(values, str(config))
        graph = parse(architecture.model)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(f"a value in it is not what it should be: {error}", where=str(config)) from error
    weights = HubWeights(folder)
    try:
        params = family_of(graph).from_hf(weights, graph)
    except (ValueError, IndexError) as error:  # NumPy's: a tensor cannot be divided, or stacked with its like
        raise UserError(f"a tensor has not the shape that {CONFIG} says: {error}", where=str(folder)) from error
    _check_all_read(weights, graph, params, folder)

    def fitted(path: tuple[str, ...], parameter: Parameter) -> np.ndarray:
        value = params
        for name in path:
            value = value[name]
        array = np.asarray(value)
        if array.shape != parameter.shape:
            raise UserError(
                f"{'.'.join(path)} has the shape {array.shape}, {CONFIG} says {parameter.shape}", where=str(folder)
            )
        return array.astype(np.float32)

    return HubModel(architecture, graph, map_parameters(fitted, graph.parameters), weights.digest())


def _check_all_read(weights: HubWeights, graph: Graph, params: Tree, folder: Path) -> None:
    left = weights.left()
    decoder = Decoder.of(graph)
    if decoder.tied and "lm_head.weight" in left:
        if not np.array_equal(weights["lm_head.weight"], params[decoder.embed_name]["embedding"]):
            raise UserError(f"{CONFIG} ties the unembedding, but lm_head.weight is another matrix", where=str(folder))
        left.remove("lm_head.weight")
    if left:
        listed = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise UserError(f"the architecture has no place for the tensors {listed}", where=str(folder))

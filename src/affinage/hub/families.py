"""The families of transformers that a graph can be read from and written as; families.yaml describes them."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Float

from affinage.errors import UserError
from affinage.hub.family_spec import Decoder, FamilySpec, Key
from affinage.model.graph import Graph, parse
from affinage.model.parameter import PyTree


class Architecture(NamedTuple):
    """What a config.json describes."""

    family: str  # its model_type
    model: dict[str, Any]  # the `model:` of a recipe
    context: int  # the longest input in tokens
    dtype: str  # of the weights in the files
    ignored: tuple[str, ...]  # keys that transformers does not know for this family, and so ignores


def _family(model_type: str, spec: Mapping[str, Any]) -> FamilySpec:
    layer = {f"blocks.{ours}": f"{spec['prefix']}.{{layer}}.{theirs}" for ours, theirs in spec["layer"].items()}
    fields = {name: spec[name] for name in ("architecture", "constants", "fixed", "rope_theta", "transposed")}
    keys = tuple(Key(name, **key) for name, key in spec["keys"].items() if key is not None)
    return FamilySpec(model_type, keys=keys, tensors=spec["tensors"] | layer, **fields)


_WRITTEN = yaml.safe_load(files("affinage.hub").joinpath("families.yaml").read_text(encoding="utf-8"))
FAMILIES = {model_type: _family(model_type, spec) for model_type, spec in _WRITTEN.items()}


def family_of(graph: Graph) -> FamilySpec:
    """The family that computes a graph. Raises UserError that names what no family of transformers has."""
    settings = Decoder.of(graph).settings()
    family, differences = min(
        ((each, each.differences(settings)) for each in FAMILIES.values()), key=lambda pair: len(pair[1])
    )
    if differences:
        listed = ", ".join(f"{path}: {ours} (not {theirs})" for path, (ours, theirs) in list(differences.items())[:4])
        raise UserError(f"the model is of no family of transformers; as a {family.model_type} it differs in {listed}")
    return family


def architecture_of(values: Mapping[str, Any], where: str) -> Architecture:
    """Read a config.json of one of `FAMILIES`; where it has no value, transformers' default holds.

    Raises:
        UserError: another family, or a value that the graph would not compute with.
    """
    if values.get("auto_map"):
        fix = "Import a version of the model in transformers' own form."
        raise UserError("this model brings code of its own, and nothing that is loaded may run", where=where, fix=fix)
    if values.get("quantization_config"):
        raise UserError("its weights are quantized", where=where, fix="Import the model it was made from.")
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        fix = f"There are: {', '.join(FAMILIES)}."
        raise UserError(f"`model_type: {values.get('model_type')}` is not a known family", where=where, fix=fix)
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"`dtype: {dtype}` is not a dtype of weights", where=where, fix="Use float32 or bfloat16.")
    context, model = family.from_config(values, where)
    return Architecture(family.model_type, model, context, dtype, family.unknown(values))


def with_ids(graph: Graph, params: PyTree, ids: Sequence[int]) -> tuple[Graph, PyTree]:
    """Return the model with rows for new ids, each the mean of those below the first of them.

    A vocabulary that is padded that far stays as large as it is. A token that was never seen is then no likelier than
    the others (Hewitt, Initializing new word embeddings, 2021).
    """
    if not ids:
        return graph, params
    size, written, changed = max(graph.vocabulary, max(ids) + 1), graph.to_dict(), {**params}

    def grown(rows: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "W D"]:
        old = np.asarray(rows)
        new = np.concatenate([old, np.zeros((size - len(old), old.shape[1]), old.dtype)])
        new[list(ids)] = old[: min(ids)].mean(axis=0, dtype=np.float64)
        return new

    for name in (Decoder.of(graph).nodes[role].name for role in ("embed", "logits")):
        settings: dict[str, Any] = written["nodes"][name]
        settings |= {"vocab": size} if "vocab" in settings else {}
        if name in params:
            changed[name] = {leaf: grown(rows) for leaf, rows in params[name].items()}
    return parse(written), changed

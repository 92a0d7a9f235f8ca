"""The families of transformers: how config.json and tensors correspond to a graph, in both directions.

families.yaml describes each of them. A graph belongs to a family when the config.json written for it describes the same
graph again.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.resources import files
from math import prod
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.typing import NDArray

from affinage.errors import UserError
from affinage.model.graph import Graph, Node, parse
from affinage.model.layer import Layer, PyTree
from affinage.model.layers.block import TransformerBlock
from affinage.model.layers.dense import Dropout, LayerNorm, RmsNorm
from affinage.model.layers.embedding import Embedding, LearnedPositions, Unembed

Tensors = Mapping[str, NDArray[Any]]
Settings = dict[str, Any]  # of a graph, by dotted path: {"embed.width": 32, "blocks.attention.heads": 4, ...}

# The nodes of a decoder in the order of the chain, by their role. Positions and dropout may be missing.
_ROLES: dict[str, tuple[type[Layer], ...]] = {
    "embed": (Embedding,),
    "positions": (LearnedPositions,),
    "drop": (Dropout,),
    "blocks": (TransformerBlock,),
    "norm": (RmsNorm, LayerNorm),
    "logits": (Unembed,),
}
_OPTIONAL = ("positions", "drop")
_ROPE = "blocks.attention.rope"
# Settings that only training uses, so that a graph may differ in them from what its config.json says.
_TRAINING_ONLY = re.compile(
    r"drop\..*|context|logits\.vocab|.*\.(dropout|init_std|load_balance_weight|z_loss_weight|capacity_factor)"
)
# Keys that change neither logits nor gradients: names, versions, ids for tokenizers, how transformers computes, what
# configurations of other tasks leave behind, and a window that `use_sliding_window: false` switches off.
_INERT = frozenset(
    """_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id
    eos_token_id pad_token_id _attn_implementation name_or_path task_specific_params chunk_size_feed_forward
    output_attentions output_hidden_states return_dict id2label label2id problem_type is_encoder_decoder auto_map
    quantization_config summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
    sliding_window max_window_layers output_router_logits""".split()
)


def decoder_nodes(graph: Graph) -> dict[str, Node]:
    """Return the nodes of a decoder-only language model by role: embed, (positions), (drop), blocks, norm, logits.

    Raises UserError for a graph that is not such a chain.
    """
    chain, name = list[Node](), graph.logits
    while name in graph:
        chain.insert(0, graph[name])
        name = graph[name].inputs[0]
    nodes: dict[str, Node] = {}
    order = iter(_ROLES.items())
    for node in chain:
        if role := next((role for role, kinds in order if isinstance(node.layer, kinds)), None):
            nodes[role] = node
    if len(nodes) != len(chain) or any(role not in nodes for role in _ROLES if role not in _OPTIONAL):
        listed = ", ".join(f"{node.name} ({node.layer.kind_name})" for node in chain)
        fix = "A chain of embedding, one repeated transformer_block, norm and unembed can be written."
        raise UserError(f"the model cannot be written for transformers: its nodes are {listed}", fix=fix)
    return nodes


def decoder_settings(graph: Graph) -> Settings:
    """Return all settings of such a graph, with the defaults that depend on others filled in."""
    nodes = decoder_nodes(graph)
    tree = {role: node.layer.model_dump(mode="json") for role, node in nodes.items()}
    blocks, kind = tree["blocks"], nodes["blocks"].layer
    assert isinstance(kind, TransformerBlock)
    blocks["repeat"] = nodes["blocks"].layers
    blocks["attention"]["kv_heads"] = kind.attention.groups_of
    blocks["attention"]["head_dim"] = kind.attention.head_width(tree["embed"]["width"])
    tree["norm"]["kind"] = nodes["norm"].layer.kind_name
    tree["logits"]["tied"] = nodes["logits"].layer.shares is not None
    settings: Settings = flatten_dict(tree, is_leaf=lambda path, _: ".".join(path) == _ROPE, sep=".")
    return settings


class Stored(NamedTuple):
    """A tensor of transformers, and the part of a parameter of the graph that it is: all, or that of a layer or expert.

    `third` is the place among three parts that lie in one tensor, along its last axis, as GPT-2's query, key and value.
    """

    name: str
    path: tuple[str, ...]  # of the parameter
    place: tuple[int, ...]  # of the part in the parameter
    matrix: tuple[int, ...]  # shape of the part as a matrix [inputs, outputs], or as a vector
    transposed: bool  # whether the tensor is [outputs, inputs]
    third: int | None


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """One family of transformers; see families.yaml."""

    model_type: str
    architecture: str  # the class in transformers
    keys: Mapping[str, Mapping[str, Any]]  # of config.json -> settings of the graph, default, nullable, values
    constants: Settings
    fixed: Mapping[str, Sequence[Any]]  # key of config.json -> values that compute the same as the graph
    rope_theta: float | None  # where config.json has none; None: the family has no rotary positions
    transposed: bool  # matrices of layers are nn.Linear's, [outputs, inputs], and not Conv1D's
    tensors: Mapping[str, str]  # dotted path of a parameter -> name with {layer} and {expert}, or name/third

    def to_config(self, graph: Graph, *, context: int | None = None) -> dict[str, Any]:
        """Return what config.json says of a graph of this family; `context` is the longest input in tokens."""
        return self._values(decoder_settings(graph) | {"context": context})

    def _values(self, settings: Settings) -> dict[str, Any]:
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        values |= {name: settings.get(key["settings"][0]) for name, key in self.keys.items()}
        values = {name: value for name, value in values.items() if value is not None or name == "sliding_window"}
        if self.rope_theta is not None:
            values |= _rope_to_config(settings.get(_ROPE))
        return values | {name: allowed[0] for name, allowed in self.fixed.items() if allowed[0] is not None}

    def from_config(self, values: Mapping[str, Any], where: str) -> tuple[int, dict[str, Any]]:
        """Return the context and the `model:` of a recipe. Raises UserError for a value that the graph cannot honor."""
        settings = dict(self.constants)
        for name, key in self.keys.items():
            value = values.get(name)
            if value is None and not (key.get("nullable") and name in values):
                if "default" not in key:
                    raise UserError(f"`{name}` is missing", where=where, fix="Add it, or export the model again.")
                value = key["default"]
            elif value not in key.get("values", [value]):
                raise _refused(name, value, where)
            settings |= dict.fromkeys(key["settings"], value)
        if self.rope_theta is not None:
            settings[_ROPE] = _rope_from_config(values, self.rope_theta, where)
        context = settings.pop("context")
        if settings["blocks.ffn.width"] is None:  # GPT-2's default
            settings["blocks.ffn.width"] = 4 * settings["embed.width"]
        window = "sliding_attention" if settings.get("blocks.attention.window") else "full_attention"
        layers = [window] * settings["blocks.repeat"]
        for name, allowed in {**self.fixed, "layer_types": (layers,), "n_ctx": (context,)}.items():
            if values.get(name) not in (*allowed, None):
                raise _refused(name, values[name], where)
        return context, _model(settings)

    def unknown(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys with a value that neither the graph uses nor transformers' class of this family knows."""
        known = {*self.keys, *self.fixed, *_INERT}
        known |= {"layer_types", "n_ctx"} | (set(_ROPE_KEYS) if self.rope_theta is not None else set())
        return tuple(name for name, value in values.items() if value is not None and name not in known)

    def differences(self, settings: Settings) -> dict[str, tuple[Any, Any]]:
        """The settings in which a graph differs from what its config.json would say: {path: (its, the family's)}."""
        values = self._values({"context": 1, **settings})
        values = {name: 1 for name, key in self.keys.items() if "default" not in key} | values
        try:
            theirs = decoder_settings(parse(self.from_config(values, "")[1]))
        except UserError as error:
            return {"": (error.what, None)}
        pairs = {path: (settings.get(path), theirs.get(path)) for path in settings | theirs}
        return {p: pair for p, pair in pairs.items() if pair[0] != pair[1] and not _TRAINING_ONLY.fullmatch(p)}

    def to_tensors(self, params: PyTree, graph: Graph) -> dict[str, NDArray[Any]]:
        """Return the parameters under transformers' names, in their own dtype."""
        tensors, thirds = dict[str, NDArray[Any]](), defaultdict[str, dict[int, NDArray[Any]]](dict)
        for each in self._stored(graph):
            matrix = np.asarray(reduce(getitem, each.path, params))[each.place].reshape(each.matrix)
            if each.third is None:
                tensors[each.name] = np.ascontiguousarray(matrix.T) if each.transposed else matrix
            else:
                thirds[each.name][each.third] = matrix
        return tensors | {name: np.concatenate([three[n] for n in range(3)], -1) for name, three in thirds.items()}

    def from_tensors(self, tensors: Tensors, graph: Graph) -> PyTree:
        """Return the graph's parameters in float32. Raises UserError for a tensor missing or of another shape."""
        params = jax.tree.map(lambda declared: np.empty(declared.shape, np.float32), graph.parameters)
        tied = graph[graph.logits].layer.shares is not None
        # The thirds of a tensor in a row, so that it is read once.
        for each in sorted(self._stored(graph), key=lambda each: "" if each.third is None else each.name):
            tensor = self._find(tensors, each.name, tied)
            parameter: Any = reduce(getitem, each.path, params)
            shape = each.matrix[::-1] if each.transposed else each.matrix
            shape = shape if each.third is None else (*shape[:-1], 3 * shape[-1])
            if tensor.shape != shape:
                what = f"the tensor {each.name!r} has the shape {list(tensor.shape)}, config.json says {list(shape)}"
                raise UserError(what, fix="Take config.json and the weights from the same model.")
            tensor = tensor if each.third is None else np.split(tensor, 3, axis=-1)[each.third]
            parameter[each.place] = (tensor.T if each.transposed else tensor).reshape(parameter[each.place].shape)
        return params

    def _stored(self, graph: Graph) -> Iterator[Stored]:
        for role, node in decoder_nodes(graph).items():
            for path, declared in flatten_dict(graph.parameters.get(node.name, {})).items():
                name, _, third = self.tensors[".".join((role, *path))].partition("/")
                of_layers = int(node.repeat is not None)
                parts = of_layers + ("{expert}" in name)  # axes along which tensors are apart
                keys, shape = (node.name, *path), declared.shape[parts:]
                matrix: tuple[int, ...] = (prod(shape),)
                if path[-1] not in ("scale", "bias"):
                    inputs = max(1, len(declared.inputs))
                    matrix = prod(shape[:inputs]), prod(shape[inputs:])
                transposed = self.transposed and role == "blocks"
                for place in np.ndindex(declared.shape[:parts]):
                    own = name.format(layer=sum(place[:of_layers]), expert=sum(place[of_layers:]))
                    yield Stored(own, keys, place, matrix, transposed, int(third) if third else None)

    def _find(self, tensors: Tensors, name: str, tied: bool) -> NDArray[Any]:
        """A tensor by its name, or in one of the other forms that transformers loads."""
        names = [name, name.partition(".")[2]]
        if tied and name == self.tensors["embed.embedding"]:
            names.append("lm_head.weight")
        if stored := next((each for each in names if each in tensors), None):
            return np.asarray(tensors[stored])
        # Transformers 5 has the weights of all experts in one tensor, gate and up of each one above the other.
        if expert := re.fullmatch(r"(.*)\.block_sparse_moe\.(gate\.weight|experts\.(\d+)\.(w[123])\.weight)", name):
            layer, _, index, matrix = expert.groups()
            fused = {None: "gate.weight", "w2": "experts.down_proj"}.get(matrix, "experts.gate_up_proj")
            if (fused := f"{layer}.mlp.{fused}") in tensors:
                whole = np.asarray(tensors[fused])
                if index is None:
                    return whole
                return whole[int(index)] if matrix == "w2" else np.split(whole[int(index)], 2)[matrix == "w3"]
        raise UserError(f"the weights have no tensor {name!r}", fix="Download the whole model again.")


def _model(settings: Settings) -> dict[str, Any]:
    """The `model:` of a recipe from settings by path."""
    nodes, before, chain = unflatten_dict(settings, sep="."), "tokens", {}
    for role, kinds in _ROLES.items():
        written = nodes.get(role, {})
        if role not in _OPTIONAL or any(written.values()):
            chain[role] = {"kind": kinds[0].kind_name, "in": before, **written}
            before = role
    chain["loss"] = {"kind": "next_token_loss", "in": ["logits", "tokens"]}
    return {"inputs": ["tokens"], "nodes": chain}


def _refused(name: str, value: Any, where: str) -> UserError:
    what = f"`{name}: {value}` cannot be honored, so this model is not imported"
    return UserError(what, where=where, fix="Models of this family with the usual value can be imported.")


_ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")
_SCALINGS: dict[str, dict[str, str]] = {  # setting of the graph -> key of transformers
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    },
}


def _rope_to_config(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """transformers 4 reads rope_theta and rope_scaling, transformers 5 rope_parameters."""
    rope = rope or {"theta": 1e4}
    scaling = rope.get("scaling")
    parameters: dict[str, Any] = {"rope_type": scaling["kind"] if scaling else "default"}
    if scaling:
        parameters |= {theirs: scaling[ours] for ours, theirs in _SCALINGS[scaling["kind"]].items()}
    config = {"rope_theta": rope["theta"], "rope_parameters": parameters | {"rope_theta": rope["theta"]}}
    return config | {"rope_scaling": parameters} if scaling else config


def _rope_from_config(values: Mapping[str, Any], theta: float, where: str) -> dict[str, Any]:
    """The graph's settings from either form, or from both if they agree; `theta` holds if neither has one."""
    forms, thetas = [], {values.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        if values.get(name):
            form = {key: value for key, value in values[name].items() if value is not None}
            thetas.add(form.pop("rope_theta", None))
            form = {"rope_type": form.pop("type", "default"), **form}  # `type` is its old name
            if (partial := form.pop("partial_rotary_factor", 1.0)) != 1.0:
                raise _refused("partial_rotary_factor", partial, where)
            forms.append(form)
    different = sorted({float(each) for each in thetas if each is not None})
    if len(different) > 1:
        raise _refused("rope_theta", " and ".join(map(str, different)), where)
    form = dict(forms[0]) if forms else {"rope_type": "default"}
    if any(other != form for other in forms):
        raise _refused("rope_parameters and rope_scaling", "contradict each other", where)
    kind = form.pop("rope_type")
    if kind not in _SCALINGS or set(form) != set(_SCALINGS[kind].values()):
        raise _refused("rope_type", kind, where)
    scaling = {ours: form[theirs] for ours, theirs in _SCALINGS[kind].items()}
    return {"theta": (different or [theta])[0]} | ({"scaling": {"kind": kind, **scaling}} if scaling else {})


class Architecture(NamedTuple):
    """What a config.json describes."""

    family: str  # its model_type
    model: dict[str, Any]  # the `model:` of a recipe
    context: int  # the longest input in tokens
    dtype: str  # of the weights in the files
    ignored: tuple[str, ...]  # keys that transformers does not know for this family, and so ignores


FAMILIES: dict[str, FamilySpec] = {}
for _type, _spec in yaml.safe_load(files("affinage.hub").joinpath("families.yaml").read_text("utf-8")).items():
    _prefix, _layer = _spec.pop("prefix"), _spec.pop("layer")
    _spec["keys"] = {name: key for name, key in _spec["keys"].items() if key is not None}
    _names = {f"blocks.{ours}": f"{_prefix}.{{layer}}.{theirs}" for ours, theirs in _layer.items()}
    FAMILIES[_type] = FamilySpec(_type, **_spec | {"tensors": _spec["tensors"] | _names})


def family_of(graph: Graph) -> FamilySpec:
    """The family that computes a graph. Raises UserError that names what no family of transformers has."""
    settings = decoder_settings(graph)
    family, differences = min(
        ((each, each.differences(settings)) for each in FAMILIES.values()), key=lambda pair: len(pair[1])
    )
    if differences:
        listed = ", ".join(f"{path}: {ours} (not {theirs})" for path, (ours, theirs) in list(differences.items())[:4])
        raise UserError(f"the model is of no family of transformers; as a {family.model_type} it differs in {listed}")
    return family


def architecture_of(values: Mapping[str, Any], where: str) -> Architecture:
    """Read a config.json of one of `FAMILIES`; where it has no value, transformers' default holds.

    Raises UserError for another family, and for a value that the graph would not compute with.
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
    dtype = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
    dtype = dtype if dtype in ("bfloat16", "float16") else "float32"
    context, model = family.from_config(values, where)
    return Architecture(family.model_type, model, context, dtype, family.unknown(values))

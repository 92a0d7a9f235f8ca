"""What a family of transformers is: how its config.json and tensors correspond to a graph, in both directions.

A `FamilySpec` is data. Its keys say which key of config.json is which setting of the graph, its constants what the
graph has without a key, its `fixed` which values the graph computes with, and its tensors where each parameter is
stored. A graph belongs to a family when the config.json written for it describes the same graph again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import getitem
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from affinage.errors import UserError
from affinage.model.graph import Graph, Node, parse
from affinage.model.layer import ParamSpec, PyTree
from affinage.model.layers.block import TransformerBlock
from affinage.model.layers.dense import Dropout, LayerNorm, RmsNorm
from affinage.model.layers.embedding import Embedding, LearnedPositions, Unembed

Tensors = Mapping[str, NDArray[Any]]
Settings = dict[str, Any]  # of a graph, by dotted path: {"embed.width": 32, "blocks.attention.heads": 4, ...}

# The nodes of a decoder in the order of the chain, by their role. Positions and dropout may be missing.
_ROLES: dict[str, tuple[type, ...]] = {
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
REQUIRED = object()
# Keys that change neither logits nor gradients: names, versions, ids for tokenizers, how transformers computes, what
# configurations of other tasks leave behind, and a window that `use_sliding_window: false` switches off.
_INERT = frozenset(
    """_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id
    eos_token_id pad_token_id _attn_implementation name_or_path task_specific_params chunk_size_feed_forward
    output_attentions output_hidden_states return_dict id2label label2id problem_type is_encoder_decoder auto_map
    quantization_config summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
    sliding_window max_window_layers output_router_logits""".split()
)


@dataclass(frozen=True)
class Decoder:
    """The nodes of a decoder-only language model by role: embed, (positions), (drop), blocks, norm, logits."""

    nodes: Mapping[str, Node]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Return the roles of a graph's nodes. Raises UserError for a graph that is not such a chain."""
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
        return cls(nodes)

    @property
    def repeated(self) -> bool:
        """Whether the parameters of the blocks have the layers as their first axis."""
        return self.nodes["blocks"].repeat is not None

    @property
    def tied(self) -> bool:
        """Whether the logits use the embedding's vectors."""
        return self.nodes["logits"].layer.shares is not None

    def settings(self) -> Settings:
        """Return all settings, with the defaults that depend on others filled in."""
        tree = {role: node.layer.model_dump(mode="json") for role, node in self.nodes.items()}
        blocks, kind = tree["blocks"], self.nodes["blocks"].layer
        assert isinstance(kind, TransformerBlock)
        blocks["repeat"] = self.nodes["blocks"].layers
        blocks["attention"]["kv_heads"] = kind.attention.groups_of
        blocks["attention"]["head_dim"] = kind.attention.head_width(tree["embed"]["width"])
        tree["norm"]["kind"] = self.nodes["norm"].layer.kind_name
        tree["logits"]["tied"] = self.tied
        return dict(_flat(tree))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, Mapping) and path != _ROPE:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


class Key:
    """A key of config.json and the settings of the graph that it gives.

    `default` is transformers' for a key that is absent or null; without one, the key must be there. With `nullable`,
    null is a value of its own. `values` are all that transformers takes, where the graph's setting has others, too.
    """

    def __init__(
        self, name: str, *paths: str, default: Any = REQUIRED, nullable: bool = False, values: tuple[Any, ...] = ()
    ) -> None:
        self.name, self.paths, self.default, self.nullable, self.values = name, paths, default, nullable, values

    def read(self, values: Mapping[str, Any], where: str) -> Any:
        """Return the value in a config.json, or the default."""
        value = values.get(self.name)
        if value is None and not (self.nullable and self.name in values):
            value = self.default
        elif self.values and value not in self.values:
            raise _refused(self.name, value, where)
        if value is REQUIRED:
            raise UserError(f"`{self.name}` is missing", where=where, fix="Add it, or export the model again.")
        return value


@dataclass(frozen=True)
class TensorSpec:
    """Where one parameter is stored.

    `name` may hold {layer} and {expert}. `inputs` is the number of leading axes of a matrix that become its first
    stored axis; 0 stands for a vector. nn.Linear stores [outputs, inputs], which is `transposed`. `part` is the place
    among three that are stored side by side along the last axis, as GPT-2's query, key and value.
    """

    name: str
    inputs: int = 0
    transposed: bool = False
    part: int | None = None

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The stored shape of a parameter, of a whole tensor where the parameter is a part of one."""
        shape = (prod(ours[: self.inputs]), prod(ours[self.inputs :])) if self.inputs else (prod(ours),)
        shape = shape[::-1] if self.transposed else shape
        return shape if self.part is None else (*shape[:-1], 3 * shape[-1])

    def store(self, array: NDArray[Any]) -> NDArray[Any]:
        """The parameter as it is stored."""
        if not self.inputs:
            return array.reshape(-1)
        matrix = array.reshape(prod(array.shape[: self.inputs]), -1)
        return np.ascontiguousarray(matrix.T) if self.transposed else matrix

    def load(self, stored: NDArray[Any], ours: tuple[int, ...], name: str) -> NDArray[Any]:
        """The parameter of our shape. Raises UserError where the stored tensor has another shape than it must have."""
        if stored.shape != (shape := self.shape(ours)):
            raise UserError(
                f"the tensor {name!r} has the shape {list(stored.shape)}, config.json says {list(shape)}",
                fix="Take config.json and the weights from the same model.",
            )
        if self.part is not None:
            stored = np.split(stored, 3, axis=-1)[self.part]
        return (stored.T if self.transposed else stored).reshape(ours)


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """One family of transformers; see the module's docstring."""

    model_type: str
    architecture: str  # the class in transformers
    keys: tuple[Key, ...]
    constants: Settings
    tensors: Mapping[str, TensorSpec]  # by the dotted path of the parameter
    fixed: Mapping[str, tuple[Any, ...]]  # key of config.json -> values that compute the same as the graph
    rope_theta: float | None = 1e4  # where config.json has none; None: the family has no rotary positions

    # ---- config.json ----

    def to_config(self, graph: Graph, *, context: int | None = None) -> dict[str, Any]:
        """Return what config.json says of a graph of this family; `context` is the longest input in tokens."""
        return self._values(Decoder.of(graph).settings() | {"context": context})

    def _values(self, settings: Settings) -> dict[str, Any]:
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        values |= {key.name: settings.get(key.paths[0]) for key in self.keys}
        values = {name: value for name, value in values.items() if value is not None or name == "sliding_window"}
        if self.rope_theta is not None:
            values |= _rope_to_config(settings.get(_ROPE))
        return values | {name: allowed[0] for name, allowed in self.fixed.items() if allowed[0] is not None}

    def from_config(self, values: Mapping[str, Any], where: str) -> tuple[int, dict[str, Any]]:
        """Return the context and the `model:` of a recipe. Raises UserError for a value that the graph cannot honor."""
        settings = dict(self.constants)
        for key in self.keys:
            settings |= dict.fromkeys(key.paths, key.read(values, where))
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
        known = {key.name for key in self.keys} | set(self.fixed) | _INERT
        known |= {"layer_types", "n_ctx"} | (set(_ROPE_KEYS) if self.rope_theta is not None else set())
        return tuple(name for name, value in values.items() if value is not None and name not in known)

    def differences(self, settings: Settings) -> dict[str, tuple[Any, Any]]:
        """The settings in which a graph differs from what its config.json would say: {path: (its, the family's)}."""
        values = self._values({"context": 1, **settings})
        values = {key.name: 1 for key in self.keys if key.default is REQUIRED} | values
        try:
            theirs = Decoder.of(parse(self.from_config(values, "")[1])).settings()
        except UserError as error:
            return {"": (error.what, None)}
        paths = [path for path in settings | theirs if not _TRAINING_ONLY.fullmatch(path)]
        pairs = {path: (settings.get(path), theirs.get(path)) for path in paths}
        return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}

    # ---- tensors ----

    def to_tensors(self, params: PyTree, graph: Graph) -> dict[str, NDArray[Any]]:
        """Return the parameters under transformers' names, in their own dtype."""
        tensors: dict[str, NDArray[Any]] = {}
        parts: dict[str, dict[int, NDArray[Any]]] = {}
        for path, _, spec, repeated in self._stored(graph):
            array = np.asarray(reduce(getitem, path, params))
            for name, index in _places(spec, array.shape, repeated):
                stored = spec.store(array[index])
                if spec.part is None:
                    tensors[name] = stored
                else:
                    parts.setdefault(name, {})[spec.part] = stored
        return tensors | {name: np.concatenate([three[i] for i in range(3)], axis=-1) for name, three in parts.items()}

    def from_tensors(self, tensors: Tensors, graph: Graph) -> PyTree:
        """Return the graph's parameters in float32. Raises UserError for a tensor missing or of another shape."""
        tied, params = Decoder.of(graph).tied, dict[str, Any]()
        for path, declared, spec, repeated in self._stored(graph):
            whole = np.empty(declared.shape, np.float32)
            for name, index in _places(spec, declared.shape, repeated):
                whole[index] = spec.load(self._find(tensors, name, tied), whole[index].shape, name)
            _put(params, path, whole)
        return params

    def _stored(self, graph: Graph) -> Iterator[tuple[list[str], ParamSpec, TensorSpec, bool]]:
        """Every parameter of a graph: path, declaration, where it is stored, whether its first axis is the layers."""
        decoder = Decoder.of(graph)
        for role, node in decoder.nodes.items():
            for path, declared in _flat(graph.parameters.get(node.name, {}), f"{role}."):
                repeated = role == "blocks" and decoder.repeated
                yield [node.name, *path.split(".")[1:]], declared, self.tensors[path], repeated

    def _find(self, tensors: Tensors, name: str, tied: bool) -> NDArray[Any]:
        """A tensor by its name, or in one of the other forms that transformers loads."""
        names = [name, name.partition(".")[2]]
        if tied and name == self.tensors["embed.embedding"].name:
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


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _places(spec: TensorSpec, shape: tuple[int, ...], repeated: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name of every tensor of a parameter and its index in the parameter's array."""
    for layer in range(shape[0] if repeated else 1):
        index = (layer,) if repeated else ()
        if "{expert}" not in spec.name:
            yield spec.name.format(layer=layer), index
            continue
        for expert in range(shape[len(index)]):
            yield spec.name.format(layer=layer, expert=expert), (*index, expert)


def _model(settings: Settings) -> dict[str, Any]:
    """The `model:` of a recipe from settings by path."""
    nodes: dict[str, Any] = {role: {} for role in _ROLES}
    for path, value in settings.items():
        _put(nodes, path.split("."), value)
    kinds = {"embed": "embedding", "positions": "learned_positions", "drop": "dropout"}
    kinds |= {"blocks": "transformer_block", "logits": "unembed"}
    before, chain = "tokens", {}
    for role, written in nodes.items():
        if role in _OPTIONAL and not any(written.values()):
            continue
        chain[role] = {"kind": kinds.get(role), "in": before, **written}
        before = role
    chain["loss"] = {"kind": "next_token_loss", "in": ["logits", "tokens"]}
    return {"inputs": ["tokens"], "nodes": chain}


def _refused(name: str, value: Any, where: str) -> UserError:
    return UserError(
        f"`{name}: {value}` cannot be honored, so this model is not imported",
        where=where,
        fix="Models of this family with the usual value can be imported.",
    )


# ---- rotary positions ----

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
    forms, thetas = [], [values.get("rope_theta")]
    for name in ("rope_parameters", "rope_scaling"):
        if values.get(name):
            form = {key: value for key, value in values[name].items() if value is not None}
            thetas.append(form.pop("rope_theta", None))
            old = form.pop("type", None)
            form["rope_type"] = form.get("rope_type") or old or "default"
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

"""The model as data: a directed acyclic graph of named layers, parsed from a recipe."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import jax
from flax.traverse_util import flatten_dict
from pydantic import ValidationError

import affinage.model.layers  # noqa: F401  registers the layers of the package
from affinage.config.mistakes import explain
from affinage.config.training import DpoSettings
from affinage.errors import UserError, meant
from affinage.model.apply_config import PyTree
from affinage.model.layer import BATCH, LAYERS, SEQUENCE, TOKENS, Layer, ParamSpec, Shape, ShapeMismatch
from affinage.model.layers.embedding import Embedding, LearnedPositions, Unembed
from affinage.registry import calling

Path = tuple[str, ...]
Locate = Callable[[Path], str]
ANSWERS = "answer_log_probabilities"  # the node of `preference_graph` that reads the logits
_NODE_KEYS = ("kind", "in", "repeat", "scan")
_UNROLLED = 48  # layers, at most, that are compiled one by one for GPUs
_TABLES = (Embedding, LearnedPositions, Unembed)


@dataclass(frozen=True)
class Node:
    """A layer applied to other nodes' values, `repeat` times in a row with parameters of its own each time."""

    name: str
    layer: Layer
    inputs: tuple[str, ...]
    repeat: int | None = None  # None: once, and its parameters have no layers axis
    scan: bool | Literal["auto"] = "auto"  # one compiled body for all repeats
    hidden: bool = False  # a layer with matrices between embedding and logits
    takes: tuple[Shape, ...] = field(default=(), compare=False)  # of its inputs
    where: str = field(default="", compare=False)  # it stands, such as recipe.yaml:12

    @property
    def layers(self) -> int:
        """How many times the layer is applied."""
        return self.repeat or 1

    def scans(self, platform: str) -> bool:
        """Whether the repeats are a scan when compiled for this platform."""
        if self.scan != "auto":
            return self.scan
        # On CPUs and GPUs a scan costs 10 to 25 %, as it copies what layers keep into arrays of all of them. GPUs scan
        # very deep models only, whose compilation would take long.
        return platform == "tpu" or (platform == "gpu" and self.layers > _UNROLLED)


@dataclass(frozen=True)
class Graph:
    """A validated graph, its nodes after their inputs; equal and hashed by what the recipe says."""

    inputs: tuple[tuple[str, Shape], ...]
    nodes: tuple[Node, ...]
    shapes: Mapping[str, Shape] = field(compare=False, repr=False)  # of every input and node
    # Declarations of all parameters: {node name: nested dict}; a repeated node's have the layers first.
    parameters: PyTree = field(compare=False, repr=False)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def loss(self) -> str:
        """Name of the node that training minimizes."""
        return next(node.name for node in self.nodes if node.layer.is_loss)

    @cached_property
    def logits(self) -> str:
        """Name of the node whose logits the loss is of."""
        for name in self.needed_for(self.loss):
            node = self[name]
            if "logits" in node.layer.takes:
                return node.inputs[node.layer.takes.index("logits")]
        raise UserError("the model is not a language model: its loss is not a next_token_loss")

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can both read and tell apart in its logits."""
        read = [vocab for node in self.nodes if isinstance(vocab := getattr(node.layer, "vocab", None), int)]
        return min(self.shapes[self.logits].width, *read)

    @cached_property
    def depth(self) -> int:
        """Layers that add to a residual stream, for the scale of their first values."""
        residual = [name for name, tree in self.parameters.items() if any(p.residual for p in jax.tree.leaves(tree))]
        return max(1, sum(self[name].layers for name in residual))

    def sizes(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """What the symbols in the inputs' shapes stand for in this batch of arrays: B, and S where there are tokens."""
        pairs = [pair for name, shape in self.inputs for pair in zip(shape.dims, batch[name].shape, strict=True)]
        return {symbol: size for symbol, size in pairs if isinstance(symbol, str)}

    def needed_for(self, name: str) -> Collection[str]:
        """Names of the node itself and of all nodes that it is computed from."""
        needed = {name}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(source for source in node.inputs if source in self)
        return needed

    def to_dict(self) -> dict[str, Any]:
        """The `model:` mapping of a recipe that parses to this graph again."""
        nodes: dict[str, Any] = {}
        for node in self.nodes:
            entry: dict[str, Any] = {"kind": node.layer.kind_name}
            entry["in"] = node.inputs[0] if len(node.inputs) == 1 else list(node.inputs)
            if node.repeat is not None:
                entry["repeat"] = node.repeat
            if node.scan != "auto":
                entry["scan"] = node.scan
            nodes[node.name] = entry | node.layer.model_dump(mode="json", exclude_defaults=True)
        sizes = {name: list(shape.dims[1:]) for name, shape in self.inputs}
        return {"inputs": ["tokens"] if list(sizes) == ["tokens"] else sizes, "nodes": nodes}


def preference_graph(graph: Graph, settings: DpoSettings, documents: int) -> Graph:
    """The same model with the loss of pairs, of which a row holds `documents`, two for each pair, at most."""
    model = graph.to_dict()
    loss = model["nodes"].pop(graph.loss)
    if loss["kind"] != "next_token_loss":
        raise UserError("preferences are learned by a language model, whose loss is a next_token_loss", where="model")
    answers = loss | {"kind": "document_log_probabilities", "documents": documents}
    of_pairs = {"kind": "preference_loss", "in": ANSWERS, "beta": settings.beta}
    return parse({**model, "nodes": model["nodes"] | {ANSWERS: answers, graph.loss: of_pairs}})


def parse(model: Mapping[str, Any], locate: Locate = ".".join, *, vocabulary: int | None = None) -> Graph:
    """The validated graph of a `model:` mapping with `inputs` and `nodes`.

    `locate` turns a path such as `("model", "nodes", "blocks", "ffn", "width")` into where the user wrote it.
    `vocabulary` is what `vocab: auto` stands for: the size of the tokenizer that is in use. Raises a UserError for
    unknown kinds, keys and inputs, wrong arity, cycles, shapes without a rule, and dead nodes.
    """
    _check_keys(model, ("inputs", "nodes"), ("model",), locate)
    inputs, entries = _parse_inputs(model.get("inputs"), locate), model.get("nodes")
    if not isinstance(entries, Mapping) or not entries:
        raise UserError("the model has no nodes", where=locate(("model", "nodes")))
    nodes = {str(name): _parse_node(str(name), entry, vocabulary, locate) for name, entry in entries.items()}
    for name, node in nodes.items():
        if name in inputs:
            raise _wrong(f"node `{name}` has the name of an input", locate, name)
        for source in node.inputs:
            if source not in nodes and source not in inputs:
                what = f"node `{name}` takes `{source}`, which is neither a node nor an input"
                raise _wrong(what, locate, name, "in", fix=_suggest(source, [*nodes, *inputs]))
    for name, node in nodes.items():
        with calling(node, "bind"):
            nodes[name] = replace(node, layer=node.layer.bind(nodes))
    graph = _ordered(nodes, inputs, locate)
    losses = [name for name, node in nodes.items() if node.layer.is_loss]
    if len(losses) != 1:
        raise _wrong(f"the model must have exactly one loss node, it has {losses or 'none'}", locate)
    alive = graph.needed_for(losses[0])
    lenders = {nodes[name].layer.shares for name in alive}
    for name in nodes:
        if name not in alive and name not in lenders:
            raise _wrong(f"node `{name}` is dead: nothing that leads to `{losses[0]}` uses it", locate, name)
    return graph


def _wrong(what: str, locate: Locate, *keys: str, fix: str = "") -> UserError:
    return UserError(what, where=locate(("model", "nodes", *keys)), fix=fix)


def _suggest(word: str, known: Iterable[str], within: Path = ()) -> str:
    """A line that names the nearest known word, with the keys that it stands within, or all of them."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return meant(".".join((*within, name)) for name in near) or f"There are: {', '.join(sorted(known))}."


def _check_keys(entry: Any, known: Iterable[str], path: Path, locate: Locate) -> None:
    if not isinstance(entry, Mapping):
        raise UserError(f"{path[-1]} must be a mapping, not {entry!r}", where=locate(path))
    for key in map(str, entry):
        if key not in known:
            what = f"`{'.'.join((*path[2:], key))}` is not a setting"
            raise UserError(what, where=locate((*path, key)), fix=_suggest(key, known, path))


def _parse_inputs(value: Any, locate: Locate) -> dict[str, Shape]:
    """The inputs by name: [tokens], or a mapping with the size of an array's rows."""
    given = {"tokens": [SEQUENCE]} if value in ("tokens", ["tokens"]) else value
    shapes: dict[str, Shape] = {}
    for name, size in given.items() if isinstance(given, Mapping) else ():
        sizes = tuple(size) if isinstance(size, list | tuple) else ()
        if name == "tokens" and sizes == (SEQUENCE,):
            shapes[name] = TOKENS
        elif name != "tokens" and sizes and all(type(n) is int and n > 0 for n in sizes):
            shapes[str(name)] = Shape((BATCH, *sizes))
    if not shapes or len(shapes) < len(given):
        what = f"`inputs` must be [tokens], or the size of one row of each array, not {value!r}"
        raise UserError(what, where=locate(("model", "inputs")), fix="Write for instance {images: [8, 8, 1]}.")
    return shapes


def _parse_node(name: str, entry: Any, vocabulary: int | None, locate: Locate) -> Node:
    if not isinstance(entry, Mapping) or "kind" not in entry or "in" not in entry:
        raise _wrong(f"node `{name}` needs `kind` and `in`", locate, name)
    kind = str(entry["kind"])
    if kind not in LAYERS:
        raise _wrong(f"unknown kind `{kind}`", locate, name, "kind", fix=_suggest(kind, LAYERS))
    layer = LAYERS[kind]
    inputs = entry["in"] if isinstance(entry["in"], list | tuple) else [entry["in"]]
    if len(inputs) != len(layer.takes) or not all(isinstance(i, str) for i in inputs):
        what = f"{kind} takes {len(layer.takes)} inputs ({', '.join(layer.takes)}), got {entry['in']!r}"
        raise _wrong(what, locate, name, "in")
    repeat, scan = entry.get("repeat"), entry.get("scan", "auto")
    if repeat is not None and (type(repeat) is not int or repeat < 1):
        raise _wrong(f"repeat must be a positive whole number, not {repeat!r}", locate, name, "repeat")
    if scan not in (True, False, "auto"):
        raise _wrong(f"scan must be true, false or auto, not {scan!r}", locate, name, "scan")
    settings = {key: value for key, value in entry.items() if key not in _NODE_KEYS}
    if settings.get("vocab") == "auto":
        if vocabulary is None:
            fix = "Train the tokenizer first, or give the number."
            raise _wrong("`vocab: auto` is the tokenizer's vocabulary", locate, name, "vocab", fix=fix)
        settings["vocab"] = vocabulary
    path = ("model", "nodes", name)
    _check_keys(settings, [*layer.model_fields, *_NODE_KEYS], path, locate)
    try:
        return Node(name, layer.model_validate(settings), tuple(inputs), repeat, scan, where=locate(path))
    except ValidationError as error:
        raise explain(error, layer, settings, lambda inner: locate((*path, *map(str, inner)))) from None


def _ordered(nodes: Mapping[str, Node], inputs: Mapping[str, Shape], locate: Locate) -> Graph:
    """The graph with its nodes after their inputs, and the shapes of all values."""
    shapes, parameters = dict(inputs), {}
    try:
        names = [*TopologicalSorter({name: node.inputs for name, node in nodes.items()}).static_order()]
    except CycleError as error:
        cycle = error.args[1]
        raise _wrong(f"the nodes form a cycle: {' -> '.join(cycle)}", locate, cycle[0], "in") from None
    ordered = [nodes[name] for name in names if name in nodes]
    for index, node in enumerate(ordered):
        taken = tuple(shapes[source] for source in node.inputs)
        with calling(node, "shape"):
            shapes[node.name] = shape = node.layer.shape(taken)
            if not isinstance(shape, Shape):
                raise ShapeMismatch(f"`shape` returns {shape!r}, not a Shape")
        with calling(node, "parameters"):
            own = node.layer.parameters(taken)
            declared = flatten_dict(own).values()
            if wrong := [leaf for leaf in declared if not isinstance(leaf, ParamSpec)]:
                raise ShapeMismatch(f"`parameters` holds {wrong[0]!r}, not dicts of ParamSpec alone")
        hidden = any(len(p.shape) > 1 for p in declared) and not isinstance(node.layer, _TABLES)
        ordered[index] = replace(node, hidden=hidden, takes=taken)
        if own:
            stacked = partial(ParamSpec.stacked, layers=node.layers)
            parameters[node.name] = own if node.repeat is None else jax.tree.map(stacked, own)
        if node.repeat is not None and (shape,) != taken:
            raise _wrong(f"node `{node.name}` cannot repeat: it turns {taken[0]} into {shape}", locate, node.name)
    return Graph(tuple(inputs.items()), tuple(ordered), shapes, parameters)


# ---- what a graph costs, known from its shapes alone: parameters and floating point operations ----
#
# A matrix product of [m, k] and [k, n] is 2 m n k operations and nothing else counts. Attention counts the pairs of
# tokens that causality leaves, S (S + 1) / 2 of a row, as if its documents were one. Experts count for the tokens sent
# to them or, where they have a capacity, for their slots, filled or not. A training step is three forward passes, as
# recomputation is not counted; of a node that no gradient goes through (`constant`) it is one.


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers a graph learns."""

    total: int
    active: int  # that one token uses: all but the experts it is not sent to
    embedding: int  # tables that are looked up, of tokens or positions; a tied unembedding is one of them


def parameters(graph: Graph) -> ParameterCount:
    """Counts of the declared parameters; nothing is allocated."""
    tables = [node.name for node in graph.nodes if isinstance(node.layer, Embedding | LearnedPositions)]
    embedding = sum(p.size for name in tables for p in jax.tree.leaves(graph.parameters[name]))
    declared = jax.tree.leaves(graph.parameters)
    return ParameterCount(sum(p.size for p in declared), sum(p.active for p in declared), embedding)


def analyze(graph: Graph, batch: int, context: int) -> list[dict[str, Any]]:
    """One JSON-able row per node, at this batch (rows) and context (tokens of a row), all its repeats together.

    `flops` are of a forward pass, `training_flops` of a forward and a backward pass; `shape` is symbolic in B and S.
    """
    rows: list[dict[str, Any]] = []
    for node in graph.nodes:
        cost = node.layer.cost(node.takes, {BATCH: batch, SEQUENCE: context})
        flops = (cost.matmul + cost.attention) * node.layers
        row = {"name": node.name, "kind": node.layer.kind_name, "inputs": [*node.inputs], "repeat": node.layers}
        row |= {"shape": str(graph.shapes[node.name]), "flops": flops}
        row |= {"parameters": sum(p.size for p in jax.tree.leaves(graph.parameters.get(node.name, {})))}
        rows.append(row | {"training_flops": flops if node.layer.constant else 3 * flops})
    return rows

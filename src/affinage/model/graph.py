"""The model as data: a directed acyclic graph of named, parameterised functions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from affinage.errors import UserError
from affinage.model.node import Node, ancestors
from affinage.model.parameter import Tree, parameters_in, stacked
from affinage.model.shape import Shape
from affinage.model.validation import (
    INPUTS,
    Locate,
    check_alive,
    check_inputs,
    complete,
    infer_shapes,
    known_keys,
    parse_inputs,
    parse_node,
    topological,
)


@dataclass(frozen=True)
class Graph:
    """A validated graph, its nodes in an order in which every node follows its inputs.

    Built by `parse`; equal and hashed by what the recipe says.
    """

    inputs: tuple[tuple[str, Shape], ...]
    nodes: tuple[Node, ...]
    shapes: Mapping[str, Shape] = field(compare=False, repr=False)  # of every input and node

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def input_shapes(self, node: Node) -> tuple[Shape, ...]:
        """Shapes of the values that a node takes."""
        return tuple(self.shapes[name] for name in node.inputs)

    @cached_property
    def loss(self) -> str:
        """Name of the node that training minimises."""
        return next(node.name for node in self.nodes if node.kind.is_loss)

    @cached_property
    def logits(self) -> str:
        """Name of the node whose logits the loss is of."""
        for name in self.needed_for(self.loss):
            if "logits" in (kind := self[name].kind).takes:
                return self[name].inputs[kind.takes.index("logits")]
        raise UserError("the model is not a language model: its loss is not a next_token_loss")

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can both read and tell apart in its logits."""
        read = [vocab for node in self.nodes if isinstance(vocab := getattr(node.kind, "vocab", None), int)]
        return min(self.shapes[self.logits].width, *read)

    @property
    def width(self) -> int:
        """Width of the vectors that become logits."""
        return self.shapes[self[self.logits].inputs[0]].width

    @cached_property
    def depth(self) -> int:
        """Layers that add to a residual stream, for the scale of their first values."""
        return max(1, sum(n.layers for n in self.nodes if any(p.residual for p in parameters_in(self._own(n)))))

    def _own(self, node: Node) -> Tree:
        return node.kind.parameters(self.input_shapes(node))

    @cached_property
    def parameters(self) -> Tree:
        """Declarations of all parameters: {node name: nested dict}; a repeated node's have the layers first."""
        tree: Tree = {}
        for node in self.nodes:
            own = self._own(node)
            if own:
                tree[node.name] = own if node.repeat is None else stacked(own, node.repeat)
        return tree

    def sizes(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """What the symbols in the inputs' shapes stand for in this batch of arrays: B, and S where there are tokens."""
        return {
            symbol: size
            for name, shape in self.inputs
            for symbol, size in zip(shape.dims, batch[name].shape, strict=True)
            if isinstance(symbol, str)
        }

    def needed_for(self, name: str) -> Collection[str]:
        """Names of the node itself and of all that it is computed from."""
        return ancestors(self._by_name, name)

    def narrowing(self, names: Collection[str]) -> str:
        """The first of the named nodes that can leave out tokens whose values are not wanted in the end.

        It is the last one that looks at other tokens, if it `narrows` and all later ones read it alone; else the end.
        """
        first, later = "", set[str]()
        read: set[str] = set()  # by the later nodes
        for node in reversed([node for node in self.nodes if node.name in names]):
            if not read <= later | {node.name}:
                break
            first = node.name if node.kind.narrows else first
            if not node.kind.by_token:
                break
            later.add(node.name)
            read.update(node.inputs)
        if not first:
            raise ValueError("the last node computes all tokens or none")
        return first

    def to_dict(self) -> dict[str, Any]:
        """The `model:` mapping of a recipe that parses to this graph again."""
        nodes: dict[str, Any] = {}
        for node in self.nodes:
            entry: dict[str, Any] = {"kind": node.kind.kind_name}
            entry["in"] = node.inputs[0] if len(node.inputs) == 1 else list(node.inputs)
            if node.repeat is not None:
                entry["repeat"] = node.repeat
            if node.scan != "auto":
                entry["scan"] = node.scan
            nodes[node.name] = entry | node.kind.model_dump(mode="json", exclude_defaults=True)
        if all(name in INPUTS for name, _ in self.inputs):
            return {"inputs": [name for name, _ in self.inputs], "nodes": nodes}
        return {"inputs": {name: list(shape.dims[1:]) for name, shape in self.inputs}, "nodes": nodes}


def parse(model: Mapping[str, Any], locate: Locate = ".".join, *, vocabulary: int | None = None) -> Graph:
    """The validated graph of a `model:` mapping with `inputs` and `nodes`.

    `locate` turns a path such as `("model", "nodes", "blocks", "ffn", "width")` into where the user wrote it.
    `vocabulary` is what `vocab: auto` stands for: the size of the tokenizer that is in use.
    Raises UserError for unknown kinds, keys and inputs, wrong arity, cycles, shapes without a rule, and dead nodes.
    """
    known_keys(model, ("inputs", "nodes"), ("model",), locate)
    inputs = parse_inputs(model.get("inputs"), locate)
    entries = model.get("nodes")
    if not isinstance(entries, Mapping) or not entries:
        raise UserError("the model has no nodes", where=locate(("model", "nodes")))
    nodes = {str(name): parse_node(str(name), entry, vocabulary, locate) for name, entry in entries.items()}
    check_inputs(nodes, inputs, locate)
    ordered = topological(complete(nodes, locate), locate)
    shapes = infer_shapes(ordered, inputs, locate)
    check_alive(ordered, locate)
    return Graph(tuple(inputs.items()), tuple(ordered.values()), shapes)

"""From a recipe's nodes to validated ones, or to one message that says which line is wrong."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

import affinage.model.kinds  # noqa: F401  registers the kinds of the package
from affinage.config.mistakes import explain
from affinage.errors import UserError, meant
from affinage.model.kind import KINDS, NodeKind
from affinage.model.node import Node, ancestors
from affinage.model.shape import BATCH, TOKENS, Shape, ShapeMismatch

Path = tuple[str, ...]
Locate = Callable[[Path], str]
INPUTS: dict[str, Shape] = {"tokens": TOKENS}
NODE_KEYS = ("kind", "in", "repeat", "scan")


def _suggest(word: str, known: Iterable[str], within: Path = ()) -> str:
    """A line that names the nearest known word, with the keys that it stands within, or all of them."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return meant(".".join((*within, name)) for name in near) or f"There are: {', '.join(sorted(known))}."


def known_keys(entry: Any, known: Iterable[str], path: Path, locate: Locate) -> None:
    """Refuses what is not a mapping, and keys that are not known."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{path[-1]} must be a mapping, not {entry!r}", where=locate(path))
    for key in entry:
        if key not in known:
            raise UserError(
                f"`{'.'.join((*path[2:], str(key)))}` is not a setting",
                where=locate((*path, str(key))),
                fix=_suggest(str(key), known, path),
            )


def parse_inputs(value: Any, locate: Locate) -> dict[str, Shape]:
    """The inputs by name: a list of those that are always the same, or a mapping with the size of an array's rows."""
    if isinstance(value, Mapping) and value:
        return {str(name): _array_input(str(name), size, locate) for name, size in value.items()}
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise UserError("`inputs` must list what the batch holds, e.g. [tokens]", where=locate(("model", "inputs")))
    for name in names:
        if not isinstance(name, str) or name not in INPUTS:
            raise UserError(
                f"unknown input `{name}`", where=locate(("model", "inputs")), fix=_suggest(str(name), INPUTS)
            )
    return {name: INPUTS[name] for name in names}


def _array_input(name: str, size: Any, locate: Locate) -> Shape:
    sizes = tuple(size) if isinstance(size, list | tuple) else ()
    if name in INPUTS and sizes == INPUTS[name].dims[1:]:
        return INPUTS[name]
    if not sizes or name in INPUTS or not all(type(n) is int and n > 0 for n in sizes):
        shown = ", ".join(map(str, INPUTS[name].dims[1:])) if name in INPUTS else "8, 8, 1"
        what = f"input `{name}` must have the size of one row, not {size!r}"
        raise UserError(what, where=locate(("model", "inputs", name)), fix=f"Write it like [{shown}].")
    return Shape((BATCH, *sizes))


def parse_node(name: str, entry: Any, vocabulary: int | None, locate: Locate) -> Node:
    """One node, its settings validated and its inputs counted; `vocabulary` is what `vocab: auto` stands for."""
    path: Path = ("model", "nodes", name)
    if not isinstance(entry, Mapping) or "kind" not in entry or "in" not in entry:
        raise UserError(f"node `{name}` needs `kind` and `in`", where=locate(path))
    kind = KINDS.get(entry["kind"]) if isinstance(entry["kind"], str) else None
    if kind is None:
        what = f"unknown kind `{entry['kind']}`"
        raise UserError(what, where=locate((*path, "kind")), fix=_suggest(str(entry["kind"]), KINDS))
    inputs = entry["in"] if isinstance(entry["in"], list | tuple) else [entry["in"]]
    if len(inputs) != len(kind.takes) or not all(isinstance(i, str) for i in inputs):
        what = f"{entry['kind']} takes {len(kind.takes)} inputs ({', '.join(kind.takes)}), got {entry['in']!r}"
        raise UserError(what, where=locate((*path, "in")))
    repeat, scan = entry.get("repeat"), entry.get("scan", "auto")
    if repeat is not None and (not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1):
        raise UserError(f"repeat must be a positive whole number, not {repeat!r}", where=locate((*path, "repeat")))
    if scan not in (True, False, "auto"):
        raise UserError(f"scan must be true, false or auto, not {scan!r}", where=locate((*path, "scan")))
    settings = {key: value for key, value in entry.items() if key not in NODE_KEYS}
    if settings.get("vocab") == "auto":
        if vocabulary is None:
            fix = "Run the tokenizer's stage first, or give the number."
            raise UserError("`vocab: auto` is the tokenizer's vocabulary", where=locate((*path, "vocab")), fix=fix)
        settings["vocab"] = vocabulary
    return Node(name, _parse_settings(kind, settings, path, locate), tuple(inputs), repeat, scan)


def _parse_settings(kind: type[NodeKind], settings: dict[str, Any], path: Path, locate: Locate) -> NodeKind:
    known_keys(settings, [*kind.model_fields, *NODE_KEYS], path, locate)
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise explain(error, kind, settings, lambda inner: locate((*path, *map(str, inner))), path) from None


def check_inputs(nodes: Mapping[str, Node], inputs: Mapping[str, Shape], locate: Locate) -> None:
    """Every node has a name of its own, and takes what exists."""
    for name in nodes:
        if name in inputs:
            raise UserError(f"node `{name}` has the name of an input", where=locate(("model", "nodes", name)))
    for node in nodes.values():
        for name in node.inputs:
            if name not in nodes and name not in inputs:
                raise UserError(
                    f"node `{node.name}` takes `{name}`, which is neither a node nor an input",
                    where=locate(("model", "nodes", node.name, "in")),
                    fix=_suggest(name, [*nodes, *inputs]),
                )


def complete(nodes: Mapping[str, Node], locate: Locate) -> dict[str, Node]:
    """Nodes with the settings that follow from one another."""
    kinds = {name: node.kind for name, node in nodes.items()}
    completed = {}
    for name, node in nodes.items():
        try:
            kind = node.kind.complete(kinds)
        except ValueError as error:
            raise UserError(f"node `{name}`: {error}", where=locate(("model", "nodes", name))) from None
        completed[name] = replace(node, kind=kind)
    bound = {}
    for name, node in completed.items():
        try:
            bound[name] = replace(node, kind=node.kind.bind(completed))
        except ValueError as error:
            raise UserError(f"node `{name}`: {error}", where=locate(("model", "nodes", name))) from None
    return bound


def topological(nodes: Mapping[str, Node], locate: Locate) -> dict[str, Node]:
    """Nodes after their inputs, otherwise as written; a cycle is told with its nodes."""
    ordered: dict[str, Node] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in ordered or name not in nodes:
            return
        if name in trail:
            cycle = " -> ".join([*trail[trail.index(name) :], name])
            raise UserError(f"the nodes form a cycle: {cycle}", where=locate(("model", "nodes", name, "in")))
        for source in nodes[name].inputs:
            visit(source, (*trail, name))
        ordered[name] = nodes[name]

    for name in nodes:
        visit(name, ())
    return ordered


def infer_shapes(ordered: Mapping[str, Node], inputs: Mapping[str, Shape], locate: Locate) -> dict[str, Shape]:
    """The shape of every input and node."""
    shapes = dict(inputs)
    for node in ordered.values():
        given = tuple(shapes[name] for name in node.inputs)
        where = locate(("model", "nodes", node.name))
        try:
            shapes[node.name] = node.kind.shape(given)
        except ShapeMismatch as error:
            raise UserError(f"node `{node.name}` ({node.kind.kind_name}): {error}", where=where) from None
        if node.repeat is not None and (shapes[node.name],) != given:
            what = f"node `{node.name}` cannot repeat: it turns {given[0]} into {shapes[node.name]}"
            raise UserError(what, where=where)
    return shapes


def check_alive(nodes: Mapping[str, Node], locate: Locate) -> None:
    """Exactly one loss, and every node leads to it or lends it parameters."""
    losses = [name for name, node in nodes.items() if node.kind.is_loss]
    if len(losses) != 1:
        what = f"the model must have exactly one loss node, it has {losses or 'none'}"
        raise UserError(what, where=locate(("model", "nodes")))
    alive = set(ancestors(nodes, losses[0]))
    alive |= {shared for name in alive if (shared := nodes[name].kind.shares)}
    for name in nodes:
        if name not in alive:
            raise UserError(
                f"node `{name}` is dead: nothing that leads to `{losses[0]}` uses it",
                where=locate(("model", "nodes", name)),
            )

"""The recipe as a JSON schema, so that an editor completes keys, shows what they mean and marks what is wrong."""

from collections.abc import Mapping
from typing import Any

from affinage.config.recipe import Recipe
from affinage.config.reference import classes_inside, comments
from affinage.config.settings import Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What every node of a graph may have besides the settings of its kind.
_OF_A_NODE = {
    "in": {"description": "the node, or nodes, that it reads", "anyOf": [{"type": "string"}, {"type": "array"}]},
    "repeat": {"description": "times in a row, with parameters of its own each time", "type": "integer", "minimum": 1},
    "scan": {"description": "one compiled body for all repeats", "enum": [True, False, "auto"]},
}


def json_schema(kinds: Mapping[str, type[Settings]]) -> dict[str, Any]:
    """The schema of a recipe file, for draft 2020-12.

    No key is required, as a base may give it; every key may be null, which takes away what the base says. `affinage`
    itself checks more than a schema can say.

    Args:
        kinds: the kinds of nodes, by name. Nodes of other kinds, such as a plug-in's, are let pass.
    """
    schema = Recipe.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    classes = _settings_classes(Recipe)
    nodes = []
    for name, kind in kinds.items():
        of_kind = kind.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= of_kind.pop("$defs", {})
        classes |= _settings_classes(kind) | {kind.__name__: kind}
        if "vocab" in of_kind["properties"]:
            of_kind["properties"]["vocab"] = {"anyOf": [of_kind["properties"]["vocab"], {"const": "auto"}]}
        of_kind["properties"] = {"kind": {"const": name}, **_OF_A_NODE, **of_kind.get("properties", {})}
        definitions[f"node.{name}"] = of_kind
        known = {"properties": {"kind": {"const": name}}, "required": ["kind"]}
        nodes.append({"if": known, "then": {"$ref": f"#/$defs/node.{name}"}})
    for name, definition in definitions.items():
        _loosen(definition, classes.get(name.removeprefix("node.")) or kinds.get(name.removeprefix("node.")))
    _loosen(schema, Recipe)
    schema["properties"]["base"] = {
        "description": "the recipe that this one starts from: a path or a name",
        "type": "string",
    }
    schema["properties"]["model"] = {
        "description": "the graph: named nodes that read each other",
        "type": ["object", "null"],
        "properties": {
            "inputs": {"description": "what the graph reads", "type": ["array", "object"]},
            "nodes": {
                "type": "object",
                "additionalProperties": {
                    "type": ["object", "null"],
                    "properties": {"kind": {"anyOf": [{"enum": list(kinds)}, {"type": "string"}]}, **_OF_A_NODE},
                    "allOf": nodes,
                },
            },
        },
    }
    return {"$schema": DIALECT, "title": "A recipe of affinage", **{k: v for k, v in schema.items() if k != "title"}}


def _settings_classes(model: type[Settings]) -> dict[str, type[Settings]]:
    return {found.__name__: found for found in classes_inside(model)}


def _loosen(definition: dict[str, Any], model: type[Settings] | None) -> None:
    """No key is required, all may be null, and those of a settings class say what they mean."""
    definition.pop("required", None)
    definition.pop("title", None)
    meanings = comments(model) if model is not None else {}
    for name, inner in definition.get("properties", {}).items():
        inner.pop("title", None)
        if meanings.get(name):
            inner["description"] = meanings[name]
        if {"type": "null"} not in inner.get("anyOf", []) and "const" not in inner:
            described = {key: inner.pop(key) for key in ("description", "default") if key in inner}
            definition["properties"][name] = {**described, "anyOf": [inner, {"type": "null"}]}

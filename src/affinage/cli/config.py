"""Verbs about recipes: `recipes`, `new`, `config show`, `config schema`, `graph`; and about this machine: `doctor`."""

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from affinage.cli import terminal
from affinage.cli.terminal import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, app, arg, emit, load, opt
from affinage.errors import UserError, did_you_mean
from affinage.json_files import write_atomically

if TYPE_CHECKING:
    from affinage.config.yaml import Path as Keys

group = terminal.verbs("config", "Show the settings of a recipe, or the JSON schema of recipes.")
_SCHEMA_FILE = "recipe.schema.json"
_UNKNOWN_CHARACTERS = 256  # the size of `vocab: auto` before the characters of the text have been counted
_OPTIONAL = {  # package -> what needs it, and the extra that installs it
    "torch": ("export --verify", "verify"),
    "ray": ("data.executor: ray, and launch --on ray", "ray"),
    "libtpu": ("training on TPUs, and plan --compile for TPUs", "tpu"),
    "jax_cuda12_plugin": ("training on NVIDIA GPUs", "cuda"),
}
_NEW = """\
# yaml-language-server: $schema={schema}
base: {base}
name: {name}
# What differs from the base comes here, for example:
# data: {{sources: [my_text/], languages: [en, fr]}}
# pretrain: {{steps: 2000}}
"""


@app.command()
def recipes(as_json: JsonOption = False) -> None:
    """List the packaged recipes.

    Example: affinage recipes
    """
    from affinage.config.load import packaged_recipes, read_file

    rows = [
        {"name": name, "description": read_file(path).raw.get("description", ""), "file": str(path)}
        for name, path in packaged_recipes().items()
    ]
    shown = terminal.table([row | {"file": None} for row in rows])
    emit(rows, as_json, [shown, "\nRun one: affinage run NAME. Start your own: affinage new my-run --like NAME."])


@app.command()
def new(
    name: Annotated[str, arg("NAME", "Of the run, and of the file NAME.yaml.")],
    like: Annotated[str, opt("The recipe to start from.", "--like", metavar="RECIPE")] = "quickstart",
) -> None:
    """Write NAME.yaml, a recipe based on another one, and the schema with which editors check it.

    Example: affinage new my-run --like novels
    """
    from affinage.config.load import find_recipe, packaged_recipes

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"a run cannot be called `{name}`", fix="Use letters, digits, dots and dashes.")
    path, base = Path(f"{name}.yaml"), find_recipe(like)
    terminal.must_be_new(path)
    shown = like if like in packaged_recipes() else base.as_posix()
    write_atomically(Path(_SCHEMA_FILE), _schema().encode())
    write_atomically(path, _NEW.format(schema=_SCHEMA_FILE, base=shown, name=name).encode())
    print(f"Written: {path}, based on `{shown}`. Change it, then: affinage run {path}")


@group.command()
def show(
    recipe: RecipeArgument,
    key: Annotated[str, arg("[KEY]", "Only this section or setting.")] = "",
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Print every value in effect, and where it was written.

    Example: affinage config show novels-chat pretrain
    """
    from affinage.config.yaml import as_yaml

    loaded, _ = load(recipe, overrides, runs, lenient=True)
    tokens, rows = (loaded.raw.get("pretrain") or {}).get("tokens"), []
    for path, value in _leaves(loaded.recipe.model_dump(mode="json")):
        place = ("pretrain", "tokens") if tokens is not None and path == ("pretrain", "steps") else path
        if path == ("pretrain", "tokens"):
            value = tokens  # of which the steps are made
        name, is_written = ".".join(map(str, path)), _is_written(loaded.raw, place, value)
        if is_written or name == key or value not in (None, "", [], {}):
            rows.append({"key": name, "value": value, "origin": loaded.locate(place) if is_written else "default"})
    shown = [row for row in rows if f"{row['key']}.".startswith(f"{key}." if key else "")]
    if not shown:
        fix = did_you_mean(key, [row["key"] for row in rows]) or f"`affinage config show {recipe}` lists all."
        raise UserError(f"`{key}` has no value in effect", where="KEY", fix=fix)
    emit(shown, as_json, [terminal.table([row | {"value": as_yaml(row["value"])} for row in shown])])


def _leaves(value: Any, path: "Keys" = ()) -> Iterator[tuple["Keys", Any]]:
    """The words, numbers and lists of them in a value, each with its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, (*path, place))
    else:
        yield path, value


def _is_written(raw: Any, path: "Keys", value: Any) -> bool:
    """Whether a recipe sets the value in effect at a path, which is otherwise a default."""
    for key in path:
        kind: type[Any] = dict if isinstance(key, str) else list
        if not isinstance(raw, kind):
            # A short form: `[wandb]` for {wandb: {}}, {en: 1} for [{weights: {en: 1}}], `my_text/` for {path: my_text/}
            return isinstance(raw, dict | list) or bool(raw == value)
        if isinstance(raw, dict) and key not in raw:
            return False
        raw = raw[key]
    return True


@group.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors.

    Example: affinage config schema > recipe.schema.json
    """
    sys.stdout.write(_schema())


def _schema() -> str:
    """The schema of a recipe file, whose every key may be given by its base instead."""
    from affinage.config.recipe import Recipe

    schema = Recipe.model_json_schema()
    for definition in (schema, *schema["$defs"].values()):
        definition.pop("required", None)
    schema["properties"]["base"] = {"description": "The recipe that this one starts from.", "type": "string"}
    schema["properties"]["training"] = {"description": "Settings of all trainings.", "type": "object"}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": dialect, **schema}, indent=1, ensure_ascii=False) + "\n"


@app.command()
def graph(
    recipe: RecipeArgument, overrides: SetOption = None, runs: RunsOption = RUNS, as_json: JsonOption = False
) -> None:
    """Print the model graph: the shape and parameters of every node, and its FLOPs for one row.

    Example: affinage graph julian-600m
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: the accelerator is not taken
    loaded, run = load(recipe, overrides, runs, lenient=True)
    from affinage.api import graph_of
    from affinage.model.graph import analyze, parameters
    from affinage.model.layer import SEQUENCE

    vocabulary = terminal.characters_of(loaded, run or runs / loaded.recipe.name)
    if vocabulary is None and loaded.recipe.tokenizer.kind == "char":
        vocabulary = _UNKNOWN_CHARACTERS
        terminal.warn(f"`vocab: auto` is shown as {vocabulary} until `affinage data` has counted the characters")
    model, context = graph_of(loaded, vocabulary), loaded.recipe.packing.seq_len
    has_sequences = any(SEQUENCE in shape.dims for _, shape in model.inputs)
    facts = {"context": context if has_sequences else None, "parameters": asdict(parameters(model))}
    nodes = analyze(model, 1, context)
    total = {key: sum(node[key] for node in nodes) for key in ("parameters", "flops", "training_flops")}
    nodes.append({"name": "total", "kind": "", "inputs": [], "repeat": 1, "shape": "", **total})
    emit({"nodes": nodes, **facts}, as_json)


@app.command()
def doctor(runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what this machine has (devices, memory, disk, versions) and which packages are missing for what.

    Example: affinage doctor --json
    """
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire
    from affinage.results import versions

    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    machine = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(place).free,
    }
    missing = [
        {"package": package, "needed_for": purpose, "get_it": f"pip install 'affinage[{extra}]'"}
        for package, (purpose, extra) in _OPTIONAL.items()
        if importlib.util.find_spec(package) is None
    ]
    devices = []
    for device in acquire():
        known = chip(device.device_kind)
        facts = {"platform": device.platform, "kind": device.device_kind, "bfloat16_flops": known.flops_per_device}
        devices.append(facts | {"memory_bytes": known.memory_bytes})
    emit({"devices": devices, "machine": machine, "versions": versions(), "missing": missing}, as_json)

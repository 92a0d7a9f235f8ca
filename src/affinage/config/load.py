"""From a recipe file to one checked, frozen `Recipe` that knows where each of its values was written.

A recipe is made of layers: the bases that it names, the file itself, and `--set` on the command line.
"""

import copy
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import affinage
from affinage.config.mistakes import explain, settings_at, written_path
from affinage.config.recipe import TRAININGS, Recipe
from affinage.config.yaml import MAX_BYTES, parse
from affinage.config.yaml import Path as Keys
from affinage.errors import UserError, did_you_mean
from affinage.secrets import secret_in

# What a setting removes from the layers below: the other way to say the same thing, and the price of another slice.
_REMOVES = {"steps": "tokens", "batch_size": "per_device_batch_size", "warmup_steps": "warmup_ratio"}
_REMOVES |= {other: key for key, other in _REMOVES.items()} | {"slice": "price"}


@dataclass
class Layers:
    """What was written, after bases and overrides, before defaults; and where each value of it was written."""

    raw: dict[str, Any] = field(default_factory=dict)
    origins: dict[Keys, str] = field(default_factory=dict)  # ("pretrain", "steps") -> "recipes/quickstart.yaml:31"
    files: list[Path] = field(default_factory=list)  # the recipe's and those of its bases, the lowest first

    def locate(self, path: Sequence[str | int]) -> str:
        """Return where `path` was written (`file:line` or `--set key`), or the nearest thing around it that was."""
        keys = tuple(path)
        return next((self.origins[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self.origins), "")


@dataclass(kw_only=True)
class LoadedRecipe(Layers):
    """A recipe, the file it came from, and its layers."""

    recipe: Recipe
    path: Path
    command: str = ""  # runs it again
    runs: Path = Path("runs")  # the folder of the runs that it may name

    def beside(self, path: str, key: Sequence[str | int]) -> Path:
        """Resolve a path that stands under `key`: relative to the file it is written in, the recipe, or the process."""
        written = Path(self.locate(key).rpartition(":")[0])
        folders = (*([written.parent] if written.is_file() else []), self.path.parent, Path())
        candidates = [folder / os.path.expanduser(path) for folder in folders]
        return next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def load_recipe(
    path_or_name: str | Path, overrides: Sequence[str] = (), *, left_out: list[str] | None = None
) -> LoadedRecipe:
    """Load a recipe by path, or a packaged one by name, with `key=value` overrides laid over it.

    `base: other.yaml` in a file starts from another recipe (beside it, or a packaged one): mappings merge, lists and
    single values replace. Null switches off what can be off; in a mapping with keys of the user's, such as `mesh` or
    the nodes of the model, it removes what the base has. UserError lists all mistakes.

    `left_out`, for the recipe.json of a run of any version, receives the settings that this version does not have: they
    are left out, and so are sections that are not complete without them.
    """
    path = find_recipe(path_or_name)
    layers = read_file(path)
    for override in sorted(overrides, key=lambda each: each.startswith("hardware.price")):  # a slice clears the price
        _put_override(layers, override)
    _share_training(layers)
    layers.raw = _without_nulls(layers, layers.raw)
    present = dict(_parts(layers.raw))  # without what was replaced
    layers.origins = {keys: where for keys, where in layers.origins.items() if keys in present}
    for keys, value in present.items():
        if isinstance(value, str) and secret_in(value):
            what = "this holds a password or a token, which would be written into manifests and reports"
            fix = "Leave it to the environment: ~/.netrc for https, HF_TOKEN, WANDB_API_KEY, "
            raise UserError(what, where=layers.locate(keys), fix=fix + "the clouds' own for gs, s3.")
    # The command is printed in reports and model cards, which do not show this machine's folders.
    name, here = str(path_or_name), Path.cwd()
    if Path(name).is_absolute():
        name = str(Path(name).relative_to(here)) if Path(name).is_relative_to(here) else Path(name).name
    command = shlex.join(["affinage", "run", name, *(word for override in overrides for word in ("--set", override))])
    while True:
        try:
            return LoadedRecipe(**vars(layers), recipe=Recipe.model_validate(layers.raw), path=path, command=command)
        except ValidationError as error:
            mistakes = error.errors()
            first = next((each for each in mistakes if each["type"] == "extra_forbidden"), mistakes[0])
            wrong = written_path(first["loc"], layers.raw)
            if left_out is None or not wrong or layers.locate(wrong).startswith("--set "):
                raise explain(error, Recipe, layers.raw, layers.locate) from None
            section: Any = layers.raw
            for key in wrong[:-1]:
                section = section[key]
            del section[wrong[-1]]
            left_out.append(".".join(map(str, wrong)))


def read_file(path: Path, below: tuple[Path, ...] = ()) -> Layers:
    """Read a recipe file over the recipe that its `base` names; `below` are the files that led to this one."""
    resolved, here = path.resolve(), Path.cwd()
    shown = str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)
    with open(path, "rb") as file:
        value, lines = parse(file.read(MAX_BYTES + 1), shown)
    if not isinstance(value, dict):
        raise UserError("a recipe is a mapping of settings, such as `name: my-run`", where=shown)
    layers, base = Layers(), value.pop("base", None)
    if base is not None:
        where = f"{shown}:{lines[('base',)]}"
        try:
            file_of_base = find_recipe(str(base), path.parent).resolve()
        except UserError as error:
            raise UserError(f"`base: {base}`: {error.what}", where=where, fix=error.fix) from None
        chain = (*below, resolved)
        if file_of_base in chain:
            names = " -> ".join(each.name for each in (*chain[chain.index(file_of_base) :], file_of_base))
            raise UserError(f"`base` leads back to where it began: {names}", where=where, fix="Name another recipe.")
        layers = read_file(file_of_base, chain)
        layers.raw.pop("description", None)  # it would not describe what is built on it
    _lay(layers.raw, value)
    layers.origins |= {keys: f"{shown}:{line}" for keys, line in lines.items()}
    layers.files.append(resolved)
    return layers


def _put_override(layers: Layers, override: str) -> None:
    """Lay one `dotted.key=YAML` over the recipe; one of `training` also over what each training has of its own."""
    dotted, equals, text = override.partition("=")
    keys, shown = dotted.strip().split("."), f"--set {dotted.strip()}"
    if not equals or not all(keys):
        raise UserError("this is not `key=value`", where=f"--set {override}", fix="Write it as in pretrain.steps=100.")
    if keys[0] == "base":
        raise UserError("`base` can only be given in a file", where=shown, fix="Write `base:` into the recipe file.")
    value, _ = parse(text, shown)
    own = [name for name in TRAININGS if keys[0] == "training" and isinstance(layers.raw.get(name), dict)]
    for first in (keys[0], *own):
        keys[0], target = first, layers.raw
        for number, key in enumerate(keys[:-1], 1):
            if not isinstance(target.get(key), dict):
                target[key], layers.origins[tuple(keys[:number])] = {}, shown
            target = target[key]
        _lay(target, {keys[-1]: value})
        layers.origins |= {(*keys, *path): shown for path, _ in _parts(value)}


def _share_training(layers: Layers) -> None:
    """Lay each training's own settings over those that `training` gives for all of them."""
    shared = layers.raw.pop("training", {})
    if not isinstance(shared, dict):
        raise UserError("`training` must be a mapping of settings", where=layers.locate(("training",)))
    common = {keys[1:]: where for keys, where in layers.origins.items() if keys[:1] == ("training",)}
    for section in TRAININGS:
        if isinstance(own := layers.raw.get(section), dict):
            layers.raw[section] = copy.deepcopy(shared)
            _lay(layers.raw[section], own)
            layers.origins = {(section, *keys): where for keys, where in common.items()} | layers.origins


def _lay(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Lay one mapping over another: mappings merge, anything else replaces."""
    for key, other in _REMOVES.items():
        if above.get(key) not in (None, below.get(key)) and other not in above:
            below.pop(other, None)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay(below[key], value)
        else:
            below[key] = copy.deepcopy(value)


def _parts(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the path and value of everything in a value, itself included."""
    yield path, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from _parts(inner, (*path, key))


def _without_nulls(layers: Layers, value: Any, path: Keys = ()) -> Any:
    """Drop the nulls in mappings with keys of the user's, which remove what the base has."""
    if not isinstance(value, dict):
        return value
    free = not settings_at(Recipe, path)
    for key in (key for key, child in value.items() if free and child is None and ":" in key):
        fix = "Write a space after the colon, as in {data: 8}."
        raise UserError(f"the key `{key}` has no value", where=layers.locate((*path, key)), fix=fix)
    kept = {key: child for key, child in value.items() if child is not None or not free}
    return {key: _without_nulls(layers, child, (*path, key)) for key, child in kept.items()}


def find_recipe(path_or_name: str | Path, beside: Path = Path()) -> Path:
    """Return the recipe file: an existing path, or the packaged recipe of that name; UserError if there is none."""
    path, name, packaged = beside / path_or_name, str(path_or_name), packaged_recipes()
    if os.path.isfile(path):  # of a name that is too long for a file, Path's raises
        return path
    if name in packaged:
        return packaged[name]
    around = [each.name for each in path.parent.glob("*.y*ml")] if os.path.isdir(path.parent) else []
    fix = did_you_mean(name, packaged) or did_you_mean(path.name, around)
    if path.name == "recipe.yaml" and os.path.isfile(path.with_name("config.json")):
        fix = f"`affinage import {path.parent} --to NAME` writes one."
    raise UserError(f"there is no recipe `{name}`", fix=fix or f"Name a .yaml file, or one of {', '.join(packaged)}.")


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with affinage, by name: in a checkout its `recipes/`, installed those in the package."""
    package = Path(affinage.__file__).parent
    folder = next(folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir())
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}

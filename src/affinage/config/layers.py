"""A recipe is made of layers: the bases it names, the file itself, and `--set` on the command line."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import affinage
from affinage.config.yaml import MAX_BYTES, parse
from affinage.config.yaml import Path as Keys
from affinage.errors import UserError, did_you_mean

_NODES = ("model", "nodes")
_SHOWN = 80  # characters of an override, in messages
# Two ways to say one thing: the one that a later layer gives takes the place of the other in an earlier one.
_ALTERNATIVES = (("steps", "tokens"), ("batch_size", "per_device_batch_size"), ("warmup_steps", "warmup_ratio"))
_INSTEAD = dict(_ALTERNATIVES) | {other: one for one, other in _ALTERNATIVES}


@dataclass
class Layers:
    """The merged values, and where each of them was written (`file:line` or `--set key`)."""

    value: dict[str, Any] = field(default_factory=dict)
    origins: dict[Keys, str] = field(default_factory=dict)
    base: Path | None = None
    """The recipe that the file itself starts from."""
    overrides: dict[str, str] = field(default_factory=dict)
    """`--set key` -> the same with the value."""

    def locate(self, path: Sequence[str | int]) -> str:
        """Return where `path`, or the nearest thing around it that was written down, comes from.

        For a mapping this includes what was set within it on the command line, since the mistake may be there.
        """
        keys = tuple(path)
        written = next((n for n in range(len(keys), -1, -1) if keys[:n] in self.origins), None)
        if written is None:
            return ""
        origin, around = self.origins[keys[:written]], _NODES if keys[:-1] == _NODES else keys  # nodes read each other
        below = (place for known, place in self.origins.items() if known[: len(around)] == around != known)
        changed = [self.overrides[place] for place in dict.fromkeys(below) if around and place in self.overrides]
        changed = [] if origin in self.overrides else changed
        if changed and written < len(keys):
            return ", ".join(changed)
        return f"{origin}, with {', '.join(changed)}" if changed else origin

    def put(self, path: Keys, value: Any, origins: Mapping[Keys, str]) -> None:
        """Lay `value` over what stands at `path`: mappings merge, anything else replaces."""
        *above, key = path
        target: Any = self.value
        for step in above:
            if isinstance(target, dict) and not isinstance(target.get(step), dict | list):
                target[step] = {}
            target = target[step]
        # What lies inside an override comes from where the override does.
        origin = next(origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in origins)
        other = (*above, _INSTEAD.get(str(key), ""))
        if value is not None and other in self.origins and other not in origins and self.origins[other] != origin:
            del target[other[-1]], self.origins[other]
        if isinstance(value, dict) and isinstance(target, dict) and isinstance(target.get(key), dict):
            self.origins[path] = origin
        else:
            self.origins = {known: place for known, place in self.origins.items() if known[: len(path)] != path}
            self.origins |= {known: place for known, place in origins.items() if known[: len(path)] == path}
            self.origins[path] = origin
            target[key] = {} if isinstance(value, dict) else value
        for child, inner in value.items() if isinstance(value, dict) else ():
            self.put((*path, child), inner, origins)

    def share(self) -> None:
        """Lay each training's own settings over those that `training` gives for all of them."""
        shared = self.value.pop("training", None)
        if shared is None:
            return
        if not isinstance(shared, dict):
            raise UserError("`training` must be a mapping of settings", where=self.locate(("training",)))
        for section in ("pretrain", "sft", "dpo"):
            own = self.value.get(section)
            if not isinstance(own, dict):
                continue
            origins = {known: place for known, place in self.origins.items() if known[:1] == (section,)}
            common = {(section, *known[1:]): o for known, o in self.origins.items() if known[:1] == ("training",)}
            self.origins = {known: place for known, place in self.origins.items() if known not in origins}
            del self.value[section]
            self.put((section,), copy.deepcopy(shared), common)
            self.put((section,), own, origins)


def read_file(path: Path, below: tuple[Path, ...] = ()) -> Layers:
    """Read a recipe file over the recipe that its `base` names, if any."""
    shown = shown_path(path)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("this is not a text file in UTF-8", where=shown) from None
    except OSError as error:
        raise UserError(f"cannot read this recipe: {error.strerror}", where=shown) from None
    document = parse(text, shown)
    if not isinstance(document.value, dict):
        raise UserError("a recipe is a mapping of settings, such as `name: my-run`", where=shown)
    layers, base_path = Layers(), None
    base = document.value.pop("base", None)
    if base is not None:
        where = f"{shown}:{document.lines[('base',)]}"
        if not isinstance(base, str):
            raise UserError("`base` must be the path or the name of another recipe", where=where, fix="Name one.")
        try:
            base_path = find_recipe(base, path.parent).resolve()
        except UserError as error:
            raise UserError(f"`base: {base}`: {error.what}", where=where, fix=error.fix) from None
        if base_path in (*below, path.resolve()):
            raise UserError("this recipe is its own base", where=where, fix="Name another recipe, or leave `base` out.")
        layers = read_file(base_path, (*below, path.resolve()))
        layers.value.pop("description", None)  # what the base is, its descendants are not
    layers.base = base_path
    origins = {known: f"{shown}:{line}" for known, line in document.lines.items()}
    layers.origins[()] = origins[()]
    for key, value in document.value.items():
        layers.put((key,), value, origins)
    return layers


def put_override(layers: Layers, override: str) -> None:
    """Lay one `dotted.key=YAML` over the recipe."""
    dotted, equals, text = override.partition("=")
    keys, shown = dotted.strip().split("."), f"--set {dotted.strip()}"
    if not equals or not all(keys):
        fix = "For example: --set pretrain.steps=100"
        raise UserError("this is not `key=value`", where=f"--set {override}", fix=fix)
    if keys[0] == "base":
        raise UserError("`base` can only be given in a file", where=shown, fix="Write `base:` into the recipe file.")
    value: Any = layers.value
    path: Keys = ()
    for key in keys:  # where they lead into a list, a position in it
        known = range(len(value)) if isinstance(value, list) else ()
        if known and not (key.isdigit() and int(key) in known):
            what = f"`{'.'.join(map(str, path))}` is a list of {len(value)}, and `{key}` is none of its positions"
            raise UserError(what, where=shown, fix=f"Give a number from 0 to {len(value) - 1}, or the whole list.")
        if path and isinstance(path[-1], int) and not isinstance(value, dict):
            what = f"`{'.'.join(map(str, path))}` is `{value}` and has no `{key}`"
            raise UserError(what, where=shown, fix="Give the whole list.")
        path = (*path, int(key) if known else key)
        value = value[int(key)] if known else value.get(key) if isinstance(value, dict) else None
    layers.put(path, parse(text, shown).value, {path: shown})
    whole = f"{shown}={text.strip()}"
    layers.overrides[shown] = whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}..."


def find_recipe(path_or_name: str | Path, beside: Path = Path()) -> Path:
    """The file that is meant: an existing path, or the name of a recipe that comes with affinage.

    Raises:
        UserError: there is none.
    """
    path, name = beside / path_or_name, str(path_or_name)
    if os.path.isfile(path):  # of a name that is too long for a file, Path's raises
        return path
    if path.suffix not in (".yaml", ".yml") and "/" not in name:
        packaged = packaged_recipes()
        if name in packaged:
            return packaged[name]
        fix = did_you_mean(name, packaged) or f"Recipes that come with affinage: {', '.join(packaged)}."
        raise UserError(f"there is no recipe named `{name}`", fix=fix)
    if os.path.isdir(path):
        raise UserError("this is a folder, not a recipe", where=str(path), fix="Name the .yaml file.")
    around = [each.name for each in path.parent.glob("*.y*ml")] if os.path.isdir(path.parent) else []
    fix = did_you_mean(path.name, around) or "Give the path of a .yaml file, or a name that `affinage recipes` lists."
    raise UserError("there is no such recipe file", where=str(path), fix=fix)


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with affinage, by name: in a checkout its `recipes/`, installed those in the package."""
    package = Path(affinage.__file__).parent
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return {}


def shown_path(path: Path) -> str:
    """The path as the user would write it: relative to the working directory where it is inside it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

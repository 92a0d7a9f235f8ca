"""A recipe is made of layers: the bases it names, the file itself, and `--set` on the command line."""

import copy
import os
from collections.abc import Iterator, Sequence
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
        if not changed or origin in self.overrides:
            return origin
        return ", ".join(changed) if written < len(keys) else f"{origin}, with {', '.join(changed)}"

    def share(self) -> None:
        """Lay each training's own settings over those that `training` gives for all of them."""
        shared = self.value.pop("training", {})
        if not isinstance(shared, dict):
            raise UserError("`training` must be a mapping of settings", where=self.locate(("training",)))
        common = {known[1:]: origin for known, origin in self.origins.items() if known[:1] == ("training",)}
        for section in ("pretrain", "sft", "dpo"):
            own = self.value.get(section)
            if isinstance(own, dict):
                self.value[section] = copy.deepcopy(shared)
                _lay(self.value[section], own)
                inherited = {(section, *known): origin for known, origin in common.items() if known}
                self.origins = inherited | self.origins


def _lay(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Lay one mapping over another: mappings merge, anything else replaces."""
    for pair in _ALTERNATIVES:
        for one, other in (pair, pair[::-1]):
            if above.get(one) is not None and other not in above:
                below.pop(other, None)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay(below[key], value)
        else:
            below[key] = copy.deepcopy(value)


def _inside(value: Any, path: Keys) -> Iterator[Keys]:
    """The path of a value, and those of all values in it."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _inside(inner, (*path, key))


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
    layers, base = Layers(), document.value.pop("base", None)
    if base is not None:
        where = f"{shown}:{document.lines[('base',)]}"
        if not isinstance(base, str):
            raise UserError("`base` must be the path or the name of another recipe", where=where, fix="Name one.")
        try:
            found = find_recipe(base, path.parent).resolve()
        except UserError as error:
            raise UserError(f"`base: {base}`: {error.what}", where=where, fix=error.fix) from None
        if found in (*below, path.resolve()):
            raise UserError("this recipe is its own base", where=where, fix="Name another recipe, or leave `base` out.")
        layers = read_file(found, (*below, path.resolve()))
        layers.value.pop("description", None)  # it would not describe what is built on it
        layers.base = found
    _lay(layers.value, document.value)
    layers.origins |= {known: f"{shown}:{line}" for known, line in document.lines.items()}
    return layers


def put_override(layers: Layers, override: str) -> None:
    """Lay one `dotted.key=YAML` over the recipe; a number in the key is a position in a list."""
    dotted, equals, text = override.partition("=")
    keys, shown = dotted.strip().split("."), f"--set {dotted.strip()}"
    if not equals or not all(keys):
        fix = "For example: --set pretrain.steps=100"
        raise UserError("this is not `key=value`", where=f"--set {override}", fix=fix)
    if keys[0] == "base":
        raise UserError("`base` can only be given in a file", where=shown, fix="Write `base:` into the recipe file.")
    value, target, path = parse(text, shown).value, layers.value, list[str | int]()
    for at, key in enumerate(keys):
        place: Any = key
        if isinstance(target, list):
            place = int(key) if key.isdigit() and int(key) < len(target) else None
            if place is None or (at + 1 < len(keys) and not isinstance(target[place], dict)):
                what = f"`{'.'.join(keys[: at + 1])}` is not a mapping in a list of {len(target)}"
                raise UserError(
                    what, where=shown, fix=f"Give a position from 0 to {len(target) - 1}, or the whole list."
                )
        path.append(place)
        if at + 1 == len(keys):
            break
        if isinstance(target, dict) and not isinstance(target.get(key), dict | list):
            target[key] = {}
        target = target[place]
    if isinstance(target, dict):
        _lay(target, {str(path[-1]): value})
    else:
        target[path[-1]] = value
    layers.origins |= dict.fromkeys(_inside(value, tuple(path)), shown)
    whole = f"{shown}={text.strip()}"
    layers.overrides[shown] = whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}..."


def find_recipe(path_or_name: str | Path, beside: Path = Path()) -> Path:
    """Returns the recipe file: an existing path, or the packaged recipe of that name.

    Raises:
        UserError: there is none.
    """
    path, name = beside / path_or_name, str(path_or_name)
    if os.path.isfile(path):  # of a name that is too long for a file, Path's raises
        return path
    packaged = packaged_recipes()
    if path.suffix not in (".yaml", ".yml") and "/" not in name:
        if name in packaged:
            return packaged[name]
        fix = did_you_mean(name, packaged) or f"Packaged recipes: {', '.join(packaged)}."
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

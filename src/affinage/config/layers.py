"""A recipe is made of layers: the bases it names, the file itself, and `--set` on the command line."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import affinage
from affinage.config import marked_yaml
from affinage.errors import UserError, did_you_mean

PathTuple = marked_yaml.Path
_NODES = ("model", "nodes")
_SHOWN = 80  # characters of an override, in messages
_SAID_OF: dict[PathTuple, tuple[PathTuple, ...]] = {  # sources of text -> what a recipe says of them, and asks of them
    ("data", "sources"): (("description",), ("report", "prompts")),
    ("sft", "sources"): (("report", "questions"),),
}


@dataclass
class Layers:
    """The merged values, and where each of them was written (`file:line` or `--set key`)."""

    value: dict[str, Any] = field(default_factory=dict)
    origins: dict[PathTuple, str] = field(default_factory=dict)
    base: Path | None = None  # the recipe that the file itself starts from
    given: dict[str, str] = field(default_factory=dict)  # `--set key` -> as it was given, with the value

    def locate(self, path: Sequence[str | int]) -> str:
        """Say where `path`, or the nearest thing around it that was written down, comes from.

        Of a mapping, also what was set within it on the command line: whatever is wrong with it may come from there.
        """
        written = next((n for n in range(len(path), -1, -1) if tuple(path[:n]) in self.origins), None)
        if written is None:
            return ""
        origin = self.origins[tuple(path[:written])]
        changed = [] if origin in self.given else self._set_within(tuple(path))
        if changed and written < len(path):
            return ", ".join(changed)
        return f"{origin}, with {', '.join(changed)}" if changed else origin

    def _set_within(self, path: PathTuple) -> list[str]:
        """The overrides that lie within a mapping; of a node of the model, within any: it takes what others give."""
        value: Any = self.value
        for key in path:
            known = (isinstance(value, dict) and key in value) or (isinstance(value, list) and key in range(len(value)))
            value = value[key] if known else None
        if not path or not isinstance(value, dict):
            return []
        around = _NODES if path[:-1] == _NODES else path
        found = [origin for known, origin in self.origins.items() if known[: len(around)] == around]
        return [self.given[origin] for origin in dict.fromkeys(found) if origin in self.given]

    def texts(self) -> dict[PathTuple, Any]:
        """The sources that are named, without how much is taken of each."""
        return {path: _texts(self._at(path)) for path in _SAID_OF}

    def forget_what_was_said(self, before: dict[PathTuple, Any], own: Collection[str]) -> None:
        """Take away what was said of sources which the last layer replaced by others.

        Args:
            before: `texts` before that layer was laid.
            own: origins of what the layer says itself, which stays.
        """
        now = self.texts()
        for sources in _SAID_OF:
            if before[sources] and now[sources] != before[sources]:
                for said in _SAID_OF[sources]:
                    if self.origins.get(said, "") not in own:
                        self.forget(said)

    def forget(self, path: PathTuple) -> None:
        """Take away what stands at the keys `path`, if anything does."""
        around = self._at(path[:-1])
        if isinstance(around, dict) and path[-1] in around:
            del around[path[-1]]
            self.origins = {known: origin for known, origin in self.origins.items() if known[: len(path)] != path}

    def _at(self, path: PathTuple) -> Any:
        value: Any = self.value
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def put(self, path: PathTuple, value: Any, origins: dict[PathTuple, str]) -> None:
        """Lay `value` over what stands at `path`: mappings merge, anything else replaces."""
        target: Any = self.value
        for key in path[:-1]:
            if isinstance(target, dict) and not isinstance(target.get(key), dict | list):
                target[key] = {}
            target = target[key]
        key = path[-1]
        old = target.get(key) if isinstance(target, dict) else target[key]
        # What lies inside an override comes from where the override does.
        origin = next(origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in origins)
        if isinstance(value, dict) and isinstance(old, dict):
            self.origins[path] = origin
            for child, child_value in value.items():
                self.put((*path, child), child_value, origins)
            return
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        self.origins |= {known: origin for known, origin in origins.items() if known[: len(path)] == path}
        self.origins[path] = origin
        target[key] = _copy(value)


def _texts(sources: Any) -> Any:
    if not isinstance(sources, list):
        return sources
    named = ({"path": one} if isinstance(one, str) else one for one in sources)
    return [{k: v for k, v in one.items() if k != "max_bytes"} if isinstance(one, dict) else one for one in named]


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(child) for key, child in value.items()}
    return [_copy(child) for child in value] if isinstance(value, list) else value


def read_file(path: Path, below: tuple[Path, ...] = ()) -> Layers:
    """Read a recipe file over the recipe that its `base` names, if any."""
    shown = shown_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("this is not a text file in UTF-8", where=shown) from None
    except OSError as error:
        raise UserError(f"cannot read this recipe: {error.strerror}", where=shown) from None
    marked = marked_yaml.parse(text, shown)
    if not isinstance(marked.value, dict):
        raise UserError("a recipe is a mapping of settings, such as `name: my-run`", where=shown)
    layers, base_path = Layers(), None
    base = marked.value.pop("base", None)
    if base is not None:
        where = f"{shown}:{marked.lines[('base',)]}"
        base_path = _base_path(base, path, where)
        if base_path in (*below, path.resolve()):
            raise UserError("this recipe is its own base", where=where)
        layers = read_file(base_path, (*below, path.resolve()))
        layers.forget(("description",))  # what the base is, its descendants are not
    layers.base, texts = base_path, layers.texts()
    origins = {known: f"{shown}:{line}" for known, line in marked.lines.items() if known[:1] != ("base",)}
    layers.origins[()] = origins[()]
    for key, value in marked.value.items():
        layers.put((key,), value, origins)
    layers.forget_what_was_said(texts, origins.values())
    return layers


def put_override(layers: Layers, override: str) -> None:
    """Lay one `dotted.key=YAML` over the recipe."""
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    shown = f"--set {dotted}"
    if not equals or not dotted or not all(dotted.split(".")):
        raise UserError(
            "this is not `key=value`", where=f"--set {override}", fix="For example: --set pretrain.steps=100"
        )
    if dotted.split(".")[0] == "base":
        raise UserError("`base` can only be given in the file", where=shown)
    path, texts = _existing(layers.value, dotted.split("."), shown), layers.texts()
    layers.put(path, marked_yaml.parse(text, shown).value, {path: shown})
    whole = f"{shown}={text.strip()}"
    layers.given[shown] = whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}..."
    layers.forget_what_was_said(texts, layers.given)


def _existing(value: Any, keys: list[str], shown: str) -> PathTuple:
    """The path that `keys` mean in `value`: where they lead into a list, a position in it."""
    path: PathTuple = ()
    for key in keys:
        dotted = ".".join(map(str, path))
        if isinstance(value, list):
            if not key.isdigit() or int(key) >= len(value):
                what = f"`{dotted}` is a list of {len(value)}, and `{key}` is none of its positions"
                raise UserError(what, where=shown, fix=f"Give a number from 0 to {len(value) - 1}, or the whole list.")
            path, value = (*path, int(key)), value[int(key)]
        elif path and isinstance(path[-1], int) and not isinstance(value, dict):
            what = f"`{dotted}` is `{value}` and has no `{key}`"
            raise UserError(what, where=shown, fix="Give the whole list.")
        else:
            path, value = (*path, key), value.get(key) if isinstance(value, dict) else None
    return path


def find_recipe(path_or_name: str | Path) -> Path:
    """The file that is meant: an existing path, or the name of a recipe that comes with affinage."""
    path, name = Path(path_or_name), str(path_or_name)
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
    fix = did_you_mean(path.name, [sibling.name for sibling in _siblings(path)])
    raise UserError("there is no such recipe file", where=str(path), fix=fix)


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with affinage, by name: in a checkout its `recipes/`, installed those in the package."""
    package = Path(affinage.__file__).parent
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return {}


def _base_path(base: Any, path: Path, where: str) -> Path:
    if not isinstance(base, str):
        raise UserError("`base` must be the path or the name of another recipe", where=where)
    beside = path.parent / base
    if os.path.isfile(beside):
        return beside.resolve()
    try:
        if Path(base).suffix in (".yaml", ".yml"):
            raise UserError(f"the base `{base}` does not exist beside this recipe")
        return find_recipe(base).resolve()
    except UserError as error:
        raise UserError(error.what, where=where, fix=error.fix) from None


def _siblings(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*.y*ml")) if os.path.isdir(path.parent) else []


def shown_path(path: Path) -> str:
    """The path as the user would write it: relative to the working directory where it is inside it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

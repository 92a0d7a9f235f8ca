"""What recipes choose by name: layers, activations, norms, optimizers, trackers; and files of the user's with more."""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError

from affinage.config.load import LoadedRecipe
from affinage.config.mistakes import explain
from affinage.config.settings import Settings
from affinage.errors import UserError, did_you_mean, first_line

T = TypeVar("T")
S = TypeVar("S", bound=Settings)
E = TypeVar("E")
Locate = Callable[[Sequence[str | int]], str]  # where in the recipe a key was written
VARIABLE = "AFFINAGE_PLUGINS"  # in the environment: files, separated as in PATH
_MODULE = "affinage_plugin_"  # how the names of plug-ins' modules begin

_loading: list[str] = []  # the plug-in that is being loaded
_from_plugin: dict[str, str] = {}  # a name that a plug-in registered -> that plug-in


class Registry(dict[str, T]):
    """Entries by name. A further one is registered in any file; nothing else changes for it."""

    def __init__(self, kind: str, entries: Mapping[str, T] | None = None):
        super().__init__(entries or {})
        self.kind = kind  # how messages call an entry

    def register(self, name: str) -> Callable[[E], E]:
        """Return a decorator of classes or functions; it raises ValueError where another one has the name."""

        def add(entry: E) -> E:
            taken, new = self.get(name), getattr(entry, "__qualname__", None)
            if taken is not None and getattr(taken, "__qualname__", taken) != new:
                raise ValueError(f"{self.kind} `{name}` is already registered by {taken}")
            if _loading and not str(getattr(entry, "__module__", "")).startswith("affinage."):  # which it may import
                _from_plugin[name] = _loading[-1]
            self[name] = entry  # type: ignore[assignment]  # the decorator does not know the entries' type
            return entry

        return add


def one_of(*registries: Mapping[str, Any]) -> AfterValidator:
    """For a setting that names an entry: another word is refused as one that is not in a Literal would be."""

    def check(name: str) -> str:
        names = [known for registry in registries for known in registry]
        if name not in names:
            expected = ", ".join(f"'{known}'" for known in names)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    return AfterValidator(check)


def build(registry: Registry[type[S]], name: str, settings: Mapping[str, Any], locate: Locate | None = None) -> S:
    """Return the entry called `name` with its own settings.

    `locate` maps the keys ("name",) or ("settings", key) to where they were written. Raises UserError for an unknown
    name or setting, and a value that does not fit.
    """
    where = locate or (lambda path: ".".join(map(str, (registry.kind, *path))))
    if name not in registry:
        fix = did_you_mean(name, registry) or f"There are {', '.join(registry)}."
        raise UserError(f"there is no {registry.kind} `{name}`", where=where(("name",)), fix=fix)
    entry, own = registry[name], dict(settings)
    try:
        return entry.model_validate(own)
    except ValidationError as error:
        raise explain(error, entry, own, lambda path: where(("settings", *path))) from None


# ---- plug-ins ----


def load_plugins(loaded: LoadedRecipe) -> None:
    """Run the files that a recipe's `plugins` names, each once in a process; UserError: one is not there, or fails."""
    for index, path in enumerate(loaded.recipe.plugins):
        key = ("plugins", index)
        _load(loaded.beside(path, key), loaded.locate(key))


def load_named_plugins() -> None:
    """Run the files that AFFINAGE_PLUGINS lists, for a model without its recipe.

    A model's folder cannot name a plug-in itself, so that opening a model of somebody else's runs nothing of theirs.
    """
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _load(Path(path), VARIABLE)


def plugin_sources(loaded: LoadedRecipe, settings: Any) -> dict[str, str]:
    """Return the hash of each plug-in, loaded before, whose registered names are used in some settings, by its path;
    and of the files that it imports from its folder."""
    written = json.dumps(settings, default=str)
    used = {plugin for name, plugin in _from_plugin.items() if json.dumps(name) in written}
    hashes: dict[str, str] = {}
    for path, (file, *imported) in plugin_files(loaded).items():
        if str(file) in used:
            hashes[f"plugin {path}"] = _digest(file)
            hashes |= {f"plugin {path}: {each.relative_to(file.parent)}": _digest(each) for each in imported}
    return hashes


def plugin_files(loaded: LoadedRecipe) -> dict[str, list[Path]]:
    """Return the file of each plug-in and those beside it that it imports, by what the recipe calls the plug-in."""
    paths = {path: loaded.beside(path, ("plugins", index)) for index, path in enumerate(loaded.recipe.plugins)}
    return {path: _with_imported(file.resolve()) for path, file in paths.items()}


def _with_imported(file: Path) -> list[Path]:
    """The file and those of its folder that it imports, and what these import in turn."""
    found: list[Path] = []
    left = [file]
    while left:
        found.append(path := left.pop(0))
        nodes: list[ast.AST] = []
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # loading the plug-in reports them
            nodes += ast.walk(ast.parse(path.read_bytes()))
        names = {alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {(node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
        for name in sorted(names - {""}):
            imported = [file.parent / f"{name}.py", *sorted((file.parent / name).rglob("*.py"))]
            left += [each for each in imported if each.is_file() and each not in (*found, *left)]
    return found


@contextlib.contextmanager
def calling(node: Any, method: str) -> Iterator[None]:
    """Inside, where a method of a node's layer is called, what a plug-in raises is a UserError with the node's name and
    its place in the recipe; what it prints goes to standard error. Defects of affinage stay as they are."""
    name = f"node `{node.name}` ({node.layer.kind_name})"
    try:
        with contextlib.redirect_stdout(sys.stderr) if is_foreign(node.layer) else contextlib.nullcontext():
            yield
    except UserError as error:
        if not error.where:
            error.what, error.where = f"{name}: {error.what}", node.where
        raise
    except Exception as error:  # whatever a user's code raises
        places = [
            (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        own = [f"{file}:{line}" for module, file, line in places if module.startswith(_MODULE)]
        if not own and not is_foreign(node.layer):
            raise
        fix = f"It is in {own[-1]}; --debug shows the traceback." if own else "--debug shows the traceback."
        what = f"{name}: `{method}` fails: {type(error).__name__}: {first_line(error)}"
        raise UserError(what, where=node.where, fix=fix) from error


def is_foreign(entry: object) -> bool:
    """Return whether something that was registered, or its class, is not affinage's own."""
    return not str(getattr(entry, "__module__", "")).startswith("affinage.")


def _load(file: Path, where: str) -> None:
    if not file.is_file():
        fix = "Paths of plugins start from the recipe's folder."
        raise UserError(f"there is no plugin `{file}`", where=where, fix=fix)
    try:
        _run(file.resolve(), _digest(file))
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        what, fix = f"the plugin `{file}` fails: {type(error).__name__}: {error}", f"`python {file}` shows where."
        raise UserError(what, where=where, fix=fix) from error


@cache
def _run(file: Path, digest: str) -> None:
    name = f"{_MODULE}{file.stem}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations there
    _loading.append(str(file))
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for modules beside it; last, so that they replace none
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output may hold JSON
            spec.loader.exec_module(module)
    finally:
        _loading.pop()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32] if file.is_file() else "not there"

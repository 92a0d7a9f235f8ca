"""Node kinds of the user's own: Python files that a recipe names, and packages that are installed."""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from affinage.config.load import LoadedRecipe
from affinage.errors import UserError
from affinage.registry import plugins_used, registering

GROUP = "affinage.plugins"  # of entry points
VARIABLE = "AFFINAGE_PLUGINS"  # in the environment: files, separated as in PATH


def load_plugins(loaded: LoadedRecipe) -> None:
    """Run the files that `plugins` names, each once in a process, and those of installed packages.

    Raises:
        UserError: a file is not there, or fails.
    """
    _load_installed()
    for index, path in enumerate(loaded.recipe.plugins):
        key = ("plugins", index)
        _load_file(loaded.beside(path, key), loaded.locate(key))


def load_named_plugins() -> None:
    """The same for a model without its recipe: installed plugins, and the files that AFFINAGE_PLUGINS lists.

    A model's folder cannot ask for a plugin itself, so that opening a model of somebody else's runs nothing of theirs.
    """
    _load_installed()
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _load_file(Path(path), VARIABLE)


def plugin_sources(loaded: LoadedRecipe, settings: Any) -> dict[str, str]:
    """Fingerprints of the plug-ins, loaded before, whose registered names are used in some settings of the recipe.

    Returns:
        The hash of each file and the version of each installed package, by name.
    """
    used = plugins_used(settings)
    files = {path: loaded.beside(path, ("plugins", index)) for index, path in enumerate(loaded.recipe.plugins)}
    found = {f"plugin {path}": _digest(file) for path, file in files.items() if str(file.resolve()) in used}
    packages = (point.dist for point in entry_points(group=GROUP) if used and point.dist is not None)
    return found | {f"plugin {package.name}": package.version for package in packages if package.name in used}


def _load_file(file: Path, where: str) -> None:
    if not file.is_file():
        fix = "Paths of plugins start from the recipe's folder."
        raise UserError(f"there is no plugin `{file}`", where=where, fix=fix)
    _guarded(partial(_run, file.resolve(), _digest(file)), str(file), where)


@cache
def _load_installed() -> None:
    for point in entry_points(group=GROUP):
        with registering(point.dist.name if point.dist is not None else point.value):
            _guarded(point.load, point.value, f"entry point {point.name}")


@cache
def _run(file: Path, digest: str) -> None:
    name = f"affinage_plugin_{file.stem}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations there
    with registering(str(file)):
        spec.loader.exec_module(module)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32] if file.is_file() else "not there"


def _guarded(load: Callable[[], object], name: str, where: str) -> None:
    try:
        load()
    except Exception as error:  # whatever a user's file raises
        fix = f"Mend it: `python {name}` shows where it fails." if name.endswith(".py") else "Mend or uninstall it."
        raise UserError(f"the plugin `{name}` fails: {type(error).__name__}: {error}", where=where, fix=fix) from error

"""Layers, optimizers, trackers and others of the user's own, in Python files that a recipe names."""

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from affinage.config.load import LoadedRecipe
from affinage.errors import UserError
from affinage.registry import plugins_used, registering

VARIABLE = "AFFINAGE_PLUGINS"  # in the environment: files, separated as in PATH


def load_plugins(loaded: LoadedRecipe) -> None:
    """Run the files that `plugins` names, each once in a process.

    Raises:
        UserError: a file is not there, or fails.
    """
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
    """Return the hash of each plug-in, loaded before, whose registered names are used in some settings, by its path."""
    used = plugins_used(settings)
    files = {path: loaded.beside(path, ("plugins", index)) for index, path in enumerate(loaded.recipe.plugins)}
    return {f"plugin {path}": _digest(file) for path, file in files.items() if str(file.resolve()) in used}


def _load(file: Path, where: str) -> None:
    if not file.is_file():
        fix = "Paths of plugins start from the recipe's folder."
        raise UserError(f"there is no plugin `{file}`", where=where, fix=fix)
    try:
        _run(file.resolve(), _digest(file))
    except Exception as error:  # whatever a user's file raises
        what, fix = f"the plugin `{file}` fails: {type(error).__name__}: {error}", f"`python {file}` shows where."
        raise UserError(what, where=where, fix=fix) from error


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

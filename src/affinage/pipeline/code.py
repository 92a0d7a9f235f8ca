"""Which source code a stage's result depends on: its function, and all of affinage that it imports, transitively.

Read from the syntax trees, so nothing is imported and nobody keeps a list by hand. Comments, docstrings and layout do
not count: a better sentence must not train a model anew.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import affinage

_ROOT = Path(affinage.__file__).parent
# Settings enter a key by value, messages do not matter, and what a device is called changes no result.
_DOES_NOT_COUNT = ("affinage", "affinage.errors", "affinage.config", "affinage.hardware")


def code_of(work: Callable[..., Any]) -> dict[str, str]:
    """Hashes of the code that `work` runs: its own, and each affinage file reached by imports from its body.

    Returns:
        {"pipeline/texts.py:clean": hash, "data/clean.py": hash, ...}, paths relative to the package.
    """
    path = Path(inspect.getsourcefile(work) or "")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = work.__qualname__
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    shown = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    found = {f"{shown}:{name}": _hash_of(body)}
    seen: set[str] = set()
    waiting = list(_imported(body))
    while waiting:
        module = waiting.pop()
        if module in seen or any(module == known or module.startswith(f"{known}.") for known in _DOES_NOT_COUNT[1:]):
            continue
        seen.add(module)
        for file, digest, imported in _module(module):
            found[file] = digest
            waiting.extend(imported)
    return dict(sorted(found.items()))


@cache
def _module(module: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """(file, hash, imported modules) of a module; of a package also the data files beside its `__init__.py`."""
    base = _ROOT.joinpath(*module.split(".")[1:])
    source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not source.is_file():
        return []  # the last part was not a module but a name in one
    tree = ast.parse(source.read_text(encoding="utf-8"))
    entries = [(source.relative_to(_ROOT).as_posix(), _hash_of(tree), tuple(_imported(tree)))]
    if base.is_dir() and module != "affinage":
        for file in sorted(base.iterdir()):
            if file.is_file() and file.suffix not in (".py", ".pyc", ".pyi"):
                digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
                entries.append((file.relative_to(_ROOT).as_posix(), digest, ()))
    return entries


def _imported(tree: ast.AST) -> Iterator[str]:
    """Every affinage module that `tree` may import, and the packages around it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "affinage":
                yield from (".".join(parts[:length]) for length in range(2, len(parts) + 1))


def _hash_of(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                first.value.value = ""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]

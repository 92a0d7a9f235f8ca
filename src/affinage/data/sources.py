"""From the `sources` of a recipe to the files that hold their documents."""

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from affinage.errors import UserError
from affinage.recipe.data import POCKET_WORLD, DataSettings, SourceSettings

TEXT_SUFFIXES = (".txt", ".md", ".markdown")  # one document a file
LINES_SUFFIXES = (".jsonl", ".ndjson")  # one document a line
TABLE_SUFFIXES = (".parquet",)  # one document a row
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2")
READABLE = ".txt, .md, .jsonl (each also .gz, .zst, .bz2) and .parquet"


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is its path within the source, the same on every machine."""

    url: str
    name: str
    bytes: int


@dataclass(frozen=True)
class ResolvedSource:
    """A source of the recipe with the files that were found for it."""

    settings: SourceSettings
    name: str  # unique in the recipe, safe as a part of a file name
    where: str  # the recipe key, for messages
    files: tuple[SourceFile, ...]
    unreadable: tuple[str, ...]  # names of files in it whose kind is not known


def resolve(settings: DataSettings, world_folder: Path | None) -> list[ResolvedSource]:
    """Find the files of every source, in the order of the recipe and sorted by name within each.

    Raises UserError for a path that is not there, holds no readable file, or needs a package that is not installed.
    """
    resolved: list[ResolvedSource] = []
    for position, source in enumerate(settings.sources):
        where = f"data.sources[{position}]"
        url = _location(source, settings.root, world_folder)
        try:
            files, unreadable = _find(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot open {url!r}: {error}", where=where) from None
        except OSError as error:
            raise UserError(
                f"cannot reach {url!r}: {error}", where=where, fix="Is there a network, and are you allowed to read it?"
            ) from None
        if not files:
            _refuse(url, where, unreadable)
        name = _unique(source.name or default_name(source.path), {other.name for other in resolved})
        resolved.append(ResolvedSource(source, name, where, tuple(files), tuple(unreadable)))
    return resolved


def safe_name(name: str) -> str:
    """The name with everything but letters, digits, dot, dash and underscore replaced, fit for a file name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "source"


def default_name(path: str) -> str:
    """How reports call a source whose recipe gives no name: the last part of its path, without suffixes or globs."""
    parts = [part for part in re.split(r"[/\\]", path) if part and not re.search(r"[*?\[]", part)]
    name = parts[-1] if parts else "source"
    for suffixes in (COMPRESSED_SUFFIXES, TEXT_SUFFIXES + LINES_SUFFIXES + TABLE_SUFFIXES):
        for suffix in suffixes:
            name = name.removesuffix(suffix)
    return safe_name(name)


def _unique(name: str, taken: set[str]) -> str:
    name, number = safe_name(name), 2
    candidate = name
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


def _location(source: SourceSettings, root: str, world_folder: Path | None) -> str:
    if source.path == POCKET_WORLD:
        if world_folder is None:
            raise UserError("the pocket world has not been generated", where=POCKET_WORLD)
        return str(Path(world_folder) / "documents" / "*.jsonl")
    path = os.path.expanduser(source.path)
    if not root or "://" in path or os.path.isabs(path):
        return path
    return f"{os.path.expanduser(root).rstrip('/')}/{path}"


def _find(url: str) -> tuple[list[SourceFile], list[str]]:
    """The readable files at a URL, sorted by name, and the names of the others in a folder."""
    filesystem, path = url_to_fs(url)
    # The literal path comes first: file names may contain the characters of a glob.
    if not filesystem.exists(path) and fsspec.core.has_magic(path):
        matches = filesystem.glob(path, detail=True)
        base = path[: re.search(r"[*?\[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        found = {file: info for file, info in matches.items() if info["type"] == "file"}
    elif filesystem.isdir(path):
        base = path.rstrip("/")
        found = filesystem.find(base, detail=True)
    elif filesystem.exists(path):
        base = path.rstrip("/").rpartition("/")[0]
        found = {path: filesystem.info(path)}
    else:
        return [], []
    return _sort_out(filesystem, base, found)


def _sort_out(filesystem: Any, base: str, found: dict[str, Any]) -> tuple[list[SourceFile], list[str]]:
    files: list[SourceFile] = []
    unreadable: list[str] = []
    for path in sorted(found):
        name = path.removeprefix(base).lstrip("/")
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        if kind_of(name):
            files.append(SourceFile(filesystem.unstrip_protocol(path), name, int(found[path].get("size") or 0)))
        else:
            unreadable.append(name)
    return files, unreadable


def kind_of(name: str) -> str:
    """`text`, `lines` or `table` by the name's suffix; "" if affinage does not read such files."""
    name = name.lower()
    if name.endswith(TABLE_SUFFIXES):
        return "table"
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return "text" if name.endswith(TEXT_SUFFIXES) else "lines" if name.endswith(LINES_SUFFIXES) else ""


def _refuse(url: str, where: str, unreadable: list[str]) -> None:
    if unreadable:
        raise UserError(
            f"no file of a kind that can be read in {url!r}; found {', '.join(unreadable[:3])}",
            where=where,
            fix=f"affinage reads {READABLE}.",
        )
    raise UserError(
        f"no such file or folder, or nothing in it: {url!r}",
        where=where,
        fix="Relative paths start from `data.root` if it is set, else from the working directory.",
    )

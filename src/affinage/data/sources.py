"""From the `sources` of a recipe to the files, or the parts of datasets, that hold their documents."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from affinage.config.data import DataSettings
from affinage.config.sources import POCKET_WORLD, SourceSettings
from affinage.data.downloads import cached_path
from affinage.data.file_kinds import READABLE, kind_of
from affinage.data.hub_answers import dataset_of, refusal_of
from affinage.data.hub_datasets import DatasetPart, at_commit, parts_of
from affinage.data.opening import SourceFile
from affinage.data.order import shuffle_keys
from affinage.data.places import is_folder, is_on_hub, is_remote, leads_back, location, printable, unique
from affinage.errors import UserError, first_line

_IN_PLACE = ("file", "memory", "local")  # protocols of what is on this machine
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # protocol: what affinage calls the packages for it


@dataclass(frozen=True)
class ResolvedSource:
    """A source of the recipe with the files that were found for it, or the parts of the dataset that it is."""

    settings: SourceSettings  # a dataset of the Hub's with the commit that it is at as `revision`
    name: str  # unique in the recipe, safe as a part of a file name
    where: str  # the recipe key, for messages
    parts: tuple[SourceFile | DatasetPart, ...]
    unreadable: tuple[str, ...] = ()  # names of files in it whose kind is not known
    sample: float = 1.0  # share of the documents in `parts` to take


def resolve(settings: DataSettings, world_folder: Path | None) -> list[ResolvedSource]:
    """Find the files of every source, in the order of the recipe and sorted by name within each.

    Of a sample of a source on another machine, only as many files are read as hold it: the rest of the share is taken
    of their documents. Raises UserError for a source that is not there, holds no readable file, cannot be reached, or
    needs a package that is not installed.
    """
    resolved: list[ResolvedSource] = []
    for position, source in enumerate(settings.sources):
        where = f"data.sources[{position}]"
        name = unique(source.title, {other.name for other in resolved})
        if source.dataset and (is_folder(source.dataset) or is_on_hub(source, settings.mirror)):
            place = location(source, settings.root, settings.mirror)
            if is_on_hub(source, settings.mirror):
                source = at_commit(place, source, where)
            found = ResolvedSource(source, name, where, tuple(parts_of(place, source, where)))
        else:
            url = _url(source, settings, world_folder)
            files, unreadable = find(url, source, where)
            found = ResolvedSource(source, name, where, tuple(files), tuple(unreadable))
        resolved.append(_sampled(found, settings))
    return resolved


def check(source: SourceSettings, settings: DataSettings, where: str = "") -> None:
    """See that a source is there, without reading it. Raises UserError if it is not."""
    if source.path == POCKET_WORLD:
        return
    place = location(source, settings.root, settings.mirror)
    if is_on_hub(source, settings.mirror):
        at_commit(place, source, where)
    elif source.dataset and is_folder(source.dataset):
        parts_of(place, source, where)
    else:
        if dataset := dataset_of(place):
            at_commit(dataset, source, where)  # a gated one shows its files to everybody
        find(place, source, where)


def _sampled(found: ResolvedSource, settings: DataSettings) -> ResolvedSource:
    if settings.sample == 1 or not is_remote(found.settings) or settings.mirror:
        return replace(found, sample=settings.sample)
    count = max(1, -(-len(found.parts) * settings.sample // 1))
    keys = shuffle_keys([f"{found.name}/{part.name}" for part in found.parts], 0, "sampled files")
    chosen = sorted(sorted(range(len(keys)), key=lambda k: int(keys[k]))[: int(count)])
    share = min(1.0, settings.sample * len(found.parts) / count)
    return replace(found, parts=tuple(found.parts[k] for k in chosen), sample=share)


def _url(source: SourceSettings, settings: DataSettings, world_folder: Path | None) -> str:
    if source.path != POCKET_WORLD:
        return location(source, settings.root, settings.mirror)
    if world_folder is None:
        raise UserError("the pocket world has not been generated", where=POCKET_WORLD)
    return str(Path(world_folder) / "documents" / "*.jsonl")


def find(url: str, source: SourceSettings, where: str) -> tuple[list[SourceFile], list[str]]:
    """The readable files at a URL, sorted by name, and the names of the others in a folder.

    Raises UserError if there is none.
    """
    try:
        files, unreadable = _find(url, source)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        fix = f"Install it: pip install 'affinage[{extra}]'." if extra else ""
        raise UserError(f"cannot open {url!r}: {error}", where=where, fix=fix) from None
    except Exception as error:  # OSError, and each library's own
        if refused := refusal_of(url, error, where):
            raise refused from None
        raise UserError(
            f"cannot reach {url!r}: {first_line(error)}",
            where=where,
            fix="Is there a network, and are you allowed to read it? A copy can be named in data.mirror.",
        ) from None
    if not files:
        _refuse(url, where, unreadable)
    if source.sha256 and len(files) > 1:
        raise UserError(f"`sha256` is of one file, and {len(files)} are in {url!r}", where=where)
    return files, unreadable


def _find(url: str, source: SourceSettings) -> tuple[list[SourceFile], list[str]]:
    if url.startswith(("http://", "https://")):
        return [_web_file(url, source)], []
    filesystem, path = url_to_fs(url)
    remote = filesystem.protocol not in _IN_PLACE and not set(filesystem.protocol) & set(_IN_PLACE)
    fetched = source.download and remote
    # The literal path comes first: file names may contain the characters of a glob.
    there = _is_there(filesystem, path, url) if remote else filesystem.exists(path)
    if not there and fsspec.core.has_magic(path):
        matches = filesystem.glob(path, detail=True)
        base = path[: re.search(r"[*?\[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        # A link to a file has a type of its own, and is as good as the file.
        found = {file: info for file, info in matches.items() if info["type"] == "file" or filesystem.isfile(file)}
    elif filesystem.isdir(path):
        base = path.rstrip("/")
        found = _all_in(filesystem, base)
    elif there:
        base = path.rstrip("/").rpartition("/")[0]
        found = {path: filesystem.info(path)}
    else:
        return [], []
    return _sort_out(filesystem, base, found, source, fetched)


def _is_there(filesystem: Any, path: str, url: str) -> bool:
    """Whether there is such a file or folder. What `exists` of fsspec cannot ask for is to it not there."""
    try:
        filesystem.info(path)
    except FileNotFoundError as error:
        if refusal_of(url, error):
            raise
        return False
    return True


def _all_in(filesystem: Any, folder: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """All files below a folder, those behind links to folders too; a link to a folder that it is in leads nowhere."""
    found: dict[str, Any] = filesystem.find(folder, detail=True)
    above = (*above, os.path.realpath(folder))
    for path in [path for path, info in found.items() if info.get("islink")]:
        if filesystem.isdir(path):
            del found[path]
            if not leads_back(path, above):
                found |= _all_in(filesystem, path, above)
    return found


def _web_file(url: str, source: SourceSettings) -> SourceFile:
    """The file at a web address; what is in the cache needs no network."""
    name = PurePosixPath(url.split("?", 1)[0]).name
    if source.download and (copy := cached_path(url)).is_file():
        return SourceFile(url, name, copy.stat().st_size, True, source.sha256)
    filesystem, path = url_to_fs(url)
    size = int(filesystem.info(path).get("size") or 0)  # raises FileNotFoundError where there is none
    return SourceFile(url, name, size, source.download, source.sha256)


def _sort_out(
    filesystem: Any, base: str, found: dict[str, Any], source: SourceSettings, fetched: bool
) -> tuple[list[SourceFile], list[str]]:
    files: list[SourceFile] = []
    unreadable: list[str] = []
    for path in sorted(found):
        name = printable(path.removeprefix(base).lstrip("/"))
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        if kind_of(name, code=source.kind == "code"):
            size = int(found[path].get("size") or 0)
            files.append(SourceFile(filesystem.unstrip_protocol(path), name, size, fetched, source.sha256))
        else:
            unreadable.append(name)
    return files, unreadable


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
        fix="Put it there, or name text of yours (a file, a folder, a URL): --set data.sources='[my_text.txt]'. "
        "Relative paths start from `data.root` if it is set, else from the working directory.",
    )

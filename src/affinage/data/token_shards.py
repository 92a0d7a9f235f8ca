"""Shards of packed tokens: .npy files that numpy alone opens, in a folder here or anywhere fsspec reaches.

    <folder>/tokens-00012-of-00359.npy         uint16 or uint32 [rows, seq_len]
             loss_mask-00012-of-00359.npy      uint8, the same shape; of conversations: 1 where a token is trained
             documents-00012-of-00359.parquet  which document every token is from; see `affinage.data.lineage`
             row_bytes-00012-of-00359.npy      int64 [rows], of held-out text: UTF-8 bytes that a row predicts
             shards.json                       counts, and size and SHA-256 of every file; written last

Rows are numbered through all shards of a folder. With a URL, the tokens are there alone, and copies of the rest.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
import pyarrow as pa
from jaxtyping import Integer

from affinage.data import executor
from affinage.data.atomic import atomic_file, write_array, write_json
from affinage.data.lineage import spans, write_lineage
from affinage.data.packing import Layout
from affinage.data.special_tokens import MARKS, Marks
from affinage.data.uploads import upload, upload_file
from affinage.errors import UserError, is_transient
from affinage.paths import from_home

FACTS = "shards.json"
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # protocol -> extra of affinage that brings its package
_AGAIN = "The folder was changed after it was written: run the step that writes it again, with --force."
BYTES = np.uint32  # of the text of a token: it may stand for hundreds, such as a run of spaces

Result = TypeVar("Result")


def file_safe(name: str) -> str:
    """Return `name` with everything that a file system might refuse replaced by a hyphen; never empty."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "unnamed"


def shard_file(kind: str, shard: int, shards: int, ending: str = "npy") -> str:
    """Return the file name of one shard: tokens-00003-of-00010.npy."""
    return f"{kind}-{shard:05d}-of-{shards:05d}.{ending}"


def is_local(place: str) -> bool:
    """Whether a path or URL is of this machine's file system."""
    return "://" not in place or place.startswith(("file://", "local://"))


def local_path(place: str) -> Path:
    """Return the path that a local path or URL means."""
    return Path(fsspec.core.strip_protocol(place)) if "://" in place else from_home(place)


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Raises UserError where a package is missing."""
    with errors_at(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        return filesystem, str(path)


def check_url(url: str) -> None:
    """Raise UserError for a URL of an unknown kind, or whose package is missing; nothing is read."""
    if not is_local(url):
        with errors_at(url):
            fsspec.get_filesystem_class(url.partition("://")[0])


@contextlib.contextmanager
def errors_at(url: str) -> Iterator[None]:
    """Turn errors in here into a UserError that names the URL; what may pass on the network stays as it is."""
    try:
        yield
    except ImportError as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        fix = f"pip install 'affinage[{extra}]'" if extra else ""
        raise UserError(f"this place cannot be opened: {error}", where=url, fix=fix) from error
    except ValueError as error:
        raise UserError(f"this place cannot be opened: {error}", where=url) from error
    except OSError as error:
        if is_transient(error):
            raise
        fix = "May you read and write there? What is complete is kept; run again to go on."
        raise UserError(f"{type(error).__name__}: {error}", where=url, fix=fix) from error


def patient(read: Callable[[], Result], url: str) -> Result:
    """Return what `read` returns, tried again where the network fails for a while.

    Raises TransientError, after which a run may be started again, if it goes on failing; UserError for what is gone.
    """

    def named() -> Result:
        with errors_at(url):
            return read()

    return executor.with_retries(named, url)


@dataclass
class Documents:
    """Documents as tokens in memory, with what is known of them, in the order in which they are added."""

    dtype: type[np.unsignedinteger]
    names: list[tuple[str, str, str]] = field(default_factory=list)  # id, source, url
    keys: list[int] = field(default_factory=list)  # of the shuffled order
    _tokens: list[np.ndarray] = field(default_factory=list)  # in chunks, of several documents each
    _bytes: list[np.ndarray] = field(default_factory=list)
    _trained: list[np.ndarray] = field(default_factory=list)
    _places: list[tuple[int, int, int]] = field(default_factory=list)  # chunk, start in it, length

    def add(
        self,
        tokens: np.ndarray,
        lengths: Iterable[int],
        names: Iterable[tuple[str, str, str]],
        keys: Iterable[int],
        *,
        byte_lengths: np.ndarray | None = None,
        trained: np.ndarray | None = None,
    ) -> None:
        """Add documents that lie end to end in `tokens`, with the UTF-8 bytes of tokens, and which are trained."""
        chunk, at = len(self._tokens), 0
        self._tokens.append(tokens.astype(self.dtype, copy=False))
        if byte_lengths is not None:
            self._bytes.append(byte_lengths.astype(BYTES, copy=False))
        if trained is not None:
            self._trained.append(trained.astype(np.uint8, copy=False))
        for length in lengths:
            self._places.append((chunk, at, length))
            at += length
        self.names += names
        self.keys += keys

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(np.array(self.keys, np.uint64), kind="stable")

    @property
    def shuffled_lengths(self) -> Integer[np.ndarray, " documents"]:
        """Tokens of every document, in the order of the keys."""
        return np.array([length for _, _, length in self._places], np.int64)[self._order]

    @property
    def shuffled_names(self) -> pa.Table:
        """The columns id, source and url, in the order of the keys."""
        columns = zip(*(self.names[at] for at in self._order.tolist())) if self.names else ((), (), ())
        return pa.table([pa.array(column, pa.string()) for column in columns], names=["id", "source", "url"])

    def reader(self, kind: str) -> Callable[[int, int, int], np.ndarray] | None:
        """Return what reads `tokens`, `bytes` or `trained` [start, stop) of a document by its place in the order."""
        chunks = {"tokens": self._tokens, "bytes": self._bytes, "trained": self._trained}[kind]
        order = self._order.tolist()

        def read(document: int, start: int, stop: int) -> np.ndarray:
            chunk, at, _ = self._places[order[document]]
            return chunks[chunk][at + start : at + stop]

        return read if chunks else None


def write_shard(
    folder: Path,
    shard: int,
    shards: int,
    documents: Documents,
    layout: Layout,
    seq_len: int,
    *,
    pad: int,
    url: str = "",
) -> dict[str, Any]:
    """Write one shard of a folder and return its {rows, tokens, bytes, trained_tokens, files: {name: facts}}.

    `layout` is of the documents in their shuffled order. With a `url` the tokens go there. Raises UserError if that
    cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder if not url else local_path(url) if is_local(url) else None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)

    def blocks(kind: str, dtype: Any, fill: int = 0) -> Iterator[np.ndarray]:
        read = documents.reader(kind)
        assert read is not None
        return layout.blocks(read, 0, layout.rows, seq_len, dtype, fill=fill)

    def write(kind: str, dtype: Any, into: Path, fill: int = 0) -> dict[str, Any]:
        return _write_array(into / name(kind), blocks(_SOURCES[kind], dtype, fill), (layout.rows, seq_len), dtype)

    def name(kind: str, ending: str = "npy") -> str:
        return shard_file(kind, shard, shards, ending)

    files = {name("tokens"): write("tokens", documents.dtype, place or folder, pad)}
    found: dict[str, Any] = {"rows": layout.rows, "tokens": int(layout.length.sum()), "files": files}
    if documents.reader("trained") is not None:
        files[name("loss_mask")] = write("loss_mask", np.uint8, folder)
        found["trained_tokens"] = sum(int(block.sum()) for block in blocks("trained", np.uint8))
    if documents.reader("bytes") is not None:
        # Nothing comes before the first token of a row that could predict it.
        counts = [block[:, 1:].sum(axis=1, dtype=np.int64) for block in blocks("bytes", BYTES)]
        write_array(folder / name("row_bytes"), np.concatenate(counts))
        found["row_bytes"] = sum(int(count.sum()) for count in counts)
    write_lineage(folder / name("documents", "parquet"), spans(layout, documents.shuffled_names))
    if place is None:
        _send(folder / name("tokens"), url)
        (folder / name("tokens")).unlink()
    if url:
        _send(folder / name("documents", "parquet"), url)
    return found


_SOURCES = {"tokens": "tokens", "loss_mask": "trained"}


def _write_array(path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, int], dtype: Any) -> dict[str, Any]:
    """Write blocks of rows, in order, as one .npy file that is whole or absent; return {rows, bytes, sha256}."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with atomic_file(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data.cast("B"))
        return {"rows": shape[0], "bytes": file.bytes, "sha256": file.sha256}


def _send(file: Path, url: str) -> None:
    """Copy a file into the folder at a URL. An object store shows an upload when it is complete, not before."""
    if is_local(url):
        with atomic_file(local_path(url) / file.name) as copy:
            copy.write(file.read_bytes())
        return
    filesystem, path = open_url(url)
    with errors_at(url):
        filesystem.makedirs(path, exist_ok=True)
        upload_file(filesystem, f"{path}/{file.name}", file)


def write_facts(folder: Path, facts: dict[str, Any], marks: Marks = MARKS) -> dict[str, Any]:
    """Write shards.json, last: a folder that has it is complete. Return what it holds.

    With `facts["url"]` a copy of it goes there.
    """
    facts = facts | ({} if marks == MARKS else {"marks": asdict(marks)})
    write_json(folder / FACTS, facts)
    url = facts.get("url", "")
    if url and is_local(url):
        write_json(local_path(url) / FACTS, facts)
    elif url:
        filesystem, path = open_url(url)
        content = json.dumps(facts, ensure_ascii=False, indent=2).encode()
        patient(lambda: upload(filesystem, f"{path}/{FACTS}", content), url)
    return facts


def write_tokens(folder: Path, tokens: Integer[np.ndarray, "rows S"], shards: int = 1, **facts: Any) -> None:
    """Write rows of tokens as they are, spread over `shards` files, and shards.json with `facts`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for shard, part in enumerate(np.array_split(tokens, shards)):
        name = shard_file("tokens", shard, shards)
        files[name] = _write_array(folder / name, [part], part.shape, tokens.dtype)
    counts = {"rows": len(tokens), "seq_len": tokens.shape[1], "dtype": tokens.dtype.name}
    write_facts(folder, counts | {"files": files} | facts)


@dataclass(frozen=True)
class TokenShards:
    """A folder of shards, opened without reading them."""

    folder: Path
    facts: dict[str, Any]  # the content of shards.json
    shards: "tuple[np.ndarray | RemoteShard, ...]"  # memory-mapped, or elsewhere; [rows, seq_len]
    masks: tuple[np.ndarray, ...]  # memory-mapped, the same shapes; empty where every token is trained
    starts: Integer[np.ndarray, " shards+1"]  # the first row of every shard

    @property
    def rows(self) -> int:
        """Rows in all shards."""
        return int(self.starts[-1])

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return int(self.facts["seq_len"])

    @property
    def is_remote(self) -> bool:
        """Whether rows are read over a network, so that reading them one by one would be slow."""
        return any(isinstance(shard, RemoteShard) for shard in self.shards)

    @cached_property
    def marks(self) -> Marks:
        """What the rows are read by; shards.json says it where the tokenizer is not affinage's."""
        return Marks(**self.facts["marks"]) if "marks" in self.facts else MARKS

    @property
    def row_bytes(self) -> Integer[np.ndarray, " rows"]:
        """UTF-8 bytes of text that each row predicts; of held-out rows."""
        files = [self.folder / name.replace("tokens-", "row_bytes-") for name in self.names]
        return np.concatenate([np.load(file, allow_pickle=False) for file in files])

    @cached_property
    def names(self) -> list[str]:
        """The files of tokens, in their order; a number is missing where a task had nothing to write."""
        return [name for name in self.facts["files"] if name.startswith("tokens-")]

    def locate(self, row: int) -> tuple[Path, int]:
        """Return the file that says which documents a row holds, and the number of the row in it."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        name = self.names[shard].replace("tokens-", "documents-").replace(".npy", ".parquet")
        return self.folder / name, row - int(self.starts[shard])

    def read_range(self, first: int, last: int) -> Integer[np.ndarray, "rows S"]:
        """Return rows [first, last), read at once."""
        parts = []
        for shard, start in zip(self.shards, self.starts.tolist()):
            low, high = max(first - start, 0), min(last - start, len(shard))
            if low < high:
                parts.append(shard[low:high])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(
        self,
        rows: Integer[np.ndarray, " n"],
        tokens: Integer[np.ndarray, "B S"],
        mask: Integer[np.ndarray, "B S"],
        lines: Sequence[int] | Integer[np.ndarray, " n"] | None = None,
    ) -> None:
        """Copy rows by their numbers into `lines` (by default the first) of `tokens`, and of `mask` if there is one."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        into = range(len(rows)) if lines is None else np.asarray(lines).tolist()
        for line, shard, row in zip(into, shards.tolist(), (rows - self.starts[shards]).tolist()):
            tokens[line] = self.shards[shard][row : row + 1]
            if self.masks:
                mask[line] = self.masks[shard][row]


def open_shards(folder: Path) -> TokenShards:
    """Open a folder of shards. Raises UserError where files are missing or not of the counted size."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        fix = "Run the step that writes token shards again."
        raise UserError("there are no token shards here", where=str(folder), fix=fix) from error
    url = facts.get("url", "")
    if url and not is_local(url):
        shards: list[Any] = _remote(facts)
    else:
        place = local_path(url) if url else folder
        shards = [_open(place, name) for name in facts["files"] if name.startswith("tokens-")]
    masks = [_open(folder, name) for name in facts["files"] if name.startswith("loss_mask-")]
    starts = np.cumsum([0, *(len(shard) for shard in shards)])
    shapes = [shard.shape for shard in shards]
    if starts[-1] != facts["rows"] or (masks and [mask.shape for mask in masks] != shapes):
        what = f"{FACTS} counts {facts['rows']} rows, the files hold {starts[-1]}"
        raise UserError(what, where=str(folder), fix=_AGAIN)
    return TokenShards(folder, facts, tuple(shards), tuple(masks), starts)


def find_shard_folders(folder: Path) -> dict[str, Path]:
    """Return folders of shards by name: the sub-folders of `folder` that hold some, or `folder` itself."""
    if (folder / FACTS).is_file():
        return {folder.name: folder}
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{FACTS}"))}


def _open(folder: Path, name: str) -> np.ndarray:
    try:
        # Taking a row of a plain view is several times faster than of a np.memmap.
        array: np.ndarray = np.load(folder / name, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {error}", where=str(folder), fix=_AGAIN) from error
    return array


def _remote(facts: dict[str, Any]) -> "list[RemoteShard]":
    """The shards at a URL, after a look at whether they have the sizes that were written."""
    url = facts["url"]
    filesystem, path = open_url(url)

    def sizes() -> dict[str, int]:
        try:
            found = filesystem.ls(path, detail=True)  # one request, as a rule
        except FileNotFoundError:
            return {}
        return {os.path.basename(each["name"]): int(each["size"] or 0) for each in found if each["type"] == "file"}

    there = patient(sizes, url)
    shards = []
    for name, counted in facts["files"].items():
        if there.get(name) != counted["bytes"]:
            has = (
                f"{name} has {there[name]} bytes instead of {counted['bytes']}" if name in there else f"{name} is gone"
            )
            raise UserError(has, where=url, fix=_AGAIN)
        shape = (counted["rows"], facts["seq_len"])
        shards.append(RemoteShard(filesystem, f"{path}/{name}", shape, facts["dtype"], counted["bytes"]))
    return shards


class RemoteShard:
    """A shard that stays where it is: a slice of its rows is one range request."""

    def __init__(self, filesystem: Any, path: str, shape: tuple[int, int], dtype: Any, size: int) -> None:
        """`size` is that of the file, in bytes."""
        self._filesystem, self._path = filesystem, path
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._stride = shape[1] * self.dtype.itemsize
        self._header = size - shape[0] * self._stride

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(len(self))
        begin, end = (self._header + row * self._stride for row in (first, last))
        content = patient(lambda: self._filesystem.cat_file(self._path, start=begin, end=end), self._path)
        if len(content) != end - begin:
            what = f"{len(content)} bytes came where {end - begin} were requested, from {begin} on"
            raise UserError(what, where=self._path, fix=_AGAIN)
        return np.frombuffer(content, self.dtype).reshape(-1, self.shape[1])

"""Documents as tokens in scratch files, so that they can be laid out in another order without being held in memory."""

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Integer

_DOCUMENTS_PER_CHUNK = 65_536
EXTRA = np.uint32  # of what goes beside tokens: a token may stand for hundreds of bytes, such as a run of spaces


@dataclass
class Spool:
    """Token sequences with their shuffle keys and where they came from, appended in any order.

    Tokens go to `path`; with `extra`, a number per token goes beside them (what it means is up to the caller). In
    memory remain about 24 bytes and the names of every document.
    """

    path: Path
    dtype: type[np.generic]
    extra: bool = False
    text_bytes: int = 0
    _keys: list[int] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)
    _begins: list[bool] = field(default_factory=list)
    _names: list[tuple[str, str, str]] = field(default_factory=list)
    _chunks: list[pa.RecordBatch] = field(default_factory=list)
    _file: BinaryIO | None = None
    _extra_file: BinaryIO | None = None

    def __enter__(self) -> "Spool":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._extra_file = self._extra_path.open("wb") if self.extra else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._file, self._extra_file):
            if file is not None:
                file.close()
        self.path.unlink(missing_ok=True)
        self._extra_path.unlink(missing_ok=True)

    @property
    def _extra_path(self) -> Path:
        return self.path.with_name(self.path.name + ".extra")

    def __len__(self) -> int:
        return len(self._lengths)

    def append(
        self,
        tokens: np.ndarray,
        *,
        key: int,
        text_bytes: int,
        names: tuple[str, str, str],
        extra: np.ndarray | None = None,
        begins: bool = True,
    ) -> None:
        """Add one document: its tokens, shuffle key, UTF-8 bytes of text, and (id, source, url).

        One that does not begin something is a further part of what the document before it began, with the same key.
        """
        assert self._file is not None
        self._file.write(tokens.astype(self.dtype, copy=False).data.cast("B"))
        if self._extra_file is not None:
            assert extra is not None and len(extra) == len(tokens)
            self._extra_file.write(extra.astype(EXTRA).data)
        self._keys.append(key)
        self._begins.append(begins)
        self._lengths.append(len(tokens))
        self._names.append(names)
        self.text_bytes += text_bytes
        if len(self._names) >= _DOCUMENTS_PER_CHUNK:
            self._pack_names()

    def _pack_names(self) -> None:
        columns = zip(*self._names) if self._names else ((), (), ())
        arrays = [pa.array(column, pa.string()) for column in columns]
        self._chunks.append(pa.RecordBatch.from_arrays(arrays, names=["id", "source", "url"]))
        self._names = []

    def shuffled(self) -> "Stream":
        """The documents in the order of their keys, one after the other."""
        assert self._file is not None
        for file in (self._file, self._extra_file):
            if file is not None:
                file.flush()
        self._pack_names()
        lengths = np.array(self._lengths, np.int64)
        keys = np.array(self._keys, np.uint64)
        order = np.argsort(keys, kind="stable")
        return Stream(
            tokens=(mapped(self.path, self.dtype),),
            extra=(mapped(self._extra_path, EXTRA),) if self.extra else (),
            files=np.zeros(len(order), np.int32),
            sources=(np.cumsum(lengths) - lengths)[order],
            keys=keys[order],
            starts=np.concatenate([[0], np.cumsum(lengths[order])]),
            names=pa.Table.from_batches(self._chunks).take(pa.array(order)),
            begins=np.array(self._begins, bool)[order],
        )


def mapped(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """The file as an array that is read where it is looked at."""
    with path.open("rb") as file:
        if not path.stat().st_size:  # cannot be mapped
            return np.zeros(0, dtype)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


@dataclass(frozen=True)
class Stream:
    """Documents laid end to end; document i has the tokens [starts[i], starts[i + 1])."""

    tokens: tuple[np.ndarray, ...]  # of each scratch file
    extra: tuple[np.ndarray, ...]  # beside them; empty where nothing goes beside tokens
    files: Integer[np.ndarray, " documents"]  # which scratch file each document is in
    sources: Integer[np.ndarray, " documents"]  # where it begins there
    keys: Integer[np.ndarray, " documents"]  # ascending
    starts: Integer[np.ndarray, " documents+1"]
    names: pa.Table  # id, source, url of each document
    begins: Bool[np.ndarray, " documents"]  # whether it is no further part of the one before; see `Spool.append`

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def dtype(self) -> type[np.generic]:
        """Of the tokens."""
        return self.tokens[0].dtype.type

    @property
    def lengths(self) -> Integer[np.ndarray, " documents"]:
        """Tokens of every document."""
        return np.diff(self.starts)

    def read(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document."""
        return self._piece(self.tokens, document, start, stop)

    def read_extra(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The extra numbers of tokens [start, stop) of a document."""
        return self._piece(self.extra, document, start, stop)

    def forget(self) -> None:
        """Give back the memory of what was read: pages of a mapped file count as the process's own."""
        for store in (*self.tokens, *self.extra):
            owner = getattr(store.base, "obj", None)  # of the memory that the array is a view of
            if isinstance(owner, mmap.mmap):
                owner.madvise(mmap.MADV_DONTNEED)

    def _piece(self, stores: tuple[np.ndarray, ...], document: int, start: int, stop: int | None) -> np.ndarray:
        begin = int(self.sources[document])
        end = begin + (int(self.starts[document + 1] - self.starts[document]) if stop is None else stop)
        return stores[self.files[document]][begin + start : end]

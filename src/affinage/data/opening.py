"""Opens a file wherever it is and however it is compressed, and tells damage in one way."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import fsspec
import pyarrow as pa
import zstandard

from affinage.data.downloads import cached
from affinage.data.file_kinds import compression_of
from affinage.data.records import DamagedFile

CHUNK_BYTES = 1 << 16  # read at once; of a damaged file, the readable bytes of the last chunk are lost
_ZSTD_BYTES = 1 << 8
_ZSTD_WINDOW = 1 << 31  # bytes; what `zstd --long=31` writes, as many published dumps are


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is its path within the source, the same on every machine."""

    url: str
    name: str
    bytes: int
    fetched: bool = False  # read from the cache of downloads, into which it comes first
    sha256: str = ""
    start: int = 0  # a part of a dump: the streams that begin in [start, stop)
    stop: int | None = None


class _ZstdReader(io.RawIOBase):
    """A stream of the decompressed bytes of all frames; unlike zstandard's own it notices a missing end."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(CHUNK_BYTES)
            # Little by little: a few bytes can stand for 128 KB.
            chunk, self._compressed = self._compressed[:_ZSTD_BYTES], self._compressed[_ZSTD_BYTES:]
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
            self._ready = memoryview(self._frame.decompress(chunk))
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data + self._compressed, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


@contextmanager
def damage_told() -> Iterator[None]:
    """Turn the many ways in which reading fails into DamagedFile."""
    try:
        yield
    except EOFError:
        raise DamagedFile("the file is cut off: its compressed data has no end") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, pa.ArrowException) as error:
        raise DamagedFile(f"the file is damaged: {error}") from None
    except FileNotFoundError:
        raise DamagedFile("the file is not there (any more)") from None
    except OSError as error:
        raise DamagedFile(f"the file cannot be read: {error}") from None


def open_stored(file: SourceFile) -> IO[bytes]:
    """The bytes of a file as they are stored."""
    place = str(cached(file.url, file.sha256)) if file.fetched else file.url
    return cast(IO[bytes], fsspec.open(place, "rb").open())


def open_plain(file: SourceFile) -> IO[bytes]:
    """The decompressed bytes of a file."""
    raw = open_stored(file)
    match compression_of(file.name):
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return io.BufferedReader(_ZstdReader(raw), CHUNK_BYTES)
    return raw

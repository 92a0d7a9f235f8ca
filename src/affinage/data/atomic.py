"""Files that are either whole or absent, whatever moment the process is killed at."""

import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_PARTIAL = ".partial"


class HashingFile:
    """A binary file open for writing that knows the SHA-256 of what went into it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._file.write(data)
        self._hash.update(data)
        self.bytes += memoryview(data).nbytes

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of everything written so far."""
        return self._hash.hexdigest()


@contextmanager
def atomic_file(path: Path) -> Iterator[HashingFile]:
    """Open `path` for writing under another name, and rename it into place once it is complete."""
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("wb") as file:
        yield HashingFile(file)
    os.replace(partial, path)


def write_atomically(path: Path, content: bytes) -> None:
    """Write the whole of `content` to `path`, or nothing."""
    with atomic_file(path) as file:
        file.write(content)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy to `path`, or nothing."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomically(path, content.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`, or nothing."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    write_atomically(path, text.encode(errors="backslashreplace") + b"\n")  # JSON spells half a surrogate pair so

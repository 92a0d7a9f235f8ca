"""Files that are either whole or absent, whatever moment the process is killed at."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write the whole of the parts to `path`, one after the other, or nothing."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(parts)
    os.replace(partial, path)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy to `path`, or nothing."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomically(path, content.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`, or nothing."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    write_atomically(path, text.encode(errors="backslashreplace") + b"\n")  # JSON spells half a surrogate pair so

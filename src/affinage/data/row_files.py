"""Rows of tokens on disk: .npy files that numpy alone can open, beside a rows.json that counts and hashes them."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from affinage.data.atomic import HashingFile, atomic_file, write_json
from affinage.errors import UserError

_BLOCK = 4_000_000  # tokens handled at once, about 40 MB


def file_safe(name: str) -> str:
    """`name` with everything that a file system might refuse replaced by a hyphen; never empty."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "unnamed"


def shard_name(kind: str, shard: int, shards: int) -> str:
    """File name of one shard: rows-00003-of-00010.npy."""
    return f"{kind}-{shard:05d}-of-{shards:05d}.npy"


@dataclass(frozen=True)
class RowFiles:
    """A folder of rows, opened without reading them."""

    folder: Path
    facts: dict[str, Any]  # the content of rows.json
    shards: tuple[np.ndarray, ...]  # memory-mapped, uint16 or uint32 [rows of the shard, context]
    masks: tuple[np.ndarray, ...]  # memory-mapped, uint8, the same shapes; empty where every token is trained
    starts: np.ndarray  # int64 [shards + 1], the first row of every shard

    @property
    def rows(self) -> int:
        """Rows in all shards."""
        return int(self.starts[-1])

    @property
    def context(self) -> int:
        """Tokens in a row."""
        return int(self.facts["context"])

    def read(
        self, rows: Integer[np.ndarray, " B"], tokens: Integer[np.ndarray, "B S"], mask: Integer[np.ndarray, "B S"]
    ) -> None:
        """Copy rows by their numbers into `tokens`, and 1 or 0 into `mask` where there are mask files."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        for i, (shard, row) in enumerate(zip(shards.tolist(), (rows - self.starts[shards]).tolist())):
            tokens[i] = self.shards[shard][row]
            if self.masks:
                mask[i] = self.masks[shard][row]


def open_rows(folder: Path) -> RowFiles:
    """Open what `write_rows` wrote. Raises UserError where files are missing or not of the counted size."""
    try:
        facts = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            "there are no rows here", where=str(folder), fix="run the stage that packs rows again"
        ) from error
    shards = [_open(folder, name) for name in facts["files"] if name.startswith("rows-")]
    masks = [_open(folder, name) for name in facts["files"] if name.startswith("mask-")]
    starts = np.cumsum([0, *(len(shard) for shard in shards)])
    shapes = [shard.shape for shard in shards]
    if starts[-1] != facts["rows"] or (masks and [mask.shape for mask in masks] != shapes):
        raise UserError(
            f"rows.json counts {facts['rows']} rows, the files hold {starts[-1]}",
            where=str(folder),
            fix="the folder was changed after it was written; run the stage that packs rows again",
        )
    return RowFiles(folder, facts, tuple(shards), tuple(masks), starts)


def _open(folder: Path, name: str) -> np.ndarray:
    try:
        # Taking a row of a plain view is several times faster than of a np.memmap.
        array: np.ndarray = np.load(folder / name, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be read: {error}", where=str(folder), fix="run the stage that packs rows again"
        ) from error
    return array


def find_row_folders(folder: Path) -> dict[str, Path]:
    """Folders of rows by name: the sub-folders of `folder` that hold rows, or `folder` itself as the only one."""
    if (folder / "rows.json").is_file():
        return {folder.name: folder}
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/rows.json"))}


def write_rows(
    folder: Path,
    blocks: Iterable[Integer[np.ndarray, "b S"]],
    *,
    rows: int,
    context: int,
    shards: int,
    dtype: type[np.generic],
    kind: str = "rows",
) -> dict[str, dict[str, Any]]:
    """Spread `rows` rows, given in order in blocks of any height, over `shards` files of nearly equal height.

    Gives {file name: {rows, bytes, sha256}}. Every file appears under its name when it is complete.
    """
    shards = max(1, min(shards, rows))
    files = {}
    queue = _Rows(blocks)
    for shard in range(shards):
        height = rows * (shard + 1) // shards - rows * shard // shards
        name = shard_name(kind, shard, shards)
        with atomic_file(folder / name) as file:
            _write_header(file, (height, context), dtype)
            for block in queue.take(height):
                file.write(np.ascontiguousarray(block, dtype).data.cast("B"))
            files[name] = {"rows": height, "bytes": file.bytes, "sha256": file.sha256}
    return files


class _Rows:
    """Hands out blocks of rows in other heights than they came in."""

    def __init__(self, blocks: Iterable[np.ndarray]) -> None:
        self._blocks = iter(blocks)
        self._rest: np.ndarray | None = None

    def take(self, height: int) -> Iterator[np.ndarray]:
        """The next `height` rows, in blocks."""
        while height:
            block = next(self._blocks) if self._rest is None else self._rest
            self._rest = block[height:] if len(block) > height else None
            yield block[:height]
            height -= min(height, len(block))


def _write_header(file: HashingFile, shape: tuple[int, int], dtype: type[np.generic]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def blocks_of_rows(rows: int, context: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of rows that cover `rows`, each small enough to hold in memory."""
    height = max(1, _BLOCK // context)
    for start in range(0, rows, height):
        yield start, min(start + height, rows)


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write rows.json, last: a folder that has it is complete."""
    write_json(folder / "rows.json", facts)

"""Rows of tokens on disk: .npy files that numpy alone can open, beside a rows.json that counts and hashes them."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from affinage.data.atomic import write_json
from affinage.data.shards import (
    RemoteShard,
    file_sizes,
    is_local,
    local_path,
    open_url,
    told,
    write_array_of_blocks,
)
from affinage.data.special_tokens import MARKS, Marks
from affinage.errors import UserError

FACTS = "rows.json"
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
    shards: tuple[np.ndarray | RemoteShard, ...]  # memory-mapped, or elsewhere; uint16, uint32 [rows, context]
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

    @property
    def is_remote(self) -> bool:
        """Whether rows are read over a network, so that reading them one by one would be slow."""
        return any(isinstance(shard, RemoteShard) for shard in self.shards)

    def read_range(self, first: int, last: int) -> Integer[np.ndarray, "rows S"]:
        """Rows [first, last), read at once."""
        parts = []
        for shard, start in zip(self.shards, self.starts.tolist()):
            low, high = max(first - start, 0), min(last - start, len(shard))
            if low < high:
                parts.append(shard[low:high])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def marks(self) -> Marks:
        """What the rows are read by; rows.json says it where the tokenizer is not affinage's."""
        return Marks(**self.facts["marks"]) if "marks" in self.facts else MARKS

    def read(
        self,
        rows: Integer[np.ndarray, " n"],
        tokens: Integer[np.ndarray, "B S"],
        mask: Integer[np.ndarray, "B S"],
        lines: Integer[np.ndarray, " n"] | None = None,
    ) -> None:
        """Copy rows by their numbers into `lines` of `tokens`, the first ones by default.

        Where there are mask files, 1 or 0 goes into the same lines of `mask`.
        """
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        into = range(len(rows)) if lines is None else lines.tolist()
        for line, shard, row in zip(into, shards.tolist(), (rows - self.starts[shards]).tolist()):
            tokens[line] = self.shards[shard][row : row + 1]
            if self.masks:
                mask[line] = self.masks[shard][row]


def open_rows(folder: Path) -> RowFiles:
    """Open what `write_rows` wrote. Raises UserError where files are missing or not of the counted size."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            "there are no rows here", where=str(folder), fix="run the stage that packs rows again"
        ) from error
    url = facts.get("url", "")
    if url and not is_local(url):
        shards: list[Any] = _remote(facts)
    else:
        place = local_path(url) if url else folder
        shards = [_open(place, name) for name in facts["files"] if name.startswith("rows-")]
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


def _remote(facts: dict[str, Any]) -> list[RemoteShard]:
    """The shards at a URL, after a look at whether they have the sizes that were written."""
    filesystem, path = open_url(facts["url"])
    with told(facts["url"]):
        sizes = file_sizes(filesystem, path)
    for name, counted in facts["files"].items():
        if sizes.get(name) != counted["bytes"]:
            raise UserError(
                f"{name} has {sizes[name]} bytes instead of {counted['bytes']}" if name in sizes else f"{name} is gone",
                where=facts["url"],
                fix="make the rows anew: --force tokenize",
            )
    return [
        RemoteShard(filesystem, f"{path}/{name}", (each["rows"], facts["context"]), facts["dtype"], each["bytes"])
        for name, each in facts["files"].items()
    ]


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
    if (folder / FACTS).is_file():
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
        files[name] = write_array_of_blocks(folder / name, queue.take(height), (height, context), dtype)
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


def blocks_of_rows(first: int, last: int, context: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of rows that cover [first, last), each small enough to hold in memory."""
    height = max(1, _BLOCK // context)
    for start in range(first, last, height):
        yield start, min(start + height, last)


def told_marks(marks: Marks) -> dict[str, Any]:
    """What rows.json says of them: nothing of affinage's own."""
    return {} if marks == MARKS else {"marks": asdict(marks)}


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write rows.json, last: a folder that has it is complete."""
    write_json(folder / FACTS, facts)

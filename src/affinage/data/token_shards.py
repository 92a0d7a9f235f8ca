"""Shards of packed tokens: .npy files that numpy alone opens, in a folder here or anywhere fsspec reaches.

    <folder>/tokens-00012-of-00359.npy         uint16 or uint32 [rows, seq_len]
             loss_mask-00012-of-00359.npy      uint8, the same shape; of conversations: 1 where a token is trained
             documents-00012-of-00359.parquet  which document every token is from: the columns of `SCHEMA`
             row_bytes-00012-of-00359.npy      int64 [rows], of held-out text: UTF-8 bytes that a row predicts
             shards.json                       counts, and size and SHA-256 of every file; written last

Rows are numbered through all shards of a folder. With a URL, the tokens are there alone, and copies of the rest.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Integer

from affinage.data.code_points import kernel
from affinage.data.special_tokens import MARKS, Marks
from affinage.errors import UserError
from affinage.json_files import write_atomically, write_json
from affinage.network import errors_at, is_local, upload, with_retries

FACTS = "shards.json"
# Tokens [start, stop) of a row of the shard are the document's from its token `offset` on, <s> included.
_COLUMNS = {"row": pa.int64(), "start": pa.int32(), "stop": pa.int32(), "offset": pa.int64()}
SCHEMA = pa.schema(dict.fromkeys(("id", "source", "url"), pa.string()) | _COLUMNS)
_AGAIN = "The folder was changed after it was written: run the step that writes it again, with --force."

# ---- packing: which documents share a row, and where in it each of them lies ----


class Layout(NamedTuple):
    """Which piece of which document lies where. Pieces are sorted by row, and within a row by place."""

    rows: int
    document: Integer[np.ndarray, " pieces"]
    offset: Integer[np.ndarray, " pieces"]  # token of the document that the piece begins with
    row: Integer[np.ndarray, " pieces"]
    start: Integer[np.ndarray, " pieces"]  # places [start, stop) in the row
    stop: Integer[np.ndarray, " pieces"]

    def fill(self, documents: Sequence[np.ndarray], seq_len: int, padding: int = 0) -> Integer[np.ndarray, "rows S"]:
        """Return the rows of what each document has for each of its tokens, such as their ids."""
        rows = np.full((self.rows, seq_len), padding, documents[0].dtype)
        for document, offset, row, start, stop in zip(*(column.tolist() for column in self[1:]), strict=True):
            rows[row, start:stop] = documents[document][offset : offset + stop - start]
        return rows


def concatenate(lengths: Integer[np.ndarray, " documents"], seq_len: int, overlap: int = 0) -> Layout:
    """Lay documents end to end, cut wherever a row is full; a row begins with the last `overlap` tokens again."""
    ends = np.cumsum(lengths)
    starts, stride = ends - lengths, seq_len - overlap
    begins = np.arange(max(1, -(-(int(ends[-1]) - overlap) // stride))) * stride  # of the rows
    first = np.searchsorted(ends, begins, side="right")  # document of every row
    pieces = np.searchsorted(starts, begins + seq_len) - first
    row = np.repeat(np.arange(len(begins)), pieces)
    document = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces - first, pieces)
    start = np.maximum(starts[document] - begins[row], 0)
    stop = np.minimum(ends[document] - begins[row], seq_len)
    return Layout(len(begins), document, begins[row] + start - starts[document], row, start, stop)


def best_fit(lengths: Integer[np.ndarray, " documents"], seq_len: int) -> Layout:
    """Keep documents that fit into a row whole; longer ones fill rows of their own, and their rest joins the others.

    Best-fit decreasing (Johnson et al., SIAM J. Comput. 3(4), 1974): at most 11/9 of the fewest rows plus 4.
    """
    count = np.maximum(1, -(-lengths // seq_len))
    document = np.repeat(np.arange(len(lengths)), count)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * seq_len
    length = np.minimum(lengths[document] - offset, seq_len)
    bins = _fit(length, np.argsort(-length, kind="stable"), seq_len)
    # Longest first is no order to train in: a row stands where its first document does.
    _, earliest = np.unique(bins, return_index=True)
    row = np.argsort(np.argsort(earliest))[bins]
    by_row = np.argsort(row, kind="stable")
    document, offset, row, length = (column[by_row] for column in (document, offset, row, length))
    before = np.cumsum(length) - length
    start = before - before[np.searchsorted(row, row)]
    return Layout(len(earliest), document, offset, row, start, start + length)


@kernel
def _fit(lengths, order, capacity):  # type: ignore[no-untyped-def]
    """Return the bin of every item, which come in an `order`: the one in which the least room is left over.

    Bins wait in one stack per room that is left, 0 to `capacity`.
    """
    top = np.full(capacity + 1, -1, np.int64)  # of the stack of every room
    below = np.empty(len(lengths), np.int64)  # of every bin in its stack
    bins = np.empty(len(lengths), np.int64)
    opened = 0
    for item in order:
        room = length = lengths[item]
        while room < capacity and top[room] < 0:
            room += 1
        chosen = top[room]
        if chosen < 0:
            chosen = opened
            opened += 1
        else:
            top[room] = below[chosen]
        bins[item] = chosen
        left = room - length
        below[chosen] = top[left]
        top[left] = chosen
    return bins


# ---- writing ----


class Document(NamedTuple):
    """A document, or a conversation, as tokens; a shard has its documents in the order of `key`, which shuffles."""

    id: str
    source: str
    url: str
    key: int
    tokens: Integer[np.ndarray, " tokens"]  # uint16 or uint32
    bytes: Integer[np.ndarray, " tokens"] | None = None  # UTF-8 bytes that each token stands for
    trained: Integer[np.ndarray, " tokens"] | None = None  # uint8, 1 where the token is trained


def shard_file(kind: str, shard: int, shards: int) -> str:
    """Return the file name of one shard: tokens-00003-of-00010.npy."""
    return f"{kind}-{shard:05d}-of-{shards:05d}.{'parquet' if kind == 'documents' else 'npy'}"


def write_shard(
    folder: Path,
    shard: int,
    shards: int,
    documents: Sequence[Document],
    seq_len: int,
    *,
    pad: int,
    strategy: str = "best_fit",
    overlap: int = 0,
    url: str = "",
) -> dict[str, Any]:
    """Pack documents by a `strategy` (`best_fit`, `concat`) into rows, those of `concat` with an `overlap` of tokens.

    Returns {rows, tokens, files: {name: facts}} of the shard; of held-out documents and conversations row_bytes, of
    conversations their number, trained_tokens and most_in_a_row. A token that a row repeats counts once.
    With a `url` the tokens go there. Raises UserError if that cannot be written.
    """
    documents = sorted(documents, key=lambda document: document.key)
    sizes = np.array([len(document.tokens) for document in documents])
    layout = best_fit(sizes, seq_len) if strategy == "best_fit" else concatenate(sizes, seq_len, overlap)
    here, name = str(folder), partial(shard_file, shard=shard, shards=shards)
    tokens = layout.fill([each.tokens for each in documents], seq_len, pad)
    files = {name("tokens"): _put_array(url or here, name("tokens"), tokens)}
    counts: dict[str, Any] = {"rows": layout.rows, "tokens": int(sizes.sum()), "files": files}
    if trained := [each.trained for each in documents if each.trained is not None]:
        mask = layout.fill(trained, seq_len)
        files[name("loss_mask")] = _put_array(here, name("loss_mask"), mask)
        counts |= {"trained_tokens": int(mask.sum()), "conversations": len(documents)}
        counts["most_in_a_row"] = int(np.bincount(layout.row).max())
    if lengths := [each.bytes for each in documents if each.bytes is not None]:
        # Nothing comes before the first token of a row that could predict it.
        row_bytes = layout.fill(lengths, seq_len)[:, 1:].sum(axis=1, dtype=np.int64)
        _put_array(here, name("row_bytes"), row_bytes)
        counts["row_bytes"] = int(row_bytes.sum())
    of_pieces = [documents[number] for number in layout.document.tolist()]
    spans = {column: [getattr(document, column) for document in of_pieces] for column in ("id", "source", "url")}
    spans |= {column: getattr(layout, column) for column in _COLUMNS}
    table = io.BytesIO()
    pq.write_table(pa.table(spans, SCHEMA), table, compression="zstd", row_group_size=65_536)
    for place in dict.fromkeys((here, url or here)):
        _put(place, name("documents"), table.getvalue())
    return counts


def _put_array(place: str, name: str, array: np.ndarray) -> dict[str, Any]:
    """Write an array as .npy into a folder or at a URL; return {rows, bytes, sha256}."""
    array, header = np.ascontiguousarray(array), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    parts = (header.getvalue(), array.reshape(-1).view(np.uint8).data)  # large arrays are not copied
    _put(place, name, *parts)
    digest = hashlib.sha256(parts[0])
    digest.update(parts[1])
    return {"rows": len(array), "bytes": sum(map(len, parts)), "sha256": digest.hexdigest()}


def _put(place: str, name: str, *parts: bytes | memoryview) -> None:
    """Write a file of some parts into a folder or at a URL, whole or not at all."""
    if is_local(place):
        path = Path(fsspec.core.strip_protocol(place), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, *parts)
        return
    with errors_at(place):
        filesystem, root = fsspec.core.url_to_fs(place)
        filesystem.makedirs(root, exist_ok=True)
        upload(filesystem, f"{root}/{name}", b"".join(parts))


def finish_folder(folder: Path, shards: Sequence[dict[str, Any]], marks: Marks = MARKS, **facts: Any) -> dict[str, Any]:
    """Write shards.json of a folder, last: a folder that has it is complete. Return its content.

    It holds the sums of what `write_shard` counted, all files, and `facts`; a copy goes to a `url` that is in these.
    """
    sums = {key: sum(shard[key] for shard in shards) for key, count in shards[0].items() if isinstance(count, int)}
    files = {name: about for shard in shards for name, about in shard["files"].items()}
    facts = sums | facts | ({} if marks == MARKS else {"marks": marks._asdict()}) | {"files": files}
    write_json(folder / FACTS, facts)
    if url := facts.get("url", ""):
        with_retries(lambda: _put(url, FACTS, (folder / FACTS).read_bytes()), url)
    return facts


# ---- reading ----


class TokenShards:
    """A folder of shards, opened without reading them: `rows` of `seq_len` tokens, read by the ids `marks`."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where files here are missing or not of the counted size."""
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        files, url, self.seq_len = self.facts["files"], self.facts.get("url", ""), int(self.facts["seq_len"])
        self.marks = Marks(**self.facts["marks"]) if "marks" in self.facts else MARKS
        # The files of tokens in their order; a number is missing where a task wrote nothing.
        self.names = [name for name in files if name.startswith("tokens-")]
        # The first row of every shard, and the number of all rows.
        self.starts: Integer[np.ndarray, " shards+1"] = np.cumsum([0, *(files[name]["rows"] for name in self.names)])
        self.rows = int(self.starts[-1])
        # Memory-mapped, [rows, seq_len] each; none where the tokens are at a URL, or where every token is trained.
        place = url or str(folder)
        self._shards = self._open(Path(fsspec.core.strip_protocol(place)), "tokens-") if is_local(place) else []
        self._masks = self._open(folder, "loss_mask-")
        self.reference: Float[np.ndarray, "rows documents"] | None = None  # of preferences: log-probabilities

    def _open(self, folder: Path, kind: str) -> list[np.ndarray]:
        arrays = []
        for name, facts in self.facts["files"].items():
            if name.startswith(kind):
                try:
                    # Taking a row of a plain view is several times faster than of a np.memmap.
                    array = np.load(folder / name, mmap_mode="r", allow_pickle=False).view(np.ndarray)
                    if array.shape != (facts["rows"], self.seq_len):
                        raise ValueError(f"its shape is {array.shape}, not {(facts['rows'], self.seq_len)}")
                except (OSError, ValueError) as error:
                    raise UserError(f"{name} cannot be read: {error}", where=str(folder), fix=_AGAIN) from error
                arrays.append(array)
        return arrays

    @property
    def row_bytes(self) -> Integer[np.ndarray, " rows"]:
        """UTF-8 bytes of text that each row predicts; of held-out rows."""
        files = [self.folder / name.replace("tokens-", "row_bytes-") for name in self.names]
        return np.concatenate([np.load(file, allow_pickle=False) for file in files])

    def _documents_of(self, shard: int, *filters: tuple[str, str, Any]) -> pa.Table:
        name = self.names[shard].replace("tokens-", "documents-").replace(".npy", ".parquet")
        return pq.read_table(self.folder / name, filters=filters)

    def spans_of_row(self, row: int) -> list[dict[str, Any]]:
        """Return the pieces of documents in a row, from left to right: the columns of `SCHEMA`."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self._documents_of(shard, ("row", "==", row - int(self.starts[shard]))).sort_by("start").to_pylist()

    def rows_of_document(self, id: str, source: str, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return the rows that hold some of the tokens [start, stop) of a document."""
        rows: set[int] = set()
        for shard, first in enumerate(self.starts[:-1].tolist()):
            table = self._documents_of(shard, ("id", "==", id), ("source", "==", source))
            row, start, stop, offset = (table.column(name).to_numpy() for name in _COLUMNS)
            for begin, end in ranges:
                rows.update((first + row[(offset < end) & (offset + stop - start > begin)]).tolist())
        return sorted(rows)

    def read(self, rows: Integer[np.ndarray, " n"]) -> tuple[Integer[np.ndarray, "n S"], Integer[np.ndarray, "n S"]]:
        """Return the tokens of rows by their numbers, int32, and a mask, uint8, 1 where they are trained on."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        places = list(zip(shards.tolist(), (rows - self.starts[shards]).tolist(), strict=True))
        lines = [self._shards[shard][row] for shard, row in places] if self._shards else self._download(places)
        tokens = np.concatenate(lines).reshape(-1, self.seq_len).astype(np.int32)
        if not self._masks:
            return tokens, np.ones(tokens.shape, np.uint8)
        return tokens, np.concatenate([self._masks[shard][row] for shard, row in places]).reshape(tokens.shape)

    def fields(self, rows: Integer[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return what a batch has of rows: their `tokens` and `mask` (see `read`), of preferences their `reference`."""
        fields = dict(zip(("tokens", "mask"), self.read(rows), strict=True))
        return fields if self.reference is None else fields | {"reference": self.reference[rows]}

    def _download(self, places: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read rows at the URL, each by a range request, all at the same time where the file system can."""
        url, dtype = self.facts["url"], np.dtype(self.facts["dtype"])
        names, size = [self.names[shard] for shard, _ in places], self.seq_len * dtype.itemsize
        files = [(self.facts["files"][name], row) for name, (_, row) in zip(names, places, strict=True)]
        begins = [file["bytes"] - (file["rows"] - row) * size for file, row in files]

        def ranges() -> list[bytes]:
            with errors_at(url):
                filesystem, path = fsspec.core.url_to_fs(url)
                paths, ends = [f"{path}/{name}" for name in names], [begin + size for begin in begins]
                return list(filesystem.cat_ranges(paths, begins, ends, on_error="raise"))

        contents = with_retries(ranges, url)
        if {*map(len, contents)} != {size}:
            raise UserError(f"a row is not of {size} bytes there", where=url, fix=_AGAIN)
        return [np.frombuffer(row, dtype) for row in contents]


def find_shard_folders(folder: Path) -> dict[str, Path]:
    """Return folders of shards by name: the sub-folders of `folder` that hold some, or `folder` itself."""
    if (folder / FACTS).is_file():
        return {folder.name: folder}
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{FACTS}"))}

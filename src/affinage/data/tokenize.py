"""Documents to shards of packed tokens: `<s> text </s>` in a shuffled order, packed into rows of one length.

Source code is `<s><|code|> text <|endcode|></s>`. A shard is a task: it takes consecutive documents of one source and
language, encodes them, shuffles them by a hash of the seed and their ids, packs them as the recipe says, and writes its
files. So shards are written side by side, memory is that of a shard, and a run that was killed resumes with the shards
that are missing. A held-out row that continues a document begins with the last token of the row before it, so that
every token of the held-out text is predicted exactly once and bits per byte are exact.
"""

import itertools
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.config.data import PackingSettings
from affinage.data.documents import document_files, row_groups
from affinage.data.executor import LOCAL, Executor, clear_completions
from affinage.data.order import document_keys
from affinage.data.packing import end_to_end, whole_where_they_fit
from affinage.data.token_shards import BYTES, Documents, file_safe, write_facts, write_shard
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError

UNDETERMINED = "und"  # ISO 639 for a language that is not known
SHARD_BYTES = 512_000_000  # of text: the most that a shard holds, whatever `packing.num_shards` says
_BATCH = 4_000_000  # characters encoded at once
_COUNTS = ("rows", "tokens", "documents", "bytes")


def group_name(source: str, language: str) -> str:
    """Return how the rows of a source in a language are called, as folder and in mixtures."""
    return f"{file_safe(source)}.{file_safe(language)}"


@dataclass(frozen=True)
class Piece:
    """Documents [first, last) of those that a row group of a file has of one source and language."""

    path: Path
    row_group: int
    first: int
    last: int


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    folder: Path  # of its source and language
    source: str
    language: str
    shard: int
    shards: int
    pieces: tuple[Piece, ...]
    tokenizer: Path
    seq_len: int
    strategy: str
    seed: int
    held_out: bool
    url: str
    bytes: float  # of all text in this part of the split, about


def tokenize(
    split_folder: Path,
    tokenizer: Tokenizer,
    folder: Path,
    settings: PackingSettings,
    seed: int,
    *,
    executor: Executor = LOCAL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `train/<source>.<language>/` and `validation/<source>.<language>/` folders of shards into `folder`.

    With `settings.output_path`, the tokens to train on go to `<path>/<name of folder>/train/...` instead.
    `folder` may hold what a killed call with the same arguments left: that is not written again.
    Returns counts of all, by language, by source and by group, and the share of padding.
    Raises UserError if there is no text to train on.
    """
    started = time.monotonic()
    url = f"{settings.output_path.rstrip('/')}/{folder.name}" if settings.output_path else ""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for part in ("train", "validation"):
        files = document_files(split_folder / part)
        stored = 2 * sum(path.stat().st_size for path in files)
        share = partial(_progress, progress, f"indexing {part}")
        index = executor.map(index_file, files, folder / "index" / part, threads=True, bytes=stored, progress=share)
        tasks = _plan(
            part, index, files, tokenizer, folder, settings, seed, f"{url}/{part}" if url and part == "train" else ""
        )
        if part == "train" and not tasks:
            raise UserError("there is no text to train on", where=str(split_folder / "train"))
        _remove_others(folder / part, {task.folder.name for task in tasks})
        share = partial(_progress, progress, f"tokenizing {part}")
        shards = executor.map(write_documents, tasks, folder / "shards" / part, bytes=stored, progress=share)
        found[part] = _finish(tasks, shards, tokenizer, settings)
    for part in ("train", "validation"):
        for stage in ("index", "shards"):
            clear_completions(folder / stage / part)
    for stage in ("index", "shards"):
        shutil.rmtree(folder / stage, ignore_errors=True)
    train, validation = found["train"], found["validation"]
    total = _total(train.values())
    slots = total["rows"] * settings.seq_len
    return {
        "train": total,
        "by_language": _by(train, "language"),
        "by_source": _by(train, "source"),
        "groups": {name: {key: of[key] for key in ("source", "language", *_COUNTS)} for name, of in train.items()},
        "validation": {name: {key: of[key] for key in _COUNTS} for name, of in validation.items()},
        "packing": settings.strategy,
        "padding": (slots - total["tokens"]) / slots,
        "cut": sum(of["cut"] for of in train.values()),
        "dtype": np.dtype(tokenizer.dtype).name,
        "context": settings.seq_len,
        "shards": sum(len(of["files"]) for of in train.values()),
        "url": url,
        "seconds": time.monotonic() - started,
    }


def _progress(progress: Callable[[str], None], what: str, share: float) -> None:
    progress(f"{what} {share:.0%}")


def index_file(path: Path) -> list[list[tuple[str, str, int, float]]]:
    """Return, of every row group of a file, its sources and languages with their documents and about their bytes."""
    found, metadata = [], pq.read_metadata(path)
    column = metadata.schema.names.index("text")
    for group in row_groups(path):
        names = _groups(group.read(["source", "language"]))
        share = metadata.row_group(group.index).column(column).total_uncompressed_size / group.rows
        found.append([(*name, len(rows), len(rows) * share) for name, rows in names])
    return found


def _groups(batch: pa.RecordBatch) -> list[tuple[tuple[str, str], np.ndarray]]:
    """The sources and languages of a batch, in order, and the rows of each."""
    names = list(zip(batch.column("source").to_pylist(), batch.column("language").to_pylist(), strict=True))
    found: dict[tuple[str, str], list[int]] = {}
    for row, (source, language) in enumerate(names):
        found.setdefault((source or "", language or UNDETERMINED), []).append(row)
    return [(name, np.array(rows)) for name, rows in found.items()]


def _plan(
    part: str,
    index: Sequence[Any],
    files: Sequence[Path],
    tokenizer: Tokenizer,
    folder: Path,
    settings: PackingSettings,
    seed: int,
    url: str,
) -> list[ShardTask]:
    """The shards of one part of the split: consecutive documents of about equal bytes."""
    pieces: dict[tuple[str, str], list[tuple[Path, int, int, float]]] = {}
    for path, row_groups_of in zip(files, index, strict=True):
        for number, groups in enumerate(row_groups_of):
            for source, language, documents, size in groups:
                pieces.setdefault((source, language), []).append((path, number, documents, size))
    totals = {name: sum(size for *_, size in of) for name, of in sorted(pieces.items())}
    wanted = _shares(list(totals.values()), settings.num_shards if part == "train" else 1)
    tasks = []
    for (name, total), share in zip(totals.items(), wanted, strict=True):
        documents = sum(documents for *_, documents, _ in pieces[name])
        count = min(max(share, math.ceil(total / SHARD_BYTES)), documents)
        group = group_name(*name)
        for shard, chosen in enumerate(_cut(pieces[name], count)):
            task = ShardTask(
                folder / part / group, *name, shard, count, chosen, tokenizer.folder, settings.seq_len,
                settings.strategy, seed, part == "validation", f"{url}/{group}" if url else "", sum(totals.values()),
            )  # fmt: skip
            tasks.append(task)
    return tasks


def _cut(pieces: Sequence[tuple[Path, int, int, float]], count: int) -> list[tuple[Piece, ...]]:
    """Cut documents in `count` runs of nearly equal bytes, none of them empty."""
    ends = np.cumsum([0, *(documents for _, _, documents, _ in pieces)])
    sizes = np.cumsum([0.0, *(size for *_, size in pieces)])
    at = np.arange(1, count)
    edges = np.interp(at * sizes[-1] / count, sizes, ends).round().astype(np.int64)
    edges = np.clip(np.maximum.accumulate(edges - at) + at, at, ends[-1] - count + at)
    runs = []
    for first, last in itertools.pairwise([0, *edges.tolist(), int(ends[-1])]):
        low, high = np.searchsorted(ends, [first, last - 1], side="right") - 1
        run = []
        for n in range(low, high + 1):
            start, end = int(ends[n]), int(ends[n + 1])
            run.append(Piece(pieces[n][0], pieces[n][1], max(first, start) - start, min(last, end) - start))
        runs.append(tuple(run))
    return runs


def _shares(sizes: Sequence[float], shards: int) -> list[int]:
    """`shards` divided over groups in proportion to their sizes, by largest remainder, at least one for each."""
    if not sizes:
        return []
    exact = np.array(sizes) * shards / max(sum(sizes), 1)
    counts = np.maximum(1, np.floor(exact).astype(int))
    for number in np.argsort(counts - exact, kind="stable")[: max(0, shards - counts.sum())]:
        counts[number] += 1
    return counts.tolist()


def _remove_others(folder: Path, names: set[str]) -> None:
    for stale in folder.glob("*"):
        if stale.name not in names:
            shutil.rmtree(stale)


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def write_documents(task: ShardTask) -> dict[str, Any]:
    """Write one shard; return what `write_shard` counts, its documents, bytes of text, and documents that were cut."""
    tokenizer = _loaded(task.tokenizer)
    documents = Documents(tokenizer.dtype)
    before, after = tokenizer.frame(task.language)
    counts: Counter[str] = Counter()
    for piece in task.pieces:
        batch = row_groups(piece.path)[piece.row_group].read(["id", "source", "language", "url", "text"])
        rows = dict(_groups(batch))[task.source, task.language][piece.first : piece.last]
        batch = batch.take(pa.array(rows))
        keys = document_keys(batch, task.seed, "rows").tolist()
        names = list(zip(batch.column("id").to_pylist(), batch.column("source").to_pylist(),
                         [url or "" for url in batch.column("url").to_pylist()], strict=True))  # fmt: skip
        texts = batch.column("text").to_pylist()
        for chosen in _slices(texts):
            flat, ends = tokenizer.encode_flat(texts[chosen], of=task.bytes)
            lengths = np.diff(ends, prepend=0)
            framed, text_at = _framed(flat, lengths, before, after)
            byte_lengths = None
            if task.held_out:
                byte_lengths = np.zeros(len(framed), BYTES)
                byte_lengths[text_at] = _byte_lengths(tokenizer, texts[chosen], flat, ends, first=bool(before))
            documents.add(
                framed, (lengths + len(before) + len(after)).tolist(), names[chosen], keys[chosen],
                byte_lengths=byte_lengths,
            )  # fmt: skip
            counts["bytes"] += sum(len(text.encode()) for text in texts[chosen])
    lengths = documents.shuffled_lengths
    if not task.held_out and task.strategy == "best_fit":
        layout = whole_where_they_fit(lengths, task.seq_len)
    else:
        layout = end_to_end(lengths, task.seq_len, int(task.held_out))
    pad = tokenizer.marks.pad
    found = write_shard(task.folder, task.shard, task.shards, documents, layout, task.seq_len, pad=pad, url=task.url)
    counts["cut"] = int(np.count_nonzero(layout.cut[lengths <= task.seq_len]))
    counts["tokens"] = int(lengths.sum())  # the token that a held-out row repeats counts once
    return found | {"documents": len(documents), **counts}


def _framed(
    flat: np.ndarray, lengths: np.ndarray, before: Sequence[int], after: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Documents end to end with ids put around each, and where the ids of their texts are in that."""
    frame = len(before) + len(after)
    starts = np.cumsum(lengths + frame) - lengths - frame
    framed = np.empty(len(flat) + frame * len(lengths), flat.dtype)
    for at, token in enumerate(before):
        framed[starts + at] = token
    for at, token in enumerate(after):
        framed[starts + len(before) + lengths + at] = token
    text_at = np.arange(len(flat)) + np.repeat(np.arange(len(lengths)) * frame + len(before), lengths)
    framed[text_at] = flat
    return framed, text_at


def _byte_lengths(
    tokenizer: Tokenizer, texts: Sequence[str], flat: np.ndarray, ends: np.ndarray, *, first: bool
) -> np.ndarray:
    """UTF-8 bytes of every token; not `first`: nothing comes before the first one of a text that could predict it."""
    found = []
    for text, ids in zip(texts, np.split(flat, ends[:-1]), strict=True):
        of_text = tokenizer.byte_lengths(text, ids)
        if not first:
            of_text = np.concatenate([np.zeros(min(1, len(of_text)), of_text.dtype), of_text[1:]])
        found.append(of_text)
    return np.concatenate(found)


def _slices(texts: Sequence[str]) -> list[slice]:
    """Slices of `texts` with a bounded number of characters in each."""
    found, start, size = [], 0, 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _BATCH or i + 1 == len(texts):
            found.append(slice(start, i + 1))
            start, size = i + 1, 0
    return found


def _finish(
    tasks: Sequence[ShardTask], shards: Sequence[dict[str, Any]], tokenizer: Tokenizer, settings: PackingSettings
) -> dict[str, dict[str, Any]]:
    """Write shards.json of every group; return what they hold by the groups' names."""
    groups: dict[str, list[tuple[ShardTask, dict[str, Any]]]] = {}
    for task, counted in zip(tasks, shards, strict=True):
        groups.setdefault(task.folder.name, []).append((task, counted))
    found = {}
    for name, members in groups.items():
        task = members[0][0]
        facts: dict[str, Any] = {"source": task.source, "language": task.language, "seq_len": settings.seq_len}
        facts |= {key: sum(counted[key] for _, counted in members) for key in (*_COUNTS, "cut")}
        facts |= {"overlap": int(task.held_out), "dtype": np.dtype(tokenizer.dtype).name, "url": task.url}
        facts["files"] = {name: file for _, counted in members for name, file in counted["files"].items()}
        found[name] = write_facts(task.folder, facts, tokenizer.marks)
    return found


def _total(groups: Any) -> dict[str, int]:
    counted = list(groups)
    return {key: sum(facts[key] for facts in counted) for key in _COUNTS}


def _by(groups: dict[str, dict[str, Any]], key: str) -> dict[str, dict[str, int]]:
    names = sorted({facts[key] for facts in groups.values()})
    return {name: _total(facts for facts in groups.values() if facts[key] == name) for name in names}

"""Documents to shards of packed tokens: `<s> text </s>` in a shuffled order, packed into rows of one length.

A shard is a task: it takes consecutive row groups of one source and language, encodes them, shuffles them by a hash of
their ids, packs them, and writes its files. So memory is that of a shard, and a run that was killed
resumes with the missing shards. A held-out row that continues a document begins with the last token of the row before
it, so that every token of the held-out text is predicted exactly once and bits per byte are exact.
"""

import itertools
import math
import shutil
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.cluster.executor import LOCAL, Executor
from affinage.config.data import PackingSettings, safe_name
from affinage.data.documents import document_files, read_documents
from affinage.data.order import document_keys
from affinage.data.token_shards import Document, finish_folder, write_shard
from affinage.data.tokenizer import Tokenizer, cached_tokenizer
from affinage.errors import UserError, UserWarned

UNDETERMINED = "und"  # ISO 639 for a language that is not known
SHARD_BYTES = 256_000_000  # of text: the most that a shard holds, whatever `packing.num_shards` says
_COUNTS = ("rows", "tokens", "documents", "bytes")
Name = tuple[str, str]  # a source and a language
RowGroup = tuple[Path, int]  # a file of documents, and a number


def group_name(source: str, language: str) -> str:
    """Return the name of the rows of a source in a language, as folder and in mixtures."""
    return f"{safe_name(source)}.{safe_name(language)}"


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    folder: Path  # of its source and language
    source: str
    language: str
    shard: int
    shards: int
    row_groups: tuple[RowGroup, ...]  # with documents of the source and language
    tokenizer: Path
    settings: PackingSettings
    held_out: bool
    url: str


def tokenize(
    split_folder: Path,
    tokenizer: Tokenizer,
    folder: Path,
    settings: PackingSettings,
    *,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Write `train/<source>.<language>/` and `validation/<source>.<language>/` folders of shards into `folder`.

    With `settings.output_path`, the tokens to train on go to `<path>/<name of folder>/train/...` instead.
    `folder` may hold what a killed call with the same arguments left: that is not written again.
    Returns counts of all and by group. Characters that the tokenizer cannot spell are counted as `unspelled`, with a
    warning. Raises UserError if there is no text to train on.
    """
    started = time.monotonic()
    url = f"{settings.output_path.rstrip('/')}/{folder.name}" if settings.output_path else ""
    tasks: list[ShardTask] = []
    stored = 0
    for part, count in (("train", settings.num_shards), ("validation", 1)):
        files = document_files(split_folder / part)
        size = 2 * sum(path.stat().st_size for path in files)
        index = itertools.chain.from_iterable(executor.map(index_file, files, threads=True, bytes=size))
        for name, shards in _plan(index, count).items():
            place = f"{part}/{group_name(*name)}"
            to = f"{url}/{place}" if url and part == "train" else ""
            for shard, row_groups in enumerate(shards):
                where = (folder / place, *name, shard, len(shards), row_groups)
                tasks.append(ShardTask(*where, tokenizer.folder, settings, part == "validation", to))
        if not tasks:
            raise UserError("there is no text to train on", where=str(split_folder / "train"))
        stored += size
    written = executor.map(write_documents, tasks, folder / "shards", bytes=stored, label="tokenizing")
    groups: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    unspelled = 0
    for place, members in itertools.groupby(zip(tasks, written, strict=True), lambda member: member[0].folder):
        (task, *_), counts = zip(*members, strict=True)
        facts = {"source": task.source, "language": task.language, "overlap": int(task.held_out), "url": task.url}
        facts |= {"seq_len": settings.seq_len, "dtype": np.dtype(tokenizer.dtype).name}
        facts = finish_folder(place, counts, tokenizer.marks, **facts)
        groups[place.parent.name][place.name] = {count: facts[count] for count in _COUNTS}
        unspelled += facts["unspelled"]
    shutil.rmtree(folder / "shards")
    if unspelled:
        what = f"the tokenizer cannot spell {unspelled:,} characters of the text: the model will not learn them"
        warnings.warn(what, UserWarned, stacklevel=2)
    return {
        "train": sum(map(Counter, groups["train"].values()), Counter()),
        "groups": groups["train"],
        "validation": groups["validation"],
        "unspelled": unspelled,
        "context": settings.seq_len,
        "seconds": time.monotonic() - started,
    }


# ---- planning ----


def index_file(path: Path) -> list[tuple[Name, RowGroup, float]]:
    """Return each source and language of each row group of a file, with about the bytes of their texts there."""
    index, metadata = [], pq.read_metadata(path)
    column = metadata.schema.names.index("text")
    for number, batch in enumerate(read_documents(path, ["source", "language"])):
        share = metadata.row_group(number).column(column).total_uncompressed_size / batch.num_rows
        index += [(name, (path, number), count * share) for name, count in Counter(_names(batch)).items()]
    return index


def _names(batch: pa.RecordBatch) -> list[Name]:
    """Return the source and language of each row of a batch."""
    pairs = zip(batch.column("source").to_pylist(), batch.column("language").to_pylist(), strict=True)
    return [(source or "", language or UNDETERMINED) for source, language in pairs]


def _plan(index: Iterable[tuple[Name, RowGroup, float]], shards: int) -> dict[Name, list[tuple[RowGroup, ...]]]:
    """Return of every source and language its shards, row groups of about equal bytes in sequence.

    The number of shards is divided in proportion to bytes, by largest remainder, with at least one for each.
    """
    members: dict[Name, list[tuple[RowGroup, float]]] = defaultdict(list)
    for name, row_group, size in index:
        members[name].append((row_group, size))
    sizes = {name: sum(size for _, size in members[name]) for name in sorted(members)}
    exact = np.array([*sizes.values()]) * shards / max(sum(sizes.values()), 1)
    counts = np.maximum(1, np.floor(exact).astype(int))
    counts[np.argsort(counts - exact, kind="stable")[: max(0, shards - counts.sum())]] += 1
    plan = {}
    for (name, size), share in zip(sizes.items(), counts.tolist(), strict=True):
        count = max(share, math.ceil(size / SHARD_BYTES))
        row_groups, parts = zip(*members[name], strict=True)
        middles = np.cumsum(parts) - np.array(parts) / 2
        runs = itertools.groupby(zip((middles * count // max(size, 1.0)).tolist(), row_groups), lambda each: each[0])
        plan[name] = [tuple(row_group for _, row_group in run) for _, run in runs]
    return plan


# ---- a shard ----


def write_documents(task: ShardTask) -> dict[str, Any]:
    """Write one shard; return what `write_shard` counts, its documents and bytes of text, and unspelled characters."""
    tokenizer = cached_tokenizer(task.tokenizer)
    before, after = (np.array(ids, tokenizer.dtype) for ids in tokenizer.frame(task.language))
    documents: list[Document] = []
    size = unspelled = 0
    for path, number in task.row_groups:
        (batch,) = read_documents(path, ["id", "source", "language", "url", "text"], [number])
        batch = batch.filter(pa.array([name == (task.source, task.language) for name in _names(batch)]))
        columns = [batch.column(name).to_pylist() for name in ("id", "source", "url", "text")]
        keys = document_keys(batch, "rows").tolist()
        rows = zip(*columns, keys, tokenizer.encode_batch(columns[-1]), strict=True)
        for id, source, url, text, key, ids in rows:
            lengths = None
            if task.held_out:
                of_text = tokenizer.byte_lengths(text, ids)
                if not len(before):  # nothing comes before the first token that could predict it
                    of_text[:1] = 0
                lengths = np.pad(of_text.astype(np.uint32), (len(before), len(after)))
            documents.append(Document(id, source, url or "", key, np.concatenate([before, ids, after]), lengths))
            size += len(text.encode())
            unspelled += tokenizer.unspelled(text)
    strategy, seq_len = "concat" if task.held_out else task.settings.strategy, task.settings.seq_len
    how: dict[str, Any] = {"pad": tokenizer.marks.pad, "strategy": strategy, "overlap": int(task.held_out)}
    counts = write_shard(task.folder, task.shard, task.shards, documents, seq_len, url=task.url, **how)
    return counts | {"documents": len(documents), "bytes": size, "unspelled": unspelled}

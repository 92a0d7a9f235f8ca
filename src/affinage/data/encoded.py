"""Documents as tokens on disk, one scratch folder for each file of documents: the unit that a killed run keeps."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.documents import row_groups
from affinage.data.order import document_keys
from affinage.data.row_files import file_safe
from affinage.data.spool import EXTRA, Stream, mapped
from affinage.data.tokenizer import Tokenizer

UNDETERMINED = "und"  # ISO 639 for a language that is not known
_TEXT_PER_BATCH = 4_000_000  # characters encoded at once
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "source", "url")]
    + [("key", pa.uint64()), ("length", pa.int64()), ("bytes", pa.int64())]
)


@dataclass(frozen=True)
class EncodeTask:
    """One file of documents to encode."""

    path: Path
    tokenizer: Path  # folder
    folder: Path  # gets a folder with the file's name
    seed: int
    byte_lengths: bool  # also write the UTF-8 bytes of every token


def encode_file(task: EncodeTask) -> None:
    """Write the tokens of a file of documents, `<s> text </s>` each, by group; nothing if that has been done.

    A group is `<source>.<language>`: `<group>.tokens`, `<group>.extra` (with `byte_lengths`, uint32) and
    `<group>.parquet` with id, source, url, key (of the shuffled order), length in tokens and bytes of each document.
    """
    done = task.folder / task.path.stem
    if done.is_dir():
        return
    partial = task.folder / f"{task.path.stem}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = _loaded(task.tokenizer)
    groups: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        files: dict[str, _GroupFiles] = {}
        for group in row_groups(task.path):
            for name, facts, documents in _encoded(group.read(), tokenizer, task):
                if name not in files:
                    groups[name] = facts
                    files[name] = stack.enter_context(_GroupFiles(partial / name, task.byte_lengths))
                files[name].append(**documents)
    (partial / "groups.json").write_text(json.dumps(groups), encoding="utf-8")
    os.replace(partial, done)


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def _encoded(
    batch: pa.RecordBatch, tokenizer: Tokenizer, task: EncodeTask
) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """The documents of a batch: group, its source and language, and the arguments of `_GroupFiles.append`."""
    keys = document_keys(batch, task.seed, "rows").tolist()
    columns = [batch.column(name).to_pylist() for name in ("id", "source", "language", "url", "text")]
    for chosen in _slices(columns[4]):
        ids, sources, languages, urls, texts = (column[chosen] for column in columns)
        flat, ends = tokenizer.encode_flat(texts)
        start = 0
        for i, end in enumerate(ends.tolist()):
            source, language = sources[i] or "", languages[i] or UNDETERMINED
            before, after = tokenizer.frame(language)
            tokens = np.concatenate([np.array(before, np.int64), flat[start:end], after]).astype(tokenizer.dtype)
            extra = None
            if task.byte_lengths:
                of_text = tokenizer.byte_lengths(texts[i], flat[start:end])
                if not before:
                    of_text[:1] = 0  # there is nothing that the first token could be predicted from
                extra = np.pad(of_text, (len(before), len(after))).astype(EXTRA)
            line = (ids[i], source, urls[i] or "", keys[chosen.start + i], len(tokens), len(texts[i].encode()))
            facts = {"source": source, "language": language}
            yield group_name(source, language), facts, {"tokens": tokens, "extra": extra, "line": line}
            start = end


def group_name(source: str, language: str) -> str:
    """How the rows of a source in a language are called, as folder and in mixtures."""
    return f"{file_safe(source)}.{file_safe(language)}"


def _slices(texts: Sequence[str]) -> Iterator[slice]:
    """Slices of `texts` with a bounded number of characters in each."""
    start = size = 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _TEXT_PER_BATCH or i + 1 == len(texts):
            yield slice(start, i + 1)
            start, size = i + 1, 0


class _GroupFiles:
    """The scratch files of one group and one file of documents."""

    def __init__(self, path: Path, byte_lengths: bool) -> None:
        self._path, self._byte_lengths = path, byte_lengths
        self._lines: list[tuple[Any, ...]] = []

    def __enter__(self) -> "_GroupFiles":
        self._tokens = open(f"{self._path}.tokens", "wb")
        self._extra = open(f"{self._path}.extra", "wb") if self._byte_lengths else None
        return self

    def append(self, tokens: np.ndarray, extra: np.ndarray | None, line: tuple[Any, ...]) -> None:
        self._tokens.write(tokens.data.cast("B"))
        if self._extra is not None and extra is not None:
            self._extra.write(extra.data)
        self._lines.append(line)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        for file in (self._tokens, self._extra):
            if file is not None:
                file.close()
        if kind is None:
            table = pa.table(list(zip(*self._lines)), schema=_SCHEMA)
            pq.write_table(table, f"{self._path}.parquet", compression="zstd")


def encoded_groups(folders: Sequence[Path]) -> dict[str, dict[str, str]]:
    """The groups that encoded files have between them, by name, and the source and language of each."""
    found: dict[str, dict[str, str]] = {}
    for folder in folders:
        found |= json.loads((folder / "groups.json").read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def group_tokens(folders: Sequence[Path], group: str) -> int:
    """Tokens of a group in all encoded files."""
    paths = _parts(folders, group)
    return sum(int(pq.read_table(path, columns=["length"])["length"].to_numpy().sum()) for path in paths)


def _parts(folders: Sequence[Path], group: str) -> list[Path]:
    return [folder / f"{group}.parquet" for folder in folders if (folder / f"{group}.parquet").is_file()]


def read_group(folders: Sequence[Path], group: str, dtype: type[np.generic]) -> tuple[Stream, int]:
    """A group's documents from all encoded files in the order of their keys, and the UTF-8 bytes of their text."""
    here = _parts(folders, group)
    tables = [pq.read_table(path) for path in here]
    table = pa.concat_tables(tables)
    lengths, keys = (table.column(name).to_numpy() for name in ("length", "key"))
    files = np.repeat(np.arange(len(tables), dtype=np.int32), [len(each) for each in tables])
    per_file = [each.column("length").to_numpy() for each in tables]
    sources = np.concatenate([np.cumsum(each) - each for each in per_file])
    order = np.argsort(keys, kind="stable")
    extra = [path.with_name(f"{group}.extra") for path in here]
    stream = Stream(
        tokens=tuple(mapped(path.with_name(f"{group}.tokens"), dtype) for path in here),
        extra=tuple(mapped(path, EXTRA) for path in extra if path.is_file()),
        files=files[order],
        sources=sources[order],
        keys=keys[order],
        starts=np.concatenate([[0], np.cumsum(lengths[order])]),
        names=table.select(["id", "source", "url"]).take(pa.array(order)),
        begins=np.ones(len(order), bool),
    )
    return stream, int(table.column("bytes").to_numpy().sum())

"""Items of benchmarks as decontamination searches for them: their names, and their texts."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.foreign_json import of_a_line
from affinage.errors import UserError
from affinage.paths import from_home

_BLANK = re.compile(r"(?<!\w)_+(?!\w)")  # that a choice fills
_MOST_JOINED = 12  # short texts of an item


@dataclass(frozen=True)
class BenchmarkItem:
    """One question of a benchmark. Each of its texts is searched for by itself."""

    benchmark: str
    id: str
    texts: tuple[str, ...]


def search_texts(item: BenchmarkItem, min_words: int) -> list[tuple[str, bool]]:
    """What is searched for of an item: (text, whether it may stand in natural text).

    Those are its texts; sentences with a blank (`_`), filled with each of the item's short texts, for they are
    published whole; and short texts joined, for a question and its answer may follow each other. A text of other ones
    with few words between is a prompt of the harness: `Answer:` stands there in no natural text.
    """
    texts = list(dict.fromkeys(text for text in item.texts if text.strip()))
    short = [text for text in texts if len(text.split()) < min_words][:_MOST_JOINED]
    filled = [other.join(_BLANK.split(text)) for text in texts if _BLANK.search(text) for other in short]
    joined = [f"{one} {other}" for one in short for other in short if one != other]
    found = [(text, not _BLANK.search(text) and not _is_prompt(text, texts, min_words)) for text in texts]
    return [*found, *((text, True) for text in [*filled, *joined] if len(text.split()) >= min_words)]


def _is_prompt(text: str, texts: Sequence[str], min_words: int) -> bool:
    rest = text
    for other in sorted(texts, key=len, reverse=True):
        if other != text and len(other.split()) > 2:
            rest = rest.replace(other, " ")
    return rest != text and len(rest.split()) < min_words


def read_items(path: str) -> Iterator[BenchmarkItem]:
    """The items in a file of the user's: every string of a JSONL line or a Parquet row, or every line of a text file.

    The benchmark has the file's name; an item has the `id` of its line or row, or else its number from 1. Files may be
    compressed (.gz, .bz2, .zst) and anywhere that fsspec reads. Raises UserError for what cannot be read.
    """
    name, number = path.rstrip("/").rsplit("/", 1)[-1], 0
    values = _values(path if "://" in path else str(from_home(path)), kind_of_items(path))
    try:
        for number, value in enumerate(values, 1):
            id = value.get("id") if isinstance(value, dict) else None
            yield BenchmarkItem(name, str(number if id is None else id), tuple(strings_in(value)))
    except (OSError, EOFError, ValueError, pa.ArrowException) as error:
        where = f"data.decontaminate.benchmark_files, {path}" + (f" after item {number}" if number else "")
        raise UserError(f"the benchmark's items cannot be read: {of_a_line(error)}", where=where) from error


def _values(path: str, kind: str) -> Iterator[Any]:
    with fsspec.open(path, "rb", compression=None if kind == "parquet" else "infer") as file:
        if kind == "parquet":
            for batch in pq.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
            return
        for line in file:
            if text := line.decode("utf-8-sig").strip():
                yield json.loads(text) if kind == "jsonl" else text


def kind_of_items(path: str, where: str = "data.decontaminate.benchmark_files") -> str:
    """What a file of items is by its name: jsonl, parquet or txt. Raises UserError for any other."""
    kind = re.search(r"\.(jsonl|parquet|txt)(\.(gz|bz2|zst))?/?$", path, re.IGNORECASE)
    if kind is None:
        fix = "Items are read from .jsonl, .parquet and .txt files, and from .yaml task files."
        raise UserError(f"`{path}` is no file of benchmark items", where=where, fix=fix)
    return kind[1].lower()


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, wherever they are; of an object the values, not the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings_in(one)

"""Items of benchmarks in text: step `decontaminate` removes the documents that hold one; a finished model's are named.

A match is a run of `n_grams` words of an item, or a shorter item whole (see `overlap`). Runs that more than
`BOILERPLATE` items of a benchmark, or texts, have in common are no match.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.config.data import DecontaminateSettings
from affinage.data.documents import (
    SAMPLE_CHARACTERS,
    Stats,
    Verdicts,
    copy_documents,
    document_files,
    read_documents,
)
from affinage.data.executor import LOCAL, Executor
from affinage.data.json_files import write_json
from affinage.data.overlap import KEY, START, STOP, TEXT, BenchmarkItem, ItemIndex, normalized
from affinage.data.token_shards import find_shard_folders, open_shards
from affinage.data.tokenizer import Tokenizer

MATCHES = "matches.parquet"
# `text` is the first run in common, as the document has it; `words` counts what white space separates in it.
_TEXTS = ("document", "source", "url", "benchmark", "item", "text")
_MATCH = pa.schema([*((name, pa.string()) for name in _TEXTS), ("words", pa.int64())])
EXAMPLES = 20  # matches in the summary
_TOKENS = 4_000_000  # read at once


def decontaminate(
    documents_folder: Path,
    folder: Path,
    settings: DecontaminateSettings,
    items: Iterable[BenchmarkItem],
    *,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Copy the documents that hold no item to `folder`, write `matches.parquet`, and return the summary.

    Removed documents count as `in a benchmark`. The summary has `benchmarks` (items, those too short to be found, those
    found, the documents they are in, and those that are `common`: copied to more than `BOILERPLATE` documents, which
    stay) and `matches` (the first). An interrupted call resumes with the missing files.
    """
    index, paths = ItemIndex(items, settings.n_grams), document_files(documents_folder)
    scanned = executor.map(partial(_scan, index), paths, folder / "scans", threads=True, label="scanning")
    hits = [np.array(rows, np.int64).reshape(-1, 4) for rows in scanned]
    common = np.sum([index.texts_with(rows) for rows in hits], axis=0, initial=0) > index.boilerplate

    def copy(task: tuple[Path, np.ndarray]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Copy a file without the documents that have hits; return the statistics and all matches."""
        (path, hits), matches = task, []
        hits = hits[~common[hits[:, KEY]]]

        def items_in(batch: pa.RecordBatch, before: int) -> Verdicts:
            verdicts = {}
            own = hits[slice(*np.searchsorted(hits[:, TEXT], [before, before + batch.num_rows]))]
            for text in np.unique(own[:, TEXT]).tolist():
                found = _matches(batch.slice(text - before, 1).to_pylist()[0], own[own[:, TEXT] == text], index)
                matches.extend(found)
                best = max(found, key=lambda match: int(match["words"]))
                detail = f"{best['benchmark']} {best['item']}: {best['text'][:SAMPLE_CHARACTERS]}"
                verdicts[text - before] = "in a benchmark", detail
            return verdicts

        return copy_documents(path, documents_folder, folder, items_in), matches

    copies = executor.map(copy, list(zip(paths, hits)), folder / "copies", threads=True, label="copying")
    total = Stats.total(stats for stats, _ in copies)
    matches = [match for _, own in copies for match in own]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(matches, _MATCH), folder / MATCHES, compression="zstd")
    for stage in ("scans", "copies"):
        shutil.rmtree(folder / stage, ignore_errors=True)
    found = {(match["benchmark"], match["item"]) for match in matches}
    documents = {(match["benchmark"], match["source"], match["document"]) for match in matches}
    numbers = {
        "items": Counter(item.benchmark for item in index.items),
        "too_short": index.too_short,
        "found": Counter(name for name, _ in found),
        "documents": Counter(name for name, *_ in documents),
        "common": Counter(name for name, _ in index.items_with(common) - found),
    }
    benchmarks = {name: {what: counts[name] for what, counts in numbers.items()} for name in numbers["items"]}
    return total.summary() | {"benchmarks": benchmarks, "matches": matches[:EXAMPLES]}


def _scan(index: ItemIndex, path: Path) -> list[list[int]]:
    """The hits in a file, in which its documents are counted."""
    found, documents = [], 0
    for batch in read_documents(path, ["text"]):
        hits = index.scan(batch.column("text"))
        hits[:, TEXT] += documents
        found += hits.tolist()
        documents += batch.num_rows
    return found


def _matches(document: dict[str, str], hits: np.ndarray, index: ItemIndex) -> list[dict[str, Any]]:
    """One match for every item that is in a document: the first stretch that the item's runs cover."""
    stretches: dict[int, list[int]] = {}
    for key, start, stop in hits[:, [KEY, START, STOP]].tolist():
        for number in index.of(key):
            stretch = stretches.setdefault(number, [start, stop])
            if start <= stretch[1]:
                stretch[1] = max(stop, stretch[1])
    names, matches = {"document": document["id"], "source": document["source"], "url": document["url"]}, []
    for number, (start, stop) in sorted(stretches.items()):
        item, text = index.items[number], document["text"].encode()[start:stop].decode()
        words = len(text.split())
        matches.append(names | {"benchmark": item.benchmark, "item": item.id, "words": words, "text": text})
    return matches


# ---- tuning data ----


def write_items(path: Path, items: Iterable[BenchmarkItem], settings: DecontaminateSettings) -> Path:
    """Write items to a file, for tasks that call `contaminated`; returns the path."""
    write_json(path, {"n_grams": settings.n_grams, "items": list(items)})
    return path


@lru_cache(maxsize=1)
def _index_of(path: Path) -> ItemIndex:
    content = json.loads(path.read_text("utf-8"))
    return ItemIndex((BenchmarkItem(*item) for item in content["items"]), content["n_grams"])


def contaminated(texts: Sequence[str], items: Path) -> set[int]:
    """Which of some texts, such as whole conversations, hold an item in a file that `write_items` has written."""
    index = _index_of(items)
    hits = index.scan(normalized(texts))
    rare = index.texts_with(hits) <= index.boilerplate
    return set(hits[rare[hits[:, KEY]], TEXT].tolist())


# ---- after the fact: the text that a model was trained on ----


class Contamination(NamedTuple):
    """Which items of benchmarks, as (benchmark, item), stand in the text that a model was trained on."""

    benchmarks: frozenset[str]  # whose items were searched for
    texts: int  # that were searched
    found: frozenset[tuple[str, str]]
    # Items of which only runs in more than `BOILERPLATE` texts were found: copied that often, or an idiom.
    common: frozenset[tuple[str, str]] = frozenset()
    n_grams: int = DecontaminateSettings().n_grams  # words in a row that were searched for


def count_occurrences(texts: Iterable[pa.Array], index: ItemIndex) -> tuple[int, np.ndarray]:
    """How many texts there are, given as pyarrow string arrays in normal form C, and in how many each run is."""
    with_run, count = np.zeros(index.keys.size, np.int64), 0
    for column in texts:
        with_run += index.texts_with(index.scan(column))
        count += len(column)
    return count, with_run


def contamination(index: ItemIndex, searches: Sequence[tuple[int, np.ndarray]]) -> Contamination:
    """The items that stand in texts, of which `searches` are the counts."""
    texts_with = sum((with_run for _, with_run in searches), np.zeros(index.keys.size, np.int64))
    few = texts_with <= index.boilerplate
    found, common = index.items_with((texts_with > 0) & few), index.items_with(~few)
    names, texts = frozenset(item.benchmark for item in index.items), sum(count for count, _ in searches)
    return Contamination(names, texts, found, common - found, index.n_grams)


def texts_of_rows(folder: Path, tokenizer: Tokenizer) -> Iterator[pa.Array]:
    """The texts in rows of tokens, without control tokens; a text that goes on in the next row is one."""
    for shards in find_shard_folders(folder).values():
        files = open_shards(shards)
        border = files.marks.end if files.marks.begin is None else files.marks.begin
        height, rest = max(1, _TOKENS // files.seq_len), np.zeros(0, np.int64)
        for start in range(0, files.rows, height):
            tokens = files.read(np.arange(start, min(start + height, files.rows)))[0].reshape(-1)
            tokens = np.append(rest, tokens[(tokens != files.marks.pad) | (tokens == border)])
            *texts, rest = np.split(tokens, np.flatnonzero(tokens == border))  # the last one may go on
            if start + height >= files.rows:
                texts.append(rest)
            yield normalized([tokenizer.decode(text.tolist()) for text in texts if text.size])

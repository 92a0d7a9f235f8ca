"""Step `decontaminate`: documents that hold an item of a benchmark are removed."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from affinage.config.data import DecontaminateSettings
from affinage.data.atomic import write_json
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.documents import clear_documents, document_files, row_groups, write_table
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.overlap import KEY, START, STOP, TEXT, ItemIndex, normalized
from affinage.data.stats import SAMPLE_CHARACTERS, Stats, copy_documents

MATCHES = "matches.parquet"
_MATCH = pa.schema(
    [
        ("document", pa.string()),
        ("source", pa.string()),
        ("url", pa.string()),
        ("benchmark", pa.string()),
        ("item", pa.string()),
        ("words", pa.int64()),  # of the longest run in common, as white space separates them
        ("text", pa.string()),  # that run, as the document has it
    ]
)
EXAMPLES = 20  # matches in the summary


def decontaminate(
    documents_folder: Path,
    folder: Path,
    settings: DecontaminateSettings,
    items: Iterable[BenchmarkItem],
    *,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Copy the documents that hold no item to `folder`, write `matches.parquet`, and return the summary.

    A match is a run of `settings.n_grams` words of an item, or a shorter item whole (see `overlap`). Runs that more
    than `settings.boilerplate` items of a benchmark, or documents, have in common are no match. Removed documents count
    as `in a benchmark`. The summary has `benchmarks` (items, those too short to be found, those found, the documents
    they are in, and those that are `common`: copied to more than `boilerplate` documents, which stay), `matches` (the
    first), and `boilerplate` (runs left out). An interrupted call resumes with the files that were not scanned yet.
    """
    start, folder = time.perf_counter(), Path(folder)
    clear_documents(folder)
    index, paths = ItemIndex(items, settings), document_files(documents_folder)
    scanned = executor.map(partial(_scan, index), paths, folder, threads=True, progress=progress)
    hits = [np.array(rows, np.int64).reshape(-1, 4) for rows in scanned]
    common = np.sum([index.texts_with(rows) for rows in hits], axis=0, initial=0) > settings.boilerplate

    def copy(task: tuple[Path, np.ndarray]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        path, own = task
        place = folder / path.parent.relative_to(documents_folder)
        return _copy(path, own[~common[own[:, KEY]]], place, index)

    total, matches = Stats(), []
    for stats, own_matches in executor.map(copy, list(zip(paths, hits)), threads=True):
        total.merge(stats)
        matches += own_matches
    write_table(folder / MATCHES, pa.Table.from_pylist(matches, _MATCH))
    clear_completions(folder)
    return total.summary(time.perf_counter() - start) | {
        "benchmarks": _by_benchmark(index, matches, common),
        "matches": matches[:EXAMPLES],
        "boilerplate": {"in_items": index.common_runs, "in_documents": int(common.sum())},
    }


def _scan(index: ItemIndex, path: Path) -> list[list[int]]:
    """The hits in a file, in which its documents are counted."""
    found, documents = [], 0
    for group in row_groups(path):
        hits = index.scan(group.read(["text"]).column("text"))
        hits[:, TEXT] += documents
        found += hits.tolist()
        documents += group.rows
    return found


def _copy(path: Path, hits: np.ndarray, folder: Path, index: ItemIndex) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Copy a file without the documents that have hits; return the statistics and all matches."""
    stats, matches = Stats(), []

    def without_items(batch: pa.RecordBatch, before: int) -> pa.RecordBatch:
        verdicts = {}
        own = hits[slice(*np.searchsorted(hits[:, TEXT], [before, before + batch.num_rows]))]
        for text in np.unique(own[:, TEXT]).tolist():
            document = batch.slice(text - before, 1).to_pylist()[0]
            found = list(_matches(document, own[own[:, TEXT] == text], index))
            matches.extend(found)
            best = max(found, key=lambda match: int(match["words"]))
            detail = f"{best['benchmark']} {best['item']}: {best['text'][:SAMPLE_CHARACTERS]}"
            verdicts[text - before] = "in a benchmark", detail
        return stats.remove_rows(batch, verdicts)

    copy_documents(path, folder, stats, without_items)
    return stats.to_json(), matches


def _matches(document: dict[str, str], hits: np.ndarray, index: ItemIndex) -> Iterator[dict[str, Any]]:
    """One match for every item that is in a document: the longest of the stretches that the item's runs cover."""
    stretches: dict[int, list[list[int]]] = {}
    for key, start, stop in hits[:, [KEY, START, STOP]].tolist():
        for item in index.of(key):
            own = stretches.setdefault(item, [])
            if own and start <= own[-1][1]:
                own[-1][1] = max(stop, own[-1][1])
            else:
                own.append([start, stop])
    content = document["text"].encode()
    for item, own in sorted(stretches.items()):
        texts = [content[start:stop].decode() for start, stop in own]
        words, longest = max((len(text.split()), text) for text in texts)
        yield {name: document[name] for name in ("source", "url")} | {
            "document": document["id"],
            "benchmark": index.items[item].benchmark,
            "item": index.items[item].id,
            "words": words,
            "text": longest,
        }


def _by_benchmark(index: ItemIndex, matches: Sequence[dict[str, Any]], common: np.ndarray) -> dict[str, dict[str, int]]:
    found = {(match["benchmark"], match["item"]) for match in matches}
    documents = {(match["benchmark"], match["source"], match["document"]) for match in matches}
    numbers = {
        "items": Counter(item.benchmark for item in index.items),
        "too_short": index.too_short,
        "found": Counter(name for name, _ in found),
        "documents": Counter(name for name, *_ in documents),
        "common": Counter(name for name, _ in index.items_with(common) - found),
    }
    return {name: {what: counts[name] for what, counts in numbers.items()} for name in numbers["items"]}


# ---- tuning data ----


@dataclass(frozen=True)
class Searched:
    """The items of benchmarks in a file, and how texts are searched for them: small enough to travel with a task."""

    items: Path
    settings: DecontaminateSettings


def write_items(path: Path, items: Iterable[BenchmarkItem], settings: DecontaminateSettings) -> Searched:
    """Write items to a file, for tasks that call `contaminated`."""
    write_json(path, [[item.benchmark, item.id, item.texts] for item in items])
    return Searched(path, settings)


@lru_cache(maxsize=1)
def _index_of(searched: Searched) -> ItemIndex:
    items = json.loads(searched.items.read_text("utf-8"))
    return ItemIndex([BenchmarkItem(name, id, tuple(texts)) for name, id, texts in items], searched.settings)


def contaminated(texts: Sequence[str], searched: Searched) -> dict[int, str]:
    """Which of some texts, such as whole conversations, hold an item: {place: "BENCHMARK ITEM: the words in common"}.

    A match is what `decontaminate` calls one.
    """
    index, column = _index_of(searched), normalized(texts)
    hits = index.scan(column)
    rare = index.texts_with(hits) <= searched.settings.boilerplate
    found: dict[int, str] = {}
    for text, key, start, stop in hits[rare[hits[:, KEY]]].tolist():
        item = index.items[index.of(key)[0]]
        words = column[text].as_py().encode()[start:stop].decode()
        found.setdefault(text, f"{item.benchmark} {item.id}: {words[:SAMPLE_CHARACTERS]}")
    return found

"""Stage `decontaminate`: documents that hold an item of a benchmark are removed, or the item is cut out of them."""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.config.data import DecontaminateSettings
from affinage.data.atomic import write_json
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.foreign_json import encodable
from affinage.data.overlap import Hits, Items, Scanner, index_items
from affinage.data.repair import repair
from affinage.data.stats import SAMPLE_CHARACTERS, Stats

CONTAMINATED = "in a benchmark"  # the reason in the stats
MATCHES = "matches.parquet"
MATCH_SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("source", pa.string()),
        ("url", pa.string()),
        ("benchmark", pa.string()),
        ("item", pa.string()),
        ("words", pa.int64()),  # of the longest run in common
        ("text", pa.string()),  # that run, as the document has it
    ]
)
MARGIN = 200  # characters that go with a match on both sides, and the fewest that a piece between matches has to stay
MAX_PIECES = 10  # a document that falls into more is removed
EXAMPLES = 20  # matches in the summary


@dataclass
class _Found:
    """What one file of documents has in common with the items. Rows count from the start of the file."""

    hits: Hits
    documents: int


@dataclass
class _Cut:
    stats: Stats = field(default_factory=Stats)
    matches: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0  # documents that stayed without some of their text


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
    as `in a benchmark`; with `action: cut` the matches and 200 characters on both sides are cut out instead, and only
    a document that falls into more than 10 pieces, or of which no piece of 200 characters is left, is removed (Brown et
    al. 2020, appendix C). The summary has `benchmarks` (items, those too short to be told, those found, the documents
    they are in, and those that are `common`: copied to more than `boilerplate` documents, which stay), `matches` (the
    first), `boilerplate` (runs left out) and `cut`.

    An interrupted call resumes with the files that were not scanned yet.
    """
    start = time.perf_counter()
    folder = Path(folder)
    clear_documents(folder)
    index = index_items(items, ngram=settings.n_grams, min_words=settings.min_words, boilerplate=settings.boilerplate)
    scanner = Scanner(index)
    paths = document_files(documents_folder)

    def scan(path: Path) -> dict[str, Any]:
        return _scan_file(path, scanner)

    scanned = executor.map(scan, paths, folder, threads=True, progress=progress)
    found = [_Found(Hits(*np.array(one["hits"], np.int64).reshape(5, -1)), one["documents"]) for one in scanned]
    common = _in_many_documents(found, index, settings.boilerplate)
    work = [(path, _without(one.hits, common)) for path, one in zip(paths, found)]

    def cut(task: tuple[Path, Hits]) -> _Cut:
        place = folder / task[0].parent.relative_to(documents_folder)
        return _copy(*task, place, index, cut=settings.action == "cut")

    total = _Cut()
    for part in executor.map(cut, work, threads=True):
        total.stats.merge(part.stats)
        total.matches += part.matches
        total.cut += part.cut
    _write_matches(folder, total.matches)
    clear_completions(folder)
    return total.stats.summary(time.perf_counter() - start) | {
        "benchmarks": _by_benchmark(index, total.matches, common),
        "matches": total.matches[:EXAMPLES],
        "boilerplate": {"in_items": index.boilerplate, "in_documents": int(common.sum())},
        "cut": total.cut,
    }


def _scan_file(path: Path, scanner: Scanner) -> dict[str, Any]:
    columns, rows = [], 0
    for group in row_groups(path):
        hits = scanner.scan(group.read(["text"]).column("text"))
        columns.append(np.stack([hits.text + rows, hits.key, hits.word, hits.start, hits.stop]))
        rows += group.rows
    hits_of_file = np.concatenate([np.empty((5, 0), np.int64), *columns], axis=1)
    return {"hits": hits_of_file.tolist(), "documents": rows}


def _in_many_documents(found: Sequence[_Found], index: Items, most: int) -> np.ndarray:
    """Which runs are in more than `most` documents, bool [K]."""
    counts = np.zeros(index.keys.size, np.int64)
    for one in found:
        pairs = np.unique(np.stack([one.hits.text, one.hits.key]), axis=1)
        counts += np.bincount(pairs[1], minlength=counts.size)
    many: np.ndarray = counts > most
    return many


def _without(hits: Hits, common: np.ndarray) -> Hits:
    stays = ~common[hits.key] if common.size else np.zeros(0, bool)
    return Hits(*(column[stays] for column in vars(hits).values()))


def _copy(path: Path, hits: Hits, folder: Path, index: Items, *, cut: bool) -> _Cut:
    result = _Cut()
    at = 0
    clear_documents(folder, path.stem)
    with DocumentWriter(folder, path.stem, observe=result.stats.leave) as writer:
        for group in row_groups(path):
            batch = group.read()
            result.stats.enter(batch.num_rows, text_bytes(batch))
            first, last = np.searchsorted(hits.text, [at, at + group.rows])
            writer.write(
                _clean_batch(batch, Hits(*(c[first:last] for c in vars(hits).values())), at, index, result, cut)
            )
            at += group.rows
    return result


def _clean_batch(batch: pa.RecordBatch, hits: Hits, at: int, index: Items, result: _Cut, cut: bool) -> pa.RecordBatch:
    """The batch without its contaminated documents, or without what they share with the items."""
    stays = np.ones(batch.num_rows, bool)
    changed: dict[int, str] = {}
    for text in np.unique(hits.text).tolist():
        row = text - at
        document = {name: batch.column(name)[row].as_py() for name in batch.schema.names}
        mine = Hits(*(column[hits.text == text] for column in vars(hits).values()))
        matches = list(_matches(document, mine, index))
        result.matches += matches
        left = _cut_out(document["text"], mine) if cut else ""
        if left:
            changed[row] = left
            result.cut += 1
        else:
            stays[row] = False
            best = max(matches, key=lambda match: int(match["words"]))
            detail = f"{best['benchmark']} {best['item']}: {best['text'][:SAMPLE_CHARACTERS]}"
            id, source, content = (document[name] for name in ("id", "source", "text"))
            result.stats.remove(CONTAMINATED, id=id, source=source, text=content, detail=detail)
    if changed:
        texts = batch.column("text").to_pylist()
        for row, left in changed.items():
            texts[row] = left
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", pa.array(texts, pa.string()))
    return batch.filter(pa.array(stays))


def _matches(document: dict[str, str], hits: Hits, index: Items) -> Iterator[dict[str, Any]]:
    """One match for every item that is in a document: the longest of the stretches that the item's runs cover."""
    by_item: dict[int, list[int]] = defaultdict(list)
    for k, key in enumerate(hits.key.tolist()):
        for item in index.of(key).tolist():
            by_item[item].append(k)
    content = document["text"].encode()
    for item, own in sorted(by_item.items()):
        stretches: list[tuple[int, int]] = []
        for start, stop in zip(hits.start[own].tolist(), hits.stop[own].tolist()):
            if stretches and start <= stretches[-1][1]:
                stretches[-1] = stretches[-1][0], max(stop, stretches[-1][1])
            else:
                stretches.append((start, stop))
        texts = [content[start:stop].decode() for start, stop in stretches]
        longest = max(texts, key=lambda text: (words_in(text), text))
        yield {
            "document": document["id"],
            "source": document["source"],
            "url": document["url"],
            "benchmark": index.items[item].benchmark,
            "item": index.items[item].id,
            "words": words_in(longest),
            "text": longest,
        }


def words_in(text: str) -> int:
    """How many words, as far as white space tells: what people count."""
    return len(text.split())


def _cut_out(text: str, hits: Hits) -> str:
    """The text without its matches and their margins; "" if too little or too many pieces are left."""
    content = text.encode()
    pieces, begin = [], 0
    for start, stop in sorted(zip(hits.start.tolist(), hits.stop.tolist())):
        first = max(0, len(content[:start].decode()) - MARGIN)
        pieces.append(text[begin:first] if first > begin else "")
        begin = max(begin, len(content[:stop].decode()) + MARGIN)
    pieces = [piece.strip() for piece in [*pieces, text[begin:]]]
    pieces = [piece for piece in pieces if len(piece) >= MARGIN]
    return "\n\n".join(pieces) if len(pieces) <= MAX_PIECES else ""


def _write_matches(folder: Path, matches: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{MATCHES}.part"
    pq.write_table(pa.Table.from_pylist(matches, MATCH_SCHEMA), unfinished, compression="zstd")
    os.replace(unfinished, folder / MATCHES)


def _by_benchmark(index: Items, matches: Sequence[dict[str, Any]], common: np.ndarray) -> dict[str, dict[str, int]]:
    items = Counter(item.benchmark for item in index.items)
    found = {(match["benchmark"], match["item"]) for match in matches}
    documents = {(match["benchmark"], match["source"], match["document"]) for match in matches}
    copied = index.items_with(common) - found
    return {
        name: {
            "items": count,
            "too_short": index.too_short[name],
            "found": sum(benchmark == name for benchmark, _ in found),
            "documents": sum(benchmark == name for benchmark, _, _ in documents),
            "common": sum(benchmark == name for benchmark, _ in copied),
        }
        for name, count in items.items()
    }


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
def _index_of(searched: Searched) -> Items:
    items = [BenchmarkItem(name, id, tuple(texts)) for name, id, texts in json.loads(searched.items.read_text("utf-8"))]
    how = searched.settings
    return index_items(items, ngram=how.n_grams, min_words=how.min_words, boilerplate=how.boilerplate)


def contaminated(texts: Sequence[str], searched: Searched) -> dict[int, str]:
    """Which of some texts, such as whole conversations, hold an item: {place: "BENCHMARK ITEM: the words in common"}.

    A match is what `decontaminate` calls one.
    """
    index = _index_of(searched)
    column = repair(pa.array([encodable(text) for text in texts], pa.string())).text
    hits = Scanner(index).scan(column)
    hits = _without(hits, _in_many_documents([_Found(hits, len(texts))], index, searched.settings.boilerplate))
    found: dict[int, str] = {}
    for text, key, start, stop in np.stack([hits.text, hits.key, hits.start, hits.stop]).T.tolist():
        item = index.items[int(index.of(key)[0])]
        words = column[text].as_py().encode()[start:stop].decode()
        found.setdefault(text, f"{item.benchmark} {item.id}: {words[:SAMPLE_CHARACTERS]}")
    return found

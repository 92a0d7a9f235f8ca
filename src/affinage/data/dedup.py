"""Step `dedup`: one of several equal or nearly equal documents stays, in four passes over files.

1. Signatures: a hash of the content and one key for each band of MinHash (LSH), a file for each document file.
2. Bands: the keys of each band are sorted; documents that share a key with another one are candidates.
3. N-grams: the word n-grams of all candidates, a file for each document file.
4. Comparison: from the best candidate to the worst. A document goes if its exact Jaccard similarity to a document that
   stays, and with which it shares a key, reaches the threshold.

So every removed document has one that stays this near, and documents along a chain of small changes that are unlike
everything that stays are kept. The best of two copies is the one with fewer HTML tags and entities in its text, then
with more distinct n-grams, then of fewer bytes, then with the smaller id. Documents of `dedup.against` come before all
others and always stay. The result depends neither on the executor nor on the order of the files.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import feather

from affinage.config.data import DedupSettings
from affinage.data.code_points import Array, kernel, text_buffers
from affinage.data.documents import Stats, copy_documents, document_files, row_groups, write_table
from affinage.data.executor import LOCAL, Executor, clear_completions
from affinage.data.minhash import jaccard, shingle_sets, sign

MAX_COMPARED = 256  # kept documents of one bucket that a document is compared with, the nearest in rank first
REMOVED = "removed.parquet"
_MARKUP = r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};"
_FACTS = ("content", "content_2", "markup", "bytes")  # the first rows of a signature file; the keys of bands follow
_NAMES = pa.schema([("id", pa.string()), ("source", pa.string())])  # released documents may be without them
_ORDER = [(name, "ascending") for name in ("markup", "bytes", "id", "source", "content", "document")]
_BEST_FIRST = [("released", "descending"), _ORDER[0], ("size", "descending"), *_ORDER[1:]]


def dedup(
    documents_folder: Path,
    folder: Path,
    settings: DedupSettings,
    *,
    against: Path | None = None,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Copy the documents without duplicates to `folder`, write `removed.parquet`, and return the step's summary.

    `against` is a folder of documents that were released before: copies of those are removed as well. Removed documents
    are counted as `exact duplicate` (but for case and white space) or `near duplicate`; `removed.parquet` has the
    document that stays in `duplicate_of`, and their `jaccard`. An interrupted call resumes.
    """
    own, released = document_files(documents_folder), document_files(against) if against is not None else []
    scratch, files = folder / "scratch", [*released, *own]
    removed, compared = find_duplicates(files, settings, scratch, released=len(released), executor=executor)
    numbers = removed["document"].to_numpy()

    def copy(task: tuple[Path, int]) -> dict[str, Any]:
        """Copy one file, whose documents are numbered from `first`, without its duplicates; return the statistics."""
        (path, first), stats = task, Stats()

        def without_duplicates(batch: pa.RecordBatch, before: int) -> pa.RecordBatch:
            begin = first + before
            here = slice(*np.searchsorted(numbers, [begin, begin + batch.num_rows]))
            verdicts = {}
            for row in removed.slice(here.start, here.stop - here.start).to_pylist():
                detail = f"Jaccard {row['jaccard']:.3f} to {row['duplicate_of']} of {row['duplicate_of_source']}"
                verdicts[row["document"] - begin] = (f"{'exact' if row['exact'] else 'near'} duplicate", detail)
            return stats.remove_rows(batch, verdicts)

        copy_documents(path, folder / path.parent.relative_to(documents_folder), stats, without_duplicates)
        return stats.to_json()

    total = Stats()
    starts = _starts(files)[len(released) : -1]
    for counts in executor.map(copy, list(zip(own, starts)), folder, threads=True, label="copying"):
        total.merge(counts)
    order = [(name, "ascending") for name in ("duplicate_of_source", "duplicate_of", "source", "id")]
    write_table(folder / REMOVED, removed.sort_by(order).drop_columns(["document", "kept"]))
    clear_completions(folder)
    shutil.rmtree(scratch)
    return total.summary() | {"compared": compared}


def _starts(files: Sequence[Path]) -> list[int]:
    """The number of the first document of every file among those of all files, and the number of all."""
    return np.cumsum([0, *(sum(group.rows for group in row_groups(path)) for path in files)]).tolist()


def find_duplicates(
    files: Sequence[Path], settings: DedupSettings, scratch: Path, *, released: int = 0, executor: Executor = LOCAL
) -> tuple[pa.Table, int]:
    """Find the duplicates in document files, of which the first `released` were released before.

    Returns a table with a row for each document to remove (its number, its name and that of the one that stays, their
    similarity), and how many pairs were compared. Passes leave files in `scratch`.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    executor.map(
        partial(_sign, settings, scratch), list(enumerate(files)), scratch / "sign", threads=True, label="signing"
    )
    signatures = [scratch / f"signatures-{number}" for number in range(len(files))]
    starts = _starts(files)
    shared = np.zeros(starts.pop(), bool)  # pass 2: documents that share the key of a band with another one
    for band in range(settings.num_buckets):
        keys = _joined(signatures, len(_FACTS) + settings.num_buckets, len(_FACTS) + band)
        shared |= _buckets(keys)[0] >= 0
    shared.tofile(scratch / "candidates")
    tasks = [(number, path, start) for (number, path), start in zip(enumerate(files), starts)]
    executor.map(partial(_gather, settings, scratch), tasks, scratch / "gather", threads=True, label="gathering")
    return _compare(settings, scratch, released, len(files))


def _sign(settings: DedupSettings, scratch: Path, task: tuple[int, Path]) -> None:
    """Pass 1: write the signatures of one file, uint64 [4 + bands, documents]."""
    number, path = task
    parts = [np.zeros((len(_FACTS) + settings.num_buckets, 0), np.uint64)]
    for group in row_groups(path):
        text = group.read(["text"]).column("text")
        content, keys = sign(text, settings.n_grams, settings.num_buckets, settings.hashes_per_bucket)
        markup = pc.count_substring_regex(text, _MARKUP).to_numpy()
        parts.append(np.vstack([content, markup, np.diff(text_buffers(text)[1]), keys]).astype(np.uint64))
    np.concatenate(parts, axis=1).tofile(scratch / f"signatures-{number}")


def _joined(paths: Sequence[Path], rows: int, row: int) -> np.ndarray:
    """One row of each of some files of uint64 [rows, documents], end to end."""
    sizes = [path.stat().st_size // (8 * rows) for path in paths]
    parts = [np.fromfile(path, np.uint64, size, offset=8 * size * row) for path, size in zip(paths, sizes)]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def _gather(settings: DedupSettings, scratch: Path, task: tuple[int, Path, int]) -> None:
    """Pass 3: write what is known of the candidates of one file, and their n-grams end to end."""
    number, path, start = task
    signatures = np.fromfile(scratch / f"signatures-{number}", np.uint64)
    signatures = signatures.reshape(len(_FACTS) + settings.num_buckets, -1)
    chosen = np.fromfile(scratch / "candidates", bool, signatures.shape[1], offset=start)
    tables, sets, sizes, first = [_NAMES.empty_table()], [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for group in row_groups(path):
        batch = group.read([*_NAMES.names, "text"]).filter(pa.array(chosen[first : first + group.rows]))
        first += group.rows
        absent = pa.array([""] * len(batch), pa.string())
        columns = [batch[name] if name in batch.schema.names else absent for name in _NAMES.names]
        tables.append(pa.table(columns, schema=_NAMES))
        own_sets, own_sizes = shingle_sets(batch["text"], settings.n_grams)
        sets.append(own_sets)
        sizes.append(own_sizes)
    table = pa.concat_tables(tables)
    facts = {"document": start + np.flatnonzero(chosen), "size": np.concatenate(sizes)}
    for name, values in (facts | dict(zip(_FACTS, signatures[:, chosen]))).items():
        table = table.append_column(name, pa.array(values))
    feather.write_feather(table, scratch / f"candidates-{number}", compression="uncompressed")
    np.concatenate(sets).tofile(scratch / f"sets-{number}")
    signatures[len(_FACTS) :, chosen].tofile(scratch / f"keys-{number}")


def _compare(settings: DedupSettings, scratch: Path, released: int, files: int) -> tuple[pa.Table, int]:
    """Pass 4: the table of the removed documents, and how many pairs were compared. N-grams stay in a mapped file."""
    columns = [*_NAMES, ("document", pa.int64()), ("size", pa.int64()), *((f, pa.uint64()) for f in _FACTS)]
    tables = [pa.schema([*columns, ("released", pa.bool_())]).empty_table()]
    with (scratch / "sets").open("wb") as joined:
        for number in range(files):
            table = feather.read_table(scratch / f"candidates-{number}")
            tables.append(table.append_column("released", pa.array(np.full(len(table), number < released))))
            with (scratch / f"sets-{number}").open("rb") as part:
                shutil.copyfileobj(part, joined, 1 << 22)
        joined.write(bytes(8))  # an empty file cannot be mapped
    table = pa.concat_tables(tables)
    starts = np.append(0, np.cumsum(table["size"].to_numpy()))[:-1]
    order = pc.sort_indices(table, _BEST_FIRST)
    table, starts = table.take(order), starts[order.to_numpy()]

    buckets, count = np.empty((len(table), settings.num_buckets), np.int32), 0
    for band in range(settings.num_buckets):
        keys = _joined([scratch / f"keys-{number}" for number in range(files)], settings.num_buckets, band)
        own, size = _buckets(keys[order.to_numpy()])
        buckets[:, band] = np.where(own >= 0, own + count, -1)
        count += size
    n_grams = np.memmap(scratch / "sets", np.uint64, "r")
    stays = pc.sum(table["released"]).as_py() or 0
    match, similarity, compared = _match(
        buckets, count, n_grams, starts, table["size"].to_numpy(), settings.threshold, MAX_COMPARED, stays
    )
    found = np.flatnonzero(match >= 0)
    gone, kept = table.take(pa.array(found)), table.take(pa.array(match[found]))
    removed = {
        "document": gone["document"],
        "kept": kept["document"],
        "id": gone["id"],
        "source": gone["source"],
        "duplicate_of": kept["id"],
        "duplicate_of_source": kept["source"],
        "jaccard": similarity[found],
        # the same content but for case and white space
        "exact": pc.and_(*(pc.equal(gone[name], kept[name]) for name in ("content", "content_2"))),
    }
    return pa.table(removed).sort_by("document"), int(compared)


def _buckets(keys: np.ndarray) -> tuple[np.ndarray, int]:
    """The bucket of every document by its key in one band, int32 [N], -1 where it is alone; and how many there are."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new, last = np.ones(order.size, bool), np.ones(order.size, bool)
    new[1:] = last[:-1] = ordered[1:] != ordered[:-1]
    shared, new = ~(new & last), new & ~last
    buckets = np.full(keys.size, -1, np.int32)
    buckets[order[shared]] = np.cumsum(new)[shared] - 1
    return buckets, int(new.sum())


@kernel
def _match(
    buckets: Array, bucket_count: int, sets: Array, starts: Array, sizes: Array, threshold: float, most: int, stays: int
) -> tuple[Array, Array, int]:
    """From the first document to the last: the kept one it is a copy of, or -1; their similarity; pairs compared.

    The first `stays` documents are kept whatever they are. Another is compared with the kept ones of its buckets, the
    latest first: they are the nearest in rank, and one with less than `threshold` times as many n-grams cannot be a
    copy. The kept documents of a bucket form a linked list (`head`, `link`).
    """
    texts, bands = buckets.shape
    match, similarity = np.full(texts, -1, np.int64), np.zeros(texts)
    head, link = np.full(bucket_count, -1, np.int32), np.full((texts, bands), -1, np.int32)
    last_compared = np.full(texts, -1, np.int32)  # the document that a kept one was last compared with
    compared = 0
    for text in range(texts):
        mine = sets[starts[text] : starts[text] + sizes[text]]
        for band in range(bands if text >= stays else 0):
            other = head[buckets[text, band]] if buckets[text, band] >= 0 else -1
            steps = 0
            while other >= 0 and match[text] < 0 and steps < most:
                small, large = min(sizes[text], sizes[other]), max(sizes[text], sizes[other])
                if last_compared[other] != text and small >= threshold * large:
                    last_compared[other] = text
                    compared += 1
                    near = jaccard(mine, sets[starts[other] : starts[other] + sizes[other]], threshold)
                    if near >= 0:
                        match[text], similarity[text] = other, near
                steps += 1
                other = link[other, band]
            if match[text] >= 0:
                break
        if match[text] < 0:
            for band in range(bands):
                if buckets[text, band] >= 0:
                    link[text, band] = head[buckets[text, band]]
                    head[buckets[text, band]] = text
    return match, similarity, compared

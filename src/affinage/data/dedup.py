"""Step `dedup`: one of several equal or nearly equal documents stays, in four passes over files.

1. Signatures: a hash of the content and one key for each band of MinHash (LSH). 2. Documents that share a key are
candidates. 3. The word n-grams of all candidates. 4. Comparison, from the best candidate to the worst: a document goes
if its exact Jaccard similarity to one that stays, and with which it shares a key, reaches the threshold.

The best of two copies has fewer HTML tags and entities, then more distinct n-grams, then fewer bytes, then the smaller
id. Documents of `dedup.against` come before all others and stay. Neither the executor nor the order of files matters.

A word is a run of letters, numbers and marks (see `word_table`), a shingle the 64-bit hash of n words in a row, or of
all words of a shorter text.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import feather

from affinage.config.data import DedupSettings
from affinage.data.code_points import BLANK, SINGLE, WORD, Array, decode, kernel, text_buffers, word_table
from affinage.data.documents import Stats, Verdicts, copy_documents, document_files, first_documents, read_documents
from affinage.data.executor import LOCAL, Executor

MAX_COMPARED = 256  # kept documents of one bucket that a document is compared with, the nearest in rank first
REMOVED = "removed.parquet"
_MARKUP = r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};"
_FACTS = ("content", "markup", "bytes")  # the first rows of a signature file; the keys of bands follow
_NAMES = pa.schema([("id", pa.string()), ("source", pa.string()), ("size", pa.int64())])
_BEST_FIRST = [("released", "descending"), ("markup", "ascending"), ("size", "descending")]
_BEST_FIRST += [(name, "ascending") for name in ("bytes", "id", "source", "content", "document")]
_SEED = 0x5851F42D4C957F2D
_PRIME = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's, odd
_PRIME2 = np.uint64(0xD6E8FEB86659FD93)
_MASK = np.uint32(0xFFFFFF)
_TAG_BYTES = 200  # of an HTML tag, at most


# ---- words ----


@kernel
def mix(x: np.uint64) -> np.uint64:
    """Spread the entropy of 64 bits over all of them (the finaliser of MurmurHash3)."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@kernel
def _tag_end(data: Array, i: np.int64, end: np.int64) -> np.int64:
    """Where the HTML tag that begins at byte `i` ends, or `i` if none does."""
    if i + 2 >= end:
        return i
    letter = data[i + 2] if data[i + 1] == 0x2F else data[i + 1]
    if not (0x41 <= letter <= 0x5A or 0x61 <= letter <= 0x7A):
        return i
    for k in range(i + 1, min(end, i + _TAG_BYTES)):
        if data[k] == 0x3E:
            return np.int64(k + 1)
        if data[k] == 0x3C or data[k] == 0x0A:
            return i
    return i


@kernel
def _add(words, places, count, hashed, start, stop):  # type: ignore[no-untyped-def]
    words[count] = mix(hashed)
    if places is not None:
        places[count, 0], places[count, 1] = start, stop
    return count + 1


@kernel
def hash_words(data, offsets, text, table, words, places):  # type: ignore[no-untyped-def]
    """Write hashes of the words of a text to `words`; return how many, and a hash of the whole text.

    The latter is of the text but for case and white space, and only without `places`. With these (int64 [words, 2], or
    None), which receive the first and last + 1 byte of every word in the text, HTML tags separate words.
    """
    begin, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
    i, start, count, word, whole, blank = begin, begin, 0, np.uint64(0), np.uint64(0), False
    while i < end:
        code, size = decode(data, i)
        if places is not None and code == 0x3C:
            size = max(size, _tag_end(data, i, end) - i)
        kind, point = table[code] >> np.uint32(24), np.uint64(table[code] & _MASK)
        if places is None:
            if kind == BLANK:
                blank = whole != np.uint64(0)
            else:
                if blank:
                    whole = (whole ^ np.uint64(32)) * _PRIME
                whole, blank = (whole ^ point) * _PRIME, False
        if kind == WORD:
            if word == 0:
                start = i
            word = (word ^ (point + np.uint64(1))) * _PRIME
        else:
            if word != 0:
                count, word = _add(words, places, count, word, start - begin, i - begin), np.uint64(0)
            if kind == SINGLE:
                count = _add(words, places, count, point * _PRIME2, i - begin, i + size - begin)
        i += size
    if word != 0:
        count = _add(words, places, count, word, start - begin, end - begin)
    return count, mix(whole)


@kernel
def longest_text(offsets: Array) -> int:
    """Bytes of the longest text of a column, at least 1."""
    return max(1, np.append(np.diff(offsets), 1).max())


@kernel
def shingles(words: Array, count: int, ngram: int, wordless: np.uint64, out: Array) -> int:
    """Write the hashes of all `ngram` words in a row to `out`; a text without words has the one shingle `wordless`."""
    power = np.uint64(1)
    for _ in range(ngram):
        power *= _PRIME
    rolling = np.uint64(0)
    for i in range(min(ngram, count)):
        rolling = rolling * _PRIME + words[i]
    out[0] = mix(rolling) if count else wordless
    for i in range(ngram, count):
        rolling = rolling * _PRIME + words[i] - words[i - ngram] * power
        out[i - ngram + 1] = mix(rolling)
    return max(1, count - ngram + 1)


# ---- the kernels of the passes ----


@kernel
def _sign(
    data: Array, offsets: Array, table: Array, ngram: int, a: Array, b: Array, content: Array, keys: Array
) -> None:
    room, rows = longest_text(offsets), a.size // keys.shape[0]
    words, runs, minima = np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(a.size, np.uint32)
    for text in range(offsets.size - 1):
        count, content[text] = hash_words(data, offsets, text, table, words, None)
        minima[:] = np.uint32(0xFFFFFFFF)
        for i in range(shingles(words, count, ngram, content[text], runs)):
            x = np.uint32(runs[i] >> np.uint64(32))
            for k in range(minima.size):
                minima[k] = min(minima[k], np.uint32(a[k] * x + b[k]))
        for band in range(keys.shape[0]):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = mix(key ^ np.uint64(minima[row]))
            keys[band, text] = key


def sign(text: pa.Array, ngram: int, bands: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """What finds the duplicates among N texts.

    Returns:
        content: uint64 [N], a hash of the text in lower case with every run of white space as one space.
        keys: uint64 [bands, N], equal where all `rows` hashes of a band are. The hash functions are a x + b mod 2^32
        with odd a (Dietzfelbinger's multiply-shift).
    """
    a, b = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2**32, (2, bands * rows), np.uint32)
    content, keys = np.empty(len(text), np.uint64), np.empty((bands, len(text)), np.uint64)
    _sign(*text_buffers(text), word_table(), ngram, a | np.uint32(1), b, content, keys)
    return content, keys


@kernel
def _shingle_sets(data: Array, offsets: Array, table: Array, ngram: int, out: Array, sizes: Array) -> int:
    room, total = longest_text(offsets), 0
    words, runs = np.empty(room, np.uint64), np.empty(room, np.uint64)
    for text in range(sizes.size):
        count, content = hash_words(data, offsets, text, table, words, None)
        distinct = np.unique(runs[: shingles(words, count, ngram, content, runs)])
        out[total : total + distinct.size] = distinct
        sizes[text] = distinct.size
        total += distinct.size
    return total


def shingle_sets(text: pa.Array, ngram: int) -> tuple[np.ndarray, np.ndarray]:
    """The sorted distinct shingles of N texts end to end, uint64, and how many each text has, int64 [N]."""
    data, offsets = text_buffers(text)
    sizes = np.empty(len(text), np.int64)
    out = np.empty(int(offsets[-1] - offsets[0]) + len(text), np.uint64)  # a text has no more words than bytes
    return out[: _shingle_sets(data, offsets, word_table(), ngram, out, sizes)].copy(), sizes


@kernel
def jaccard(a: Array, b: Array, threshold: float) -> float:
    """Jaccard similarity of two sorted sets, uint64; -1 as soon as it is certain to be below the threshold."""
    total = a.size + b.size
    needed = threshold / (1 + threshold) * total - 1e-6  # J >= t means that at least t/(1+t) of |A|+|B| is shared
    i, j, shared = 0, 0, 0
    while i < a.size and j < b.size:
        if shared + min(a.size - i, b.size - j) < needed:
            return -1.0
        x, y = a[i], b[j]
        shared += x == y
        i += x <= y
        j += y <= x
    similarity = shared / (total - shared)
    return similarity if similarity >= threshold else -1.0


@kernel
def _match(
    buckets: Array, sets: Array, starts: Array, sizes: Array, threshold: float, stays: int
) -> tuple[Array, Array]:
    """From the first document to the last: the kept one it is a copy of, or -1; their similarity.

    The first `stays` documents are kept whatever they are. Another is compared with the kept ones of its buckets, the
    latest first: they are the nearest in rank, and one with less than `threshold` times as many n-grams cannot be a
    copy. The kept documents of a bucket form a linked list (`head`, `link`).
    """
    texts, bands = buckets.shape
    match, similarity = np.full(texts, -1, np.int64), np.zeros(texts)
    head, link = np.full((texts, bands), -1, np.int32), np.full((texts, bands), -1, np.int32)
    last_compared = np.full(texts, -1, np.int32)  # the document that a kept one was last compared with
    for text in range(texts):
        mine = sets[starts[text] : starts[text] + sizes[text]]
        for band in range(bands if text >= stays else 0):
            other, steps = head[buckets[text, band], band], 0
            while other >= 0 and match[text] < 0 and steps < MAX_COMPARED:
                small, large = min(sizes[text], sizes[other]), max(sizes[text], sizes[other])
                if last_compared[other] != text and small >= threshold * large:
                    last_compared[other] = text
                    near = jaccard(mine, sets[starts[other] : starts[other] + sizes[other]], threshold)
                    if near >= 0:
                        match[text], similarity[text] = other, near
                other, steps = link[other, band], steps + 1
            if match[text] >= 0:
                break
        if match[text] < 0:
            for band in range(bands):
                link[text, band] = head[buckets[text, band], band]
                head[buckets[text, band], band] = text
    return match, similarity


# ---- the step ----


def dedup(
    source: Path, folder: Path, settings: DedupSettings, *, against: Path | None = None, executor: Executor = LOCAL
) -> dict[str, Any]:
    """Copy the documents of `source` without duplicates to `folder`, write `removed.parquet`, and return the summary.

    Copies of documents in the folder `against`, which were released before, go as well. Copies but for case and white
    space count as `exact duplicate`, others as `near duplicate`. An interrupted call resumes.
    """
    own, released = document_files(source), document_files(against) if against is not None else []
    scratch, files = folder / "scratch", [*released, *own]
    removed = find_duplicates(files, settings, scratch, released=len(released), executor=executor)
    numbers, released_documents = removed["document"].to_numpy(), first_documents(released)[-1]

    def duplicates_in(batch: pa.RecordBatch, before: int, stats: Stats) -> Verdicts:
        begin, verdicts = released_documents + before, {}
        start, stop = np.searchsorted(numbers, [begin, begin + batch.num_rows])
        for row in removed.slice(start, stop - start).to_pylist():
            detail = f"Jaccard {row['jaccard']:.3f} to {row['duplicate_of']} of {row['duplicate_of_source']}"
            verdicts[row["document"] - begin] = (f"{'exact' if row['exact'] else 'near'} duplicate", detail)
        return verdicts

    total = copy_documents(source, folder, duplicates_in, executor)
    order = [(name, "ascending") for name in ("duplicate_of_source", "duplicate_of", "source", "id")]
    removed = removed.sort_by(order).drop_columns(["document", "kept"])
    pq.write_table(removed, folder / REMOVED, compression="zstd")
    shutil.rmtree(scratch)
    return total.summary()


def find_duplicates(
    files: Sequence[Path], settings: DedupSettings, scratch: Path, *, released: int = 0, executor: Executor = LOCAL
) -> pa.Table:
    """The documents to remove from files, of which the first `released` were released before, by number.

    Each row has their names and those of the documents that stay, and the similarity. Passes leave files in `scratch`.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    starts = first_documents(files)
    tasks = list(zip(range(len(files)), files, starts))
    executor.map(partial(_write_signatures, settings, scratch), tasks, scratch / "sign", threads=True, label="signing")
    candidates = np.zeros(starts[-1], bool)  # documents that share a key
    for band in range(settings.num_buckets):
        keys = _signatures(scratch, len(files), len(_FACTS) + band)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(np.diff(keys[order]) == 0)
        candidates[order[same]] = candidates[order[same + 1]] = True
    gather = partial(_gather, settings, scratch, candidates)
    executor.map(gather, tasks, scratch / "gather", threads=True, label="gathering")
    return _compare(settings, scratch, candidates, len(files), starts[released])


def _write_signatures(settings: DedupSettings, scratch: Path, task: tuple[int, Path, int]) -> None:
    """Pass 1: write the signatures of one file, uint64 [3 + bands, documents]."""
    number, path, _ = task
    parts = [np.zeros((len(_FACTS) + settings.num_buckets, 0), np.uint64)]
    for batch in read_documents(path, ["text"]):
        text = batch.column("text")
        content, keys = sign(text, settings.n_grams, settings.num_buckets, settings.hashes_per_bucket)
        markup = pc.count_substring_regex(text, _MARKUP).to_numpy()
        parts.append(np.vstack([content, markup, np.diff(text_buffers(text)[1]), keys]).astype(np.uint64))
    np.save(scratch / f"signatures-{number}.npy", np.concatenate(parts, axis=1))


def _signatures(scratch: Path, files: int, row: int) -> np.ndarray:
    """One row of the signatures, uint64 [documents of all files]."""
    return np.concatenate([np.load(scratch / f"signatures-{k}.npy", mmap_mode="r")[row] for k in range(files)])


def _gather(settings: DedupSettings, scratch: Path, candidates: np.ndarray, task: tuple[int, Path, int]) -> None:
    """Pass 3: write the names of the candidates of one file, how many n-grams each has, and these end to end."""
    (number, path, start), names = task, [_NAMES.empty_table()]
    with (scratch / f"sets-{number}").open("wb") as sets:
        for batch in read_documents(path, ["id", "source", "text"]):
            batch, start = batch.filter(pa.array(candidates[start : start + len(batch)])), start + len(batch)
            own_sets, sizes = shingle_sets(batch["text"], settings.n_grams)
            own_sets.tofile(sets)
            # Released documents may be without names.
            own = {name: batch[name] if name in batch.schema.names else [""] * len(batch) for name in ("id", "source")}
            names.append(pa.table(own | {"size": sizes}, _NAMES))
    feather.write_feather(pa.concat_tables(names), scratch / f"candidates-{number}", compression="uncompressed")


def _compare(settings: DedupSettings, scratch: Path, candidates: np.ndarray, files: int, released: int) -> pa.Table:
    """Pass 4: the table of the removed documents. N-grams stay in a mapped file."""
    tables = []
    with (scratch / "sets").open("wb") as joined:
        for number in range(files):
            tables.append(feather.read_table(scratch / f"candidates-{number}"))
            joined.write((scratch / f"sets-{number}").read_bytes())
        joined.write(bytes(8))  # an empty file cannot be mapped
    names, documents = pa.concat_tables(tables), np.flatnonzero(candidates)
    facts = {name: _signatures(scratch, files, row)[candidates] for row, name in enumerate(_FACTS)}
    facts |= {"document": documents, "released": documents < released}
    table = pa.table(dict(zip(names.column_names, names.columns)) | facts)
    starts = np.append(0, np.cumsum(table["size"].to_numpy()))
    order = pc.sort_indices(table, _BEST_FIRST).to_numpy()
    buckets = np.empty((len(table), settings.num_buckets), np.int32)
    for band in range(settings.num_buckets):
        keys = _signatures(scratch, files, len(_FACTS) + band)[candidates]
        buckets[:, band] = np.unique(keys, return_inverse=True)[1]
    table, starts, buckets, sizes = table.take(order), starts[order], buckets[order], table["size"].to_numpy()[order]
    n_grams, stays = np.memmap(scratch / "sets", np.uint64, "r"), int(facts["released"].sum())
    match, similarity = _match(buckets, n_grams, starts, sizes, settings.threshold, stays)
    copies = np.flatnonzero(match >= 0)
    gone, kept = table.take(pa.array(copies)), table.take(pa.array(match[copies]))
    removed = {
        "document": gone["document"],
        "kept": kept["document"],
        "id": gone["id"],
        "source": gone["source"],
        "duplicate_of": kept["id"],
        "duplicate_of_source": kept["source"],
        "jaccard": similarity[copies],
        "exact": pc.equal(gone["content"], kept["content"]),
    }
    return pa.table(removed).sort_by("document")

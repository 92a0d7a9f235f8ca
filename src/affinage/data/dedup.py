"""Step `dedup`: one of several equal or nearly equal documents stays, in four passes over files.

1. Signatures: one key for each band of MinHash (LSH). 2. Documents that share a key are candidates. 3. What candidates
are compared by, and their word n-grams. 4. Comparison, from the best candidate to the worst: a document goes if its
exact Jaccard similarity to one that stays, and with which it shares a key, reaches the threshold.

The best of two copies has fewer HTML tags and entities, then more distinct n-grams, then fewer bytes, then the smaller
id. Documents of `dedup.against` come before all others and stay. Neither the executor nor the order of files matters.

A word is a run of letters, numbers and marks (see `word_table`), a shingle the 64-bit hash of n words in a row, or of
all words of a shorter text.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import feather

from affinage.cluster.executor import LOCAL, Executor
from affinage.config.data import DedupSettings
from affinage.data import code_points
from affinage.data.code_points import BLANK, SEPARATOR, SINGLE, WORD, Array, decode, kernel, text_buffers, word_table
from affinage.data.documents import Stats, Verdicts, copy_documents, document_files, first_documents, read_documents

MAX_COMPARED = 256  # kept documents of one bucket that a document is compared with, the nearest in rank first
REMOVED = "removed.parquet"
_MARKUP = r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};"
_FACTS = ("size", "content", "markup", "bytes", "words")
_NAMED = pa.schema(dict.fromkeys(("id", "source"), pa.string()) | dict.fromkeys(_FACTS, pa.int64()))
_BEST_FIRST = [("released", "descending"), ("markup", "ascending"), ("size", "descending")]
_BEST_FIRST += [(name, "ascending") for name in ("bytes", "id", "source", "content", "document")]
_SEED = 0x5851F42D4C957F2D
_PRIME = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's, odd
_SPACE = np.uint64(0xD6E8FEB86659FD93)
_MASK = np.uint32(0xFFFFFF)
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)  # no hash
_TAG_BYTES, _ENTITY_BYTES = 200, 10  # of HTML, at most


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
def _html_end(data: Array, i: np.int64, end: np.int64) -> np.int64:
    """Where the HTML tag or entity (`&#39;`) that begins at byte `i` ends, or `i` if none does."""
    entity = data[i] == 0x26
    tag = data[i] == 0x3C and i + 2 < end and 0x61 <= data[i + 1 + (data[i + 1] == 0x2F)] | 0x20 <= 0x7A
    for k in range(i + 1, min(end, i + _ENTITY_BYTES * entity + _TAG_BYTES * tag)):
        if data[k] == (0x3B if entity else 0x3E):
            return np.int64(k + 1)
        if data[k] == 0x3C or data[k] == 0x0A or (entity and data[k] == 0x20):
            break
    return i


@kernel
def hash_words(data, offsets, text, table, searched):  # type: ignore[no-untyped-def]
    """The hashes of the words of a text, uint64 [words], a hash of the whole text, and the places of the words.

    The second is of the text in lower case with every run of white space as one space. If `searched` (True, or None:
    each is compiled by itself) HTML separates words, and the third has the first and last + 1 byte of each, int64
    [words, 2].
    """
    begin, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
    words, count, i, whole, space = np.empty(end - begin, np.uint64), 0, begin, np.uint64(0), np.uint64(0)
    places: Any = None if searched is None else np.empty((end - begin, 2), np.int64)
    while i < end:
        start, word = i, np.uint64(0)
        while i < end:
            code, size = decode(data, i)
            kind, point = table[code] >> np.uint32(24), np.uint64(table[code] & _MASK)
            if kind == WORD or (kind == SINGLE and i == start):
                word = (word ^ (point + np.uint64(1))) * _PRIME
                i += size
            if kind != WORD:
                break
        if word != 0:
            whole, space = (whole ^ word ^ space) * _PRIME, np.uint64(0)
            words[count] = mix(word)
            if searched is not None:
                places[count, 0], places[count, 1] = start - begin, i - begin
            count += 1
        if i < end and kind == BLANK:
            space = _SPACE if whole != 0 else space
            i += size
        elif i < end and kind == SEPARATOR:
            whole, space = (whole ^ point ^ space) * _PRIME, np.uint64(0)
            i = max(i + size, _html_end(data, i, end)) if searched is not None and code in (0x3C, 0x26) else i + size
    return words[:count], mix(whole), places


@kernel
def shingles(words: Array, ngram: int, wordless: np.uint64) -> Array:
    """The hashes of all `ngram` words in a row, uint64; a text without words has the one shingle `wordless`."""
    power, rolling, out = _PRIME ** np.uint64(ngram), np.uint64(0), np.empty(max(1, words.size - ngram + 1), np.uint64)
    out[0] = wordless
    for i in range(words.size):
        rolling = rolling * _PRIME + words[i]
        if i >= ngram:
            rolling -= words[i - ngram] * power
        out[max(0, i - ngram + 1)] = mix(rolling)
    return out


# ---- the kernels of the passes ----


@kernel
def _sign(data: Array, offsets: Array, table: Array, ngram: int, a: Array, b: Array, keys: Array) -> None:
    rows = a.size // keys.shape[0]
    for text in range(offsets.size - 1):
        words, content, _ = hash_words(data, offsets, text, table, None)
        halves = (shingles(words, ngram, content) >> np.uint64(32)).astype(np.uint32)
        for band in range(keys.shape[0]):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                least = np.uint32(0xFFFFFFFF)
                for half in halves:
                    least = min(least, np.uint32(a[row] * half + b[row]))
                key = mix(key ^ np.uint64(least))
            keys[band, text] = key


def sign(text: pa.Array, ngram: int, bands: int, rows: int) -> np.ndarray:
    """Keys of N texts by which duplicates meet, uint64 [bands, N]: equal where all `rows` hashes of a band are.

    The hash functions are a x + b mod 2^32 with odd a (Dietzfelbinger's multiply-shift).
    """
    a, b = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2**32, (2, bands * rows), np.uint32)
    keys = np.empty((bands, len(text)), np.uint64)
    _sign(*text_buffers(text), word_table(), ngram, a | np.uint32(1), b, keys)
    return keys


@kernel
def _write_set(hashes: Array, out: Array) -> int:
    """Write the distinct ones of `hashes` to `out`, ascending; return how many.

    A hash goes to the slot in proportion to its value, or to the first after it whose hash is larger and makes way.
    """
    slots, size = np.full(4 * hashes.size, _NONE), 0
    for each in hashes:
        slot = (each >> np.uint64(32)) * np.uint64(3 * hashes.size) >> np.uint64(32)
        while slots[slot] < each:
            slot += np.uint64(1)
        held = slots[slot]
        slots[slot] = each
        while held != _NONE and held != each:
            slot += np.uint64(1)
            slots[slot], held = held, slots[slot]
    for each in slots:
        out[size] = each
        size += each != _NONE
    return size


@kernel
def _shingle_sets(data, offsets, table, ngram, searched, out, facts):  # type: ignore[no-untyped-def]
    total = 0
    for text in range(offsets.size - 1):
        words, content, _ = hash_words(data, offsets, text, table, searched)
        size = _write_set(shingles(words, ngram, content), out[total:])
        marked = False
        for byte in data[offsets[text] : offsets[text + 1]]:
            marked |= (byte == 0x3C) | (byte == 0x26)
        facts[0, text], facts[1, text], facts[2, text], facts[4, text] = size, np.int64(content), marked, words.size
        total += size
    return total


def shingle_sets(text: pa.Array, ngram: int, *, searched: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The sorted distinct shingles of N texts end to end, uint64, and facts about each text, int64 [5, N].

    These are how many shingles it has, its hash, how many HTML tags and entities, bytes and words. The words of texts
    that are `searched` for are folded, and HTML separates them.
    """
    data, offsets = text_buffers(text)
    facts = np.empty((len(_FACTS), len(text)), np.int64)
    facts[3] = np.diff(offsets)
    out = np.empty(int(offsets[-1] - offsets[0]) + len(text) + 1, np.uint64)  # a text has no more words than bytes
    total = _shingle_sets(data, offsets, word_table(folded=searched), ngram, searched or None, out, facts)
    marked = facts[2] > 0  # texts with < or &
    facts[2, marked] = pc.count_substring_regex(text.filter(pa.array(marked)), _MARKUP)
    return out[:total], facts


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
def _match(buckets: Array, sets: Array, starts: Array, sizes: Array, least: float, stays: int) -> tuple[Array, Array]:
    """From the first document to the last: the kept one with a similarity of at `least` that, or -1; this similarity.

    The first `stays` documents are kept whatever they are. Another is compared with the kept ones of its buckets, the
    latest first: they are the nearest in rank. The kept documents of a bucket form a linked list (`head`, `link`).
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
                if last_compared[other] != text:
                    last_compared[other] = text
                    near = jaccard(mine, sets[starts[other] : starts[other] + sizes[other]], least)
                    if near >= 0:
                        match[text], similarity[text] = other, near
                other, steps = link[other, band], steps + 1
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
    numbers = removed["document"].to_numpy()

    def duplicates_in(batch: pa.RecordBatch, first: int, stats: Stats) -> Verdicts:
        verdicts, (start, stop) = {}, np.searchsorted(numbers, [first, first + batch.num_rows])
        for row in removed.slice(start, stop - start).to_pylist():
            detail = f"Jaccard {row['jaccard']:.3f} to {row['duplicate_of']} of {row['duplicate_of_source']}"
            verdicts[row["document"] - first] = (f"{'exact' if row['exact'] else 'near'} duplicate", detail)
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
    """The documents to remove from files, by number; those of the first `released` files count below 0, and all stay.

    Each row has their names and those of the documents that stay, and the similarity. Passes leave files in `scratch`.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    starts, bands = first_documents(files), range(settings.num_buckets)
    candidates = np.zeros(starts[-1], bool)  # documents that share a key

    def write_signatures(task: tuple[int, Path, int]) -> None:
        """Pass 1: write the keys of one file, uint64 [bands, documents]."""
        number, path, _ = task
        parts = [np.zeros((len(bands), 0), np.uint64)]
        for batch in read_documents(path, ["text"]):
            text = code_points.repair(batch["text"].cast(pa.string())) if number < released else batch["text"]
            parts.append(sign(text, settings.n_grams, len(bands), settings.hashes_per_bucket))
        np.save(scratch / f"keys-{number}.npy", np.concatenate(parts, axis=1))

    def keys_of(band: int) -> np.ndarray:
        """The keys of one band, uint64 [documents of all files]."""
        return np.concatenate([np.load(scratch / f"keys-{k}.npy", mmap_mode="r")[band] for k in range(len(files))])

    def gather(task: tuple[int, Path, int]) -> None:
        """Pass 3: write facts about the candidates of one file, and the n-grams of each end to end."""
        number, path, start = task
        names = pa.ipc.new_file(scratch / f"candidates-{number}", _NAMED)
        with names, (scratch / f"sets-{number}").open("wb") as sets:
            for batch in read_documents(path, ["id", "source", "text"]):
                batch, start = batch.filter(pa.array(candidates[start : start + len(batch)])), start + len(batch)
                text = code_points.repair(batch["text"].cast(pa.string())) if number < released else batch["text"]
                own_sets, facts = shingle_sets(text, settings.n_grams)
                own_sets.tofile(sets)
                # Released documents may be without names.
                own = {key: batch[key] if key in batch.schema.names else [""] * len(batch) for key in ("id", "source")}
                names.write_table(pa.table(own | dict(zip(_FACTS, facts)), _NAMED))

    tasks = list(zip(range(len(files)), files, starts))
    executor.map(write_signatures, tasks, scratch / "sign", threads=True, label="signing")
    for keys in map(keys_of, bands):
        order = np.argsort(keys)
        same = np.flatnonzero(np.diff(keys[order]) == 0)
        candidates[order[same]] = candidates[order[same + 1]] = True
    executor.map(gather, tasks, scratch / "gather", threads=True, label="gathering")
    buckets = [np.unique(keys_of(band)[candidates], return_inverse=True)[1].astype(np.int32) for band in bands]
    documents = np.flatnonzero(candidates) - starts[released]
    return _compare(documents, np.stack(buckets, axis=1), settings.threshold, scratch, len(files))


def _compare(documents: Array, buckets: Array, threshold: float, scratch: Path, files: int) -> pa.Table:
    """Pass 4: the table of the removed of candidates, with the buckets of each. N-grams stay in a mapped file."""
    with (scratch / "sets").open("wb") as joined:
        for number in range(files):
            with (scratch / f"sets-{number}").open("rb") as sets:
                shutil.copyfileobj(sets, joined, 1 << 20)
        joined.write(bytes(8))  # an empty file cannot be mapped
    table = pa.concat_tables(feather.read_table(scratch / f"candidates-{number}") for number in range(files))
    table = table.append_column("document", pa.array(documents))
    table = table.append_column("released", pa.array(documents < 0))
    sizes, stays = table["size"].to_numpy(), int(np.searchsorted(documents, 0))
    order = pc.sort_indices(table, _BEST_FIRST).to_numpy()
    table, places, n_grams = table.take(order), np.cumsum(sizes) - sizes, np.memmap(scratch / "sets", np.uint64, "r")
    match, similarity = _match(buckets[order], n_grams, places[order], sizes[order], threshold, stays)
    copies = np.flatnonzero(match >= 0)
    gone, kept = table.take(pa.array(copies)), table.take(pa.array(match[copies]))
    removed = {"document": gone["document"], "kept": kept["document"], "id": gone["id"], "source": gone["source"]}
    removed |= {"duplicate_of": kept["id"], "duplicate_of_source": kept["source"], "jaccard": similarity[copies]}
    return pa.table(removed | {"exact": pc.equal(gone["content"], kept["content"])}).sort_by("document")

"""Which texts are copies of which: exact ones by hash, near ones by MinHash-LSH with the Jaccard similarity checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from affinage.data.code_points import text_buffers
from affinage.data.compiled import kernel
from affinage.data.minhash import jaccard, sign, write_shingle_sets
from affinage.data.tasks import run_in_threads
from affinage.recipe.data import DeduplicateSettings

MAX_COMPARED = 256  # kept texts of one bucket that a text is compared with, the nearest in size first


class TextPart(Protocol):
    """Some texts that are read at once. Parts are read twice, possibly in several threads."""

    @property
    def rows(self) -> int:
        """How many texts."""

    def text(self) -> pa.Array:
        """The texts, a pyarrow string array."""


@dataclass(frozen=True)
class Duplicates:
    """What is known of N texts, in their order.

    kept: int64 [N], the text that stays in place of this one: itself if it is kept.
    similarity: float64 [N], the Jaccard similarity to the kept text; 1 for the kept.
    exact: bool [N], removed for the same content as another text.
    candidates: texts that shared a band with another. compared: pairs whose similarity was computed.
    capped: texts that were not compared with every kept text of a bucket (see MAX_COMPARED).
    """

    kept: np.ndarray
    similarity: np.ndarray
    exact: np.ndarray
    candidates: int
    compared: int
    capped: int


@dataclass(frozen=True)
class _Signed:
    content: np.ndarray
    keys: np.ndarray
    shingles: np.ndarray
    bytes: np.ndarray


def find_duplicates(
    parts: Sequence[TextPart], names: pa.Table, settings: DeduplicateSettings, workers: int | None = None
) -> Duplicates:
    """Find the exact and near duplicates among the texts of all parts.

    `names` ranks texts of equal length by its columns, in their order, ascending; it has one row per text.
    Of texts with the same content (case and white space apart) the best stays: the longest in bytes, then by name.
    Then, from the best text to the worst: a text with J >= `settings.jaccard` to a text that was kept is removed, any
    other is kept. So every removed text has a kept one this near, and no two kept ones are known to be this near. A
    union of all near pairs would not say so much: along a chain of small changes it removes texts unlike all that stay.
    The result does not depend on the number of workers; with the texts in another order it is the same texts.
    """
    signed = _sign_all(parts, settings, workers)
    rank = _ranks(signed, names)
    kept, exact = _exact(signed.content, rank)
    survivors = np.flatnonzero(~exact)
    candidates, buckets, bucket_count = _buckets(signed.keys[:, survivors])
    candidates = survivors[candidates]
    order = np.argsort(rank[candidates], kind="stable")
    candidates, buckets = candidates[order], buckets[order]
    sets, starts, sizes = _shingle_sets(parts, candidates, signed.shingles, settings.ngram, workers)
    match, near, compared, capped = _match(buckets, bucket_count, sets, starts, sizes, settings.jaccard, MAX_COMPARED)
    similarity = np.ones(kept.size)
    removed = match >= 0
    kept[candidates[removed]] = candidates[match[removed]]
    similarity[candidates[removed]] = near[removed]
    # An exact copy follows its original, which may itself be a near copy of another.
    similarity[exact] = similarity[kept[exact]]
    kept[exact] = kept[kept[exact]]
    return Duplicates(kept, similarity, exact, candidates.size, compared, capped)


def _sign_all(parts: Sequence[TextPart], settings: DeduplicateSettings, workers: int | None) -> _Signed:
    starts = np.concatenate([[0], np.cumsum([part.rows for part in parts], dtype=np.int64)])
    total = int(starts[-1])
    signed = _Signed(
        np.empty((2, total), np.uint64),
        np.empty((settings.bands, total), np.uint64),
        np.empty(total, np.int64),
        np.empty(total, np.int64),
    )

    def sign_part(index: int) -> None:
        text = parts[index].text()
        signature = sign(text, ngram=settings.ngram, bands=settings.bands, rows=settings.rows)
        here = slice(starts[index], starts[index + 1])
        signed.content[:, here], signed.keys[:, here] = signature.content, signature.keys
        signed.shingles[here] = signature.shingles
        signed.bytes[here] = np.diff(text_buffers(text)[1])

    run_in_threads(sign_part, range(len(parts)), workers=workers)
    return signed


def _ranks(signed: _Signed, names: pa.Table) -> np.ndarray:
    """Place of every text from best (0) to worst, int64 [N]. The content settles what length and names leave open."""
    table = names.append_column("_content", pa.array(signed.content[0])).append_column("_bytes", pa.array(signed.bytes))
    keys = [("_bytes", "descending"), *((name, "ascending") for name in names.column_names), ("_content", "ascending")]
    order = pa.compute.sort_indices(table, sort_keys=keys).to_numpy()
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    return rank


def _exact(content: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best text with the same content, int64 [N], and whether that is another one, bool [N]."""
    order = np.lexsort((rank, content[1], content[0]))
    first = np.ones(order.size, bool)
    first[1:] = (content[:, order[1:]] != content[:, order[:-1]]).any(0)
    kept = np.empty(order.size, np.int64)
    kept[order] = order[np.flatnonzero(first)][np.cumsum(first) - 1]
    return kept, kept != np.arange(kept.size)


def _buckets(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Texts that share a band key with another text, and the buckets they are in.

    Returns the texts, int64 [C], their bucket for each band or -1, int32 [C, bands], and how many buckets there are.
    """
    members: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    total = 0
    for band in keys:
        order = np.argsort(band, kind="stable")
        ordered = band[order]
        new, last = np.ones(order.size, bool), np.ones(order.size, bool)
        new[1:] = last[:-1] = ordered[1:] != ordered[:-1]
        shared, new = ~(new & last), new & ~last
        members.append(order[shared])
        numbers.append(np.cumsum(new)[shared] - 1 + total)
        total += int(new.sum())
    texts = np.unique(np.concatenate(members)) if members else np.zeros(0, np.int64)
    buckets = np.full((texts.size, len(keys)), -1, np.int32)
    for band, (member, number) in enumerate(zip(members, numbers)):
        buckets[np.searchsorted(texts, member), band] = number
    return texts, buckets, total


def _shingle_sets(
    parts: Sequence[TextPart], texts: np.ndarray, shingles: np.ndarray, ngram: int, workers: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The shingle set k of `texts[k]` is `out[starts[k] : starts[k] + sizes[k]]`; in that order returned."""
    room = np.concatenate([[0], np.cumsum(shingles[texts])])
    out = np.empty(int(room[-1]), np.uint64)
    sizes = np.zeros(texts.size, np.int64)
    bounds = np.concatenate([[0], np.cumsum([part.rows for part in parts], dtype=np.int64)])
    by_position = np.argsort(texts, kind="stable")
    cuts = np.searchsorted(texts[by_position], bounds)

    def fill(index: int) -> None:
        mine = by_position[cuts[index] : cuts[index + 1]]
        if mine.size:
            found = np.empty(mine.size, np.int64)
            rows = texts[mine] - bounds[index]
            write_shingle_sets(parts[index].text(), rows, ngram=ngram, out=out, starts=room[mine], sizes=found)
            sizes[mine] = found

    run_in_threads(fill, range(len(parts)), workers=workers)
    return out, room[:-1], sizes


@kernel
def _match(
    buckets: np.ndarray,
    bucket_count: int,
    sets: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    threshold: float,
    most: int,
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """From the first text to the last: the kept text it is a copy of, or -1, and their similarity.

    A text is compared with the kept texts of its buckets, the latest first: they are the nearest in length, and a text
    less than `threshold` times as large cannot be a copy. Kept texts of a bucket form a linked list (`head`, `link`).
    """
    texts, bands = buckets.shape
    match, similarity = np.full(texts, -1, np.int64), np.zeros(texts)
    head, link = np.full(bucket_count, -1, np.int64), np.full((texts, bands), -1, np.int64)
    asked = np.full(texts, -1, np.int64)  # the text that a kept one was last compared with
    compared, capped = 0, 0
    for text in range(texts):
        mine = sets[starts[text] : starts[text] + sizes[text]]
        cut = False
        for band in range(bands):
            other = head[buckets[text, band]] if buckets[text, band] >= 0 else -1
            steps = 0
            while other >= 0 and match[text] < 0:
                if steps == most:
                    cut = True
                    break
                small, large = min(sizes[text], sizes[other]), max(sizes[text], sizes[other])
                if asked[other] != text and small >= threshold * large:
                    asked[other] = text
                    compared += 1
                    near = jaccard(mine, sets[starts[other] : starts[other] + sizes[other]], threshold)
                    if near >= 0:
                        match[text], similarity[text] = other, near
                steps += 1
                other = link[other, band]
            if match[text] >= 0:
                break
        if match[text] < 0:
            capped += cut
            for band in range(bands):
                if buckets[text, band] >= 0:
                    link[text, band] = head[buckets[text, band]]
                    head[buckets[text, band]] = text
    return match, similarity, compared, capped

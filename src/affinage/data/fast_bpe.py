"""Byte-pair encoding with SentencePiece's ids, several times as fast: each distinct word is worked out once.

The rule is SentencePiece's (src/bpe_model.cc): begin with characters; of all neighbors whose joined spelling is a
piece, join the pair with the best score (the smallest id), the leftmost of equal ones; a character without a piece
becomes its bytes.
"""

import heapq
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt

from affinage.data.code_points import CODE_POINTS, characters, decode, kernel, text_buffers

# Classes of characters by which texts are cut into words.
OTHER, LETTER, SPACE, ALONE = 0, 1, 2, 3  # ALONE: newline and tab, tokens of their own that never join

CACHED_WORDS = 1 << 18  # that are remembered, about 30 MB; half the slots of their hash table; a power of two
_BYTES_PER_WORD = 16  # room in the cache, on average, and as many ids
_LONGEST_CACHED = 64  # bytes; a longer word hardly comes again
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Vocabulary(NamedTuple):
    """What encoding needs to know, as arrays."""

    classes: np.ndarray  # uint8 [code points]
    characters: np.ndarray  # int32 [code points]: the id of a character's piece, or -1
    bytes: np.ndarray  # int32 [256]: the id of every byte's piece
    pairs: np.ndarray  # int64 [n], sorted: left id << 32 | right id
    joined: np.ndarray  # int32 [n]: the id of the two joined


class Words(NamedTuple):
    """The words met so far."""

    slots: np.ndarray  # int32 [2 words]: number of a word, or -1
    spelling: np.ndarray  # int32 [words + 1]: where each word begins in `arena`
    first: np.ndarray  # int32 [words + 1]: where its ids begin in `ids`
    arena: np.ndarray  # uint8 [16 words]
    ids: np.ndarray  # int32 [16 words]
    held: np.ndarray  # int64 [1]: how many


class FastBpe:
    """Encodes texts by a vocabulary of pieces with byte fallback. Several threads may use it; one encodes at a time."""

    def __init__(self, pieces: Mapping[str, int], dtype: type[np.unsignedinteger]) -> None:
        """`pieces` are ids, which `dtype` holds, by spelling, with <0x00> to <0xFF> but without control tokens."""
        self._vocabulary, self._dtype = _vocabulary_of(pieces), np.dtype(dtype)
        self._words = Words(
            np.full(2 * CACHED_WORDS, -1, np.int32),
            np.zeros(CACHED_WORDS + 1, np.int32),
            np.zeros(CACHED_WORDS + 1, np.int32),
            np.empty(_BYTES_PER_WORD * CACHED_WORDS, np.uint8),
            np.empty(_BYTES_PER_WORD * CACHED_WORDS, np.int32),
            np.zeros(1, np.int64),
        )
        self._lock = threading.Lock()  # the kernel runs without the GIL, and writes the words

    def encode(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " texts"]]:
        """Return the ids of all texts, end to end, and where each text ends in them; surrogates must not occur."""
        data, offsets = text_buffers(pa.array(texts, pa.large_string()))
        ids = np.empty(int(offsets[-1] - offsets[0]) if len(texts) else 0, self._dtype)
        ends = np.empty(len(texts), np.int64)
        with self._lock:
            count = _encode_texts(data, offsets, self._vocabulary, self._words, ids, ends)
        return ids[:count], ends


def _vocabulary_of(pieces: Mapping[str, int]) -> Vocabulary:
    of_bytes = np.array([pieces[f"<0x{byte:02X}>"] for byte in range(256)], np.int32)
    bytes_ids = set(of_bytes.tolist())
    spelled = {piece: id_ for piece, id_ in pieces.items() if id_ not in bytes_ids}
    characters = np.full(CODE_POINTS, -1, np.int32)
    for piece, id_ in spelled.items():
        if len(piece) == 1:
            characters[ord(piece)] = id_
    joins = sorted(
        (spelled[piece[:cut]] << 32 | spelled[piece[cut:]], id_)
        for piece, id_ in spelled.items()
        for cut in range(1, len(piece))
        if piece[:cut] in spelled and piece[cut:] in spelled
    )
    pairs, joined = np.array(joins, np.int64).reshape(-1, 2).T.copy()
    return Vocabulary(_classes(list(spelled)), characters, of_bytes, pairs, joined.astype(np.int32))


def _classes(pieces: Sequence[str]) -> np.ndarray:
    """Return the class of every character by which texts are cut, the finest of which no piece lies across a cut."""
    data, offsets = text_buffers(pa.array(pieces, pa.large_string()))
    letters = np.strings.isalnum(characters()) & ~np.strings.isdecimal(characters())
    classes = np.where(letters, np.uint8(LETTER), np.uint8(OTHER))
    classes[ord(" ")] = SPACE
    classes[[ord("\n"), ord("\t")]] = ALONE
    bounds = [(start, end) for start, end in itertools.pairwise(offsets.astype(np.int64)) if end > start]
    for too_fine in (OTHER, SPACE):
        if any(_word_end(data, start, end, classes) != end for start, end in bounds):
            classes[classes == too_fine] = LETTER
    return classes


@kernel
def _word_end(data: np.ndarray, start: np.int64, end: np.int64, classes: np.ndarray) -> np.int64:
    """Where the word ends that begins at `start`: spaces, then characters of one class; or a newline or tab."""
    i, kind = start, np.int64(SPACE)
    while i < end:
        code, size = decode(data, i)
        here = np.int64(classes[code])
        if here != kind:
            if here == ALONE:
                return i if i > start else i + size
            if kind != SPACE:
                return i
            kind = here
        i += size
    return i


@kernel
def _join(left: np.int32, right: np.int32, known: Vocabulary) -> np.int32:
    """The id of the piece that two others spell together, or -1."""
    key = np.int64(left) << 32 | np.int64(right)
    place = np.searchsorted(known.pairs, key)
    if left < 0 or right < 0 or place == known.pairs.size or known.pairs[place] != key:
        return np.int32(-1)
    return known.joined[place]


@kernel
def _merge(
    data: np.ndarray, start: np.int64, end: np.int64, known: Vocabulary, out: np.ndarray, at: np.int64
) -> np.int64:
    """Encode one word into `out` from `at` on; where its ids end."""
    most = end - start
    piece, place = np.empty(most, np.int32), np.empty(most + 1, np.int64)
    count, i = 0, start
    while i < end:
        code, size = decode(data, i)
        piece[count], place[count] = known.characters[code], i
        count += 1
        i += size
    place[count] = end
    before, after = np.arange(-1, count - 1), np.arange(1, count + 1)
    heap = [np.int64(0) for _ in range(0)]  # of joined id << 32 | place of the left one
    for first in range(count - 1):
        joined = _join(piece[first], piece[first + 1], known)
        if joined >= 0:
            heap.append(np.int64(joined) << 32 | first)
    heapq.heapify(heap)
    while len(heap) > 0:
        best = heapq.heappop(heap)
        left, joined = best & 0xFFFFFFFF, np.int32(best >> 32)
        right = after[left]
        # Since it was put here, one of the two may have been joined with another.
        if place[left] < 0 or right >= count or _join(piece[left], piece[right], known) != joined:
            continue
        piece[left], place[right] = joined, -1
        after[left] = after[right]
        if after[left] < count:
            before[after[left]] = left
            following = _join(piece[left], piece[after[left]], known)
            if following >= 0:
                heapq.heappush(heap, np.int64(following) << 32 | left)
        if before[left] >= 0:
            leading = _join(piece[before[left]], piece[left], known)
            if leading >= 0:
                heapq.heappush(heap, np.int64(leading) << 32 | before[left])
    left = np.int64(0)
    while left < count:
        if piece[left] >= 0:
            out[at] = piece[left]
            at += 1
        else:  # a single character; the next one is the next part
            for byte in range(place[left], place[after[left]]):
                out[at] = known.bytes[data[byte]]
                at += 1
        left = after[left]
    return at


@kernel
def _find(data: np.ndarray, start: np.int64, end: np.int64, words: Words) -> tuple[int, np.uint64]:
    """The number of a word, or -1, and the slot that it has or would have."""
    code, last = np.uint64(end - start), np.uint64(words.slots.size - 1)
    for k in range(start, end):
        code = (code ^ np.uint64(data[k])) * _MIX
    slot = (code ^ (code >> np.uint64(29))) & last
    while words.slots[slot] >= 0:
        word = words.slots[slot]
        base = words.spelling[word]
        if words.spelling[word + 1] - base == end - start:
            for k in range(end - start):
                if words.arena[base + k] != data[start + k]:
                    break
            else:
                return word, slot
        slot = (slot + np.uint64(1)) & last
    return -1, slot


@kernel
def _encode_texts(
    data: np.ndarray, offsets: np.ndarray, known: Vocabulary, words: Words, out: np.ndarray, ends: np.ndarray
) -> np.int64:
    """Write the ids of all texts to `out`, as long as the texts have bytes, and their ends to `ends`; how many."""
    at = np.int64(0)
    for text in range(ends.size):
        start, stop = np.int64(offsets[text]), np.int64(offsets[text + 1])
        while start < stop:
            end = _word_end(data, start, stop, known.classes)
            short, begin = end - start <= _LONGEST_CACHED, at
            word, slot = _find(data, start, end, words) if short else (-1, np.uint64(0))
            if word >= 0:
                for k in range(words.first[word], words.first[word + 1]):
                    out[at] = words.ids[k]
                    at += 1
            else:
                at = _merge(data, start, end, known, out, at)
            if short and word < 0:
                word = words.held[0]
                spelling, first = words.spelling[word], words.first[word]
                if 2 * word == words.slots.size or spelling + 2 * _LONGEST_CACHED > words.arena.size:
                    words.slots[:] = -1  # full: begin again
                    words.held[0] = 0
                else:
                    words.slots[slot] = word
                    words.arena[spelling : spelling + end - start] = data[start:end]
                    words.ids[first : first + at - begin] = out[begin:at]
                    words.spelling[word + 1], words.first[word + 1] = spelling + end - start, first + at - begin
                    words.held[0] = word + 1
            start = end
        ends[text] = at
    return at

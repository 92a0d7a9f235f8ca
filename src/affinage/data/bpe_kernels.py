"""Byte-pair encoding of UTF-8 text by a SentencePiece vocabulary, compiled, each distinct word worked out once.

The rule is SentencePiece's (src/bpe_model.cc): begin with characters; of all neighbours whose joined spelling is a
piece, join the pair with the highest score, the leftmost of equal ones; a character without a piece becomes its bytes.
"""

from typing import NamedTuple

import numpy as np

from affinage.data.code_points import decode
from affinage.data.compiled import kernel

# Classes of characters for cutting texts into words.
OTHER, LETTER, SPACE, ALONE = 0, 1, 2, 3  # ALONE: newline and tab, tokens of their own that never join

MOST_WORDS = 1 << 18  # that a thread remembers; a power of two, and half the slots of its hash table
BYTES_OF_A_WORD = 16  # kept on average, and as many ids
LONGEST_KEPT = 64  # bytes; a longer word hardly comes again
_FULL = np.uint64(0x9E3779B97F4A7C15)


class Vocabulary(NamedTuple):
    """What encoding needs to know, as arrays."""

    classes: np.ndarray  # uint8 [code points]
    characters: np.ndarray  # int32 [code points]: the id of a character's piece, or -1
    bytes: np.ndarray  # int32 [256]: the id of every byte's piece
    scores: np.ndarray  # float32 [vocabulary]
    pairs: np.ndarray  # uint64 [2^k]: left id << 32 | right id, or all ones: a hash table
    joined: np.ndarray  # int32 [2^k]: the id of the two joined


class Words(NamedTuple):
    """The words met so far; of one thread."""

    slots: np.ndarray  # int32 [2 words]: number of a word, or -1
    hashes: np.ndarray  # uint64 [words]
    spelling: np.ndarray  # int32 [words + 1]: where each word begins in `arena`
    first: np.ndarray  # int32 [words + 1]: where its ids begin in `ids`
    arena: np.ndarray  # uint8 [16 words]
    ids: np.ndarray  # int32 [16 words]
    held: np.ndarray  # int64 [1]: how many


def no_words(most: int = MOST_WORDS) -> Words:
    """An empty memory of words, about 30 MB once it is full; `most` of them, a power of two from 16 on."""
    return Words(
        np.full(2 * most, -1, np.int32),
        np.empty(most, np.uint64),
        np.zeros(most + 1, np.int32),
        np.zeros(most + 1, np.int32),
        np.empty(BYTES_OF_A_WORD * most, np.uint8),
        np.empty(BYTES_OF_A_WORD * most, np.int32),
        np.zeros(1, np.int64),
    )


@kernel
def word_end(data: np.ndarray, start: np.int64, end: np.int64, classes: np.ndarray) -> np.int64:
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
def are_words(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> bool:
    """Whether no text is cut."""
    for text in range(offsets.size - 1):
        start, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
        if end > start and word_end(data, start, end, classes) != end:
            return False
    return True


@kernel
def insert_pairs(keys: np.ndarray, ids: np.ndarray, pairs: np.ndarray, joined: np.ndarray) -> None:
    """Fill the hash table of pairs."""
    last = np.uint64(pairs.size - 1)
    for k in range(keys.size):
        slot = (keys[k] * _FULL) >> np.uint64(32) & last
        while pairs[slot] != np.uint64(0xFFFFFFFFFFFFFFFF):
            slot = (slot + np.uint64(1)) & last
        pairs[slot], joined[slot] = keys[k], ids[k]


@kernel
def _join(left: np.int32, right: np.int32, pairs: np.ndarray, joined: np.ndarray) -> np.int32:
    """The id of the piece that two others spell together, or -1."""
    if left < 0 or right < 0:
        return np.int32(-1)
    key = np.uint64(left) << np.uint64(32) | np.uint64(right)
    last = np.uint64(pairs.size - 1)
    slot = (key * _FULL) >> np.uint64(32) & last
    while pairs[slot] != np.uint64(0xFFFFFFFFFFFFFFFF):
        if pairs[slot] == key:
            return joined[slot]
        slot = (slot + np.uint64(1)) & last
    return np.int32(-1)


@kernel
def _before(scores: np.ndarray, heap: np.ndarray, a: int, b: int) -> bool:
    """Whether the join at place `a` of the heap is to be made before the one at `b`."""
    one, other = scores[heap[a, 1]], scores[heap[b, 1]]
    return one > other or (one == other and heap[a, 0] < heap[b, 0])


@kernel
def _swap(heap: np.ndarray, a: int, b: int) -> None:
    for column in range(2):
        heap[a, column], heap[b, column] = heap[b, column], heap[a, column]


@kernel
def _push(heap: np.ndarray, size: int, left: int, piece: np.int32, scores: np.ndarray) -> int:
    heap[size, 0], heap[size, 1] = left, piece
    at = size
    while at > 0 and _before(scores, heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2
    return size + 1


@kernel
def _pop(heap: np.ndarray, size: int, scores: np.ndarray) -> int:
    """Move the first join behind the end of the heap."""
    size -= 1
    _swap(heap, 0, size)
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            return size
        if child + 1 < size and _before(scores, heap, child + 1, child):
            child += 1
        if not _before(scores, heap, child, at):
            return size
        _swap(heap, child, at)
        at = child


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
    heap, size = np.empty((3 * count, 2), np.int64), 0
    for left in range(count - 1):
        joined = _join(piece[left], piece[left + 1], known.pairs, known.joined)
        if joined >= 0:
            size = _push(heap, size, left, joined, known.scores)
    while size > 0:
        size = _pop(heap, size, known.scores)
        left, joined = heap[size, 0], np.int32(heap[size, 1])
        right = after[left]
        # Since it was put here, one of the two may have been joined with another.
        if place[left] < 0 or right >= count or _join(piece[left], piece[right], known.pairs, known.joined) != joined:
            continue
        piece[left], place[right] = joined, -1
        after[left] = after[right]
        if after[left] < count:
            before[after[left]] = left
            following = _join(piece[left], piece[after[left]], known.pairs, known.joined)
            if following >= 0:
                size = _push(heap, size, left, following, known.scores)
        if before[left] >= 0:
            leading = _join(piece[before[left]], piece[left], known.pairs, known.joined)
            if leading >= 0:
                size = _push(heap, size, before[left], leading, known.scores)
    left = 0
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
def _find(data: np.ndarray, start: np.int64, end: np.int64, code: np.uint64, words: Words) -> tuple[int, np.uint64]:
    """The number of a word, or -1, and the slot that it has or would have."""
    last = np.uint64(words.slots.size - 1)
    slot = (code ^ (code >> np.uint64(29))) & last
    while words.slots[slot] >= 0:
        word = words.slots[slot]
        if words.hashes[word] == code and words.spelling[word + 1] - words.spelling[word] == end - start:
            same, base = True, words.spelling[word]
            for k in range(end - start):
                if words.arena[base + k] != data[start + k]:
                    same = False
                    break
            if same:
                return word, slot
        slot = (slot + np.uint64(1)) & last
    return -1, slot


@kernel
def _remember(
    data: np.ndarray, start: np.int64, end: np.int64, code: np.uint64, slot: np.uint64, words: Words, ids: np.ndarray
) -> None:
    """Keep a word and its ids."""
    word = words.held[0]
    spelling, first = words.spelling[word], words.first[word]
    words.slots[slot], words.hashes[word] = word, code
    words.arena[spelling : spelling + end - start] = data[start:end]
    words.ids[first : first + ids.size] = ids
    words.spelling[word + 1], words.first[word + 1] = spelling + end - start, first + ids.size
    words.held[0] = word + 1


@kernel
def encode_texts(
    data: np.ndarray, offsets: np.ndarray, known: Vocabulary, words: Words, out: np.ndarray, ends: np.ndarray
) -> np.int64:
    """Write the ids of all texts to `out` (as long as the texts have bytes), and where each ends to `ends`; how many.

    `data` and `offsets` are those of `code_points.text_buffers`.
    """
    at = np.int64(0)
    for text in range(ends.size):
        start, stop = np.int64(offsets[text]), np.int64(offsets[text + 1])
        while start < stop:
            end = word_end(data, start, stop, known.classes)
            if end - start > LONGEST_KEPT:
                at = _merge(data, start, end, known, out, at)
                start = end
                continue
            code = np.uint64(end - start)
            for k in range(start, end):
                code = (code ^ np.uint64(data[k])) * _FULL
            word, slot = _find(data, start, end, code, words)
            if word >= 0:
                for k in range(words.first[word], words.first[word + 1]):
                    out[at] = words.ids[k]
                    at += 1
            else:
                begin = at
                at = _merge(data, start, end, known, out, at)
                held = words.held[0]
                if held == words.hashes.size or words.spelling[held] + 2 * LONGEST_KEPT > words.arena.size:
                    words.slots[:] = -1
                    words.held[0] = 0
                else:
                    _remember(data, start, end, code, slot, words, out[begin:at])
            start = end
        ends[text] = at
    return at

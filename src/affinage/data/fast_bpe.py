"""Byte-pair encoding with SentencePiece's ids, several times as fast: each distinct word is worked out once.

The rule is SentencePiece's (src/bpe_model.cc): begin with characters; of all neighbors whose joined spelling is a
piece, join the pair with the best score (the smallest id), the leftmost of equal ones; a character without a piece
becomes its bytes.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt

from affinage.data.code_points import CODE_POINTS, characters, decode, kernel, text_buffers

# Classes of characters by which texts are cut into words.
OTHER, LETTER, SPACE, ALONE = 0, 1, 2, 3  # ALONE: newline and tab, tokens of their own that never join


class Vocabulary(NamedTuple):
    """What encoding needs to know, as arrays."""

    classes: np.ndarray  # uint8 [code points]
    characters: np.ndarray  # int32 [code points]: the id of a character's piece, or -1
    bytes: np.ndarray  # int32 [256]: the id of every byte's piece
    first: np.ndarray  # int64 [ids + 1]: where the pairs begin of which an id is the left one
    pairs: np.ndarray  # int64 [n], sorted within those of an id: right id << 32 | the id of the two joined


class FastBpe:
    """Encodes texts by a vocabulary of pieces with byte fallback."""

    def __init__(self, pieces: Mapping[str, int], dtype: type[np.unsignedinteger]) -> None:
        """`pieces` are ids, which `dtype` holds, by spelling, with <0x00> to <0xFF> but without control tokens."""
        of_bytes = np.array([pieces[f"<0x{byte:02X}>"] for byte in range(256)], np.int32)
        bytes_ids = set(of_bytes.tolist())
        spelled = {piece: id_ for piece, id_ in pieces.items() if id_ not in bytes_ids}
        of_characters = np.full(CODE_POINTS, -1, np.int32)
        single = [piece for piece in spelled if len(piece) == 1]
        of_characters[[*map(ord, single)]] = [spelled[piece] for piece in single]
        joins = sorted(
            (spelled[piece[:cut]], spelled[piece[cut:]] << 32 | id_)
            for piece, id_ in spelled.items()
            for cut in range(1, len(piece))
            if piece[:cut] in spelled and piece[cut:] in spelled
        )
        left, pairs = np.array(joins, np.int64).reshape(-1, 2).T.copy()
        first = np.searchsorted(left, np.arange(max(pieces.values()) + 2))
        self._vocabulary = Vocabulary(_classes(list(spelled)), of_characters, of_bytes, first, pairs)
        self._dtype = dtype

    def encode(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " texts"]]:
        """Return the ids of all texts, end to end, and where each text ends in them; surrogates must not occur."""
        data, offsets = text_buffers(pa.array(texts, pa.large_string()))
        cuts, ends = _cut(data, offsets, self._vocabulary.classes)
        words = pa.LargeStringArray.from_buffers(len(cuts) - 1, pa.py_buffer(cuts), pa.py_buffer(data))
        words = words.dictionary_encode()
        distinct, bounds = text_buffers(words.dictionary)
        spelled, ids = np.empty(len(distinct), self._dtype), np.empty(len(data), self._dtype)
        bounds = _merge(distinct, bounds, self._vocabulary, spelled)
        return ids[: _spell(words.indices.to_numpy(), spelled, bounds, ids, ends)], ends


def _classes(pieces: Sequence[str]) -> np.ndarray:
    """Return the class of every character by which texts are cut, the finest of which no piece lies across a cut."""
    data, offsets = text_buffers(pa.array(pieces, pa.large_string()))
    letters = np.strings.isalnum(characters()) & ~np.strings.isdecimal(characters())
    classes = np.where(letters, np.uint8(LETTER), np.uint8(OTHER))
    classes[ord(" ")] = SPACE
    classes[[ord("\n"), ord("\t")]] = ALONE
    for too_fine in (OTHER, SPACE):
        if len(_cut(data, offsets, classes)[0]) > len(offsets):  # there are more words than pieces
            classes[classes == too_fine] = LETTER
    return classes


@kernel
def _cut(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the words of all texts begin, int64 [words + 1], and how many come before each text's end.

    A word is spaces, then characters of one class; or a newline or tab.
    """
    cuts, ends = np.empty(data.size + 1, np.int64), np.empty(offsets.size - 1, np.int64)
    count, i = 0, np.int64(0)
    for text in range(ends.size):
        before = ALONE  # the class of the character before: a text begins with a word
        while i < offsets[text + 1]:
            code, size = decode(data, i)
            here = classes[code]
            if here == ALONE or (before != here and before != SPACE):
                cuts[count] = i
                count += 1
            before = here
            i += size
        ends[text] = count
    cuts[count] = i
    return cuts[: count + 1], ends


@kernel
def _join(left: np.int32, right: np.int32, known: Vocabulary) -> np.int32:
    """The id of the piece that two others spell together, or -1."""
    if left < 0 or right < 0:
        return np.int32(-1)
    place, last = known.first[left], known.first[left + 1]
    place += np.searchsorted(known.pairs[place:last], np.int64(right) << 32)
    if place == last or known.pairs[place] >> 32 != right:
        return np.int32(-1)
    return np.int32(known.pairs[place])


@kernel
def _merge(data: np.ndarray, offsets: np.ndarray, known: Vocabulary, out: np.ndarray) -> np.ndarray:
    """Write the ids of words to `out`, as long as the words have bytes; return where each begins, int64 [words + 1]."""
    bounds, at = np.zeros(offsets.size, np.int64), np.int64(0)
    most = 1 + (np.diff(offsets).max() if offsets.size > 1 else 0)
    piece, pair, place = np.empty(most, np.int32), np.empty(most, np.int64), np.empty(most, np.int64)
    before, after = np.empty(most, np.int64), np.empty(most, np.int64)
    heap = [np.int64(0) for _ in range(0)]  # of joined id << 32 | place of the left one
    for word in range(offsets.size - 1):
        count, i = 0, np.int64(offsets[word])
        while i < offsets[word + 1]:
            code, size = decode(data, i)
            piece[count], place[count], before[count], after[count] = known.characters[code], i, count - 1, count + 1
            count += 1
            i += size
        piece[count], place[count] = -1, i
        for first in range(count):
            pair[first] = _join(piece[first], piece[first + 1], known)
            if pair[first] >= 0:
                heap.append(pair[first] << 32 | first)
        heapq.heapify(heap)
        while len(heap) > 0:
            best = heapq.heappop(heap)
            left = best & 0xFFFFFFFF
            if pair[left] != best >> 32:  # since it was put here, one of the two was joined with another
                continue
            right = after[left]
            piece[left], pair[right], after[left] = pair[left], -1, after[right]
            before[after[left]] = left
            for changed in (before[left], left):
                if changed >= 0:
                    pair[changed] = _join(piece[changed], piece[after[changed]], known)
                    if pair[changed] >= 0:
                        heapq.heappush(heap, pair[changed] << 32 | changed)
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
        bounds[word + 1] = at
    return bounds


@kernel
def _spell(words: np.ndarray, ids: np.ndarray, bounds: np.ndarray, out: np.ndarray, ends: np.ndarray) -> int:
    """Write the ids of words, by their numbers, to `out`; turn `ends` of texts in words to those in ids. How many."""
    at = word = 0
    for text in range(ends.size):
        while word < ends[text]:
            for k in range(bounds[words[word]], bounds[words[word] + 1]):
                out[at] = ids[k]
                at += 1
            word += 1
        ends[text] = at
    return at

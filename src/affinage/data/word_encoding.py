"""SentencePiece's ids, faster: a compiled encoder with its vocabulary, which remembers the words it has met."""

import threading
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
import sentencepiece
from jaxtyping import Int64, UInt

from affinage.data.bpe_kernels import (
    ALONE,
    LETTER,
    MOST_WORDS,
    OTHER,
    SPACE,
    Vocabulary,
    Words,
    are_words,
    encode_texts,
    insert_pairs,
    no_words,
)
from affinage.data.code_points import CODE_POINTS, letters_table, text_buffers

_SPACE = "\u2581"  # how SentencePiece spells a space inside a piece
WORTH_COMPILING = 1_000_000  # characters: fewer, SentencePiece has done in a quarter of a second


class WordEncoder:
    """Encodes texts with the ids that SentencePiece gives.

    Seven times as fast on one core from the start, eleven once the words are known, and threads run side by side
    (benchmarks/data_encode.py). kitoken, in Rust, is
    4 times as fast as SentencePiece with the same ids, but has a single author; Hugging Face's `tokenizers` with the
    same vocabulary is as fast as SentencePiece a core. The first megabyte is left to SentencePiece itself.
    """

    def __init__(
        self,
        model: sentencepiece.SentencePieceProcessor,
        first_piece: int,
        dtype: type[np.unsignedinteger],
        *,
        compile_from: int = WORTH_COMPILING,
        most_words: int = MOST_WORDS,
    ) -> None:
        """`first_piece` is the first id that BPE may join from others; `dtype` holds every id.

        The first `compile_from` characters are left to SentencePiece; a thread remembers `most_words` words, a power
        of two.
        """
        self._model, self._first_piece, self._dtype = model, first_piece, np.dtype(dtype)
        self._compile_from, self._most_words = compile_from, most_words
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._encoded = 0  # characters

    def encode(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " texts"]]:
        """Ids of all texts, end to end, and where each text ends in them. U+2581 and surrogates must not occur."""
        self._encoded += sum(map(len, texts))
        if self._encoded < self._compile_from:
            return self._by_sentencepiece(texts)
        data, offsets = text_buffers(pa.array(texts, pa.large_string()))
        ids = np.empty(int(offsets[-1] - offsets[0]) if len(texts) else 0, self._dtype)
        ends = np.empty(len(texts), np.int64)
        count = encode_texts(data, offsets, self._known(), self._words(), ids, ends)
        return ids[:count], ends

    def _by_sentencepiece(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._model.encode(list(texts))
        ends = np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
        return np.fromiter(chain.from_iterable(encoded), self._dtype, int(ends[-1]) if len(ends) else 0), ends

    def _words(self) -> Words:
        """This thread's words."""
        if not hasattr(self._of_thread, "words"):
            self._of_thread.words = no_words(self._most_words)
        words: Words = self._of_thread.words
        return words

    def _known(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._model, self._first_piece)
            return self._vocabulary


def vocabulary_of(model: sentencepiece.SentencePieceProcessor, first_piece: int) -> Vocabulary:
    """The vocabulary of a SentencePiece BPE model with byte fallback, as arrays; ids from `first_piece` on may join."""
    size = model.get_piece_size()
    pieces = {model.id_to_piece(i).replace(_SPACE, " "): i for i in range(first_piece, size) if not model.is_byte(i)}
    characters = np.full(CODE_POINTS, -1, np.int32)
    for piece, number in pieces.items():
        if len(piece) == 1:
            characters[ord(piece)] = number
    for alone in "\n\t":
        characters[ord(alone)] = model.piece_to_id(alone)
    halves = [
        (pieces[piece[:cut]], pieces[piece[cut:]], number)
        for piece, number in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    left, right, whole = np.array(halves, np.int64).reshape(-1, 3).T
    room = 1 << max(4, (2 * len(halves)).bit_length())
    pairs, joined = np.full(room, 2**64 - 1, np.uint64), np.zeros(room, np.int32)
    insert_pairs((left << 32 | right).astype(np.uint64), whole.astype(np.int32), pairs, joined)
    of_bytes = np.array([model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)], np.int32)
    scores = np.array([model.get_score(i) for i in range(size)], np.float32)
    return Vocabulary(_classes(list(pieces)), characters, of_bytes, scores, pairs, joined)


def _classes(pieces: Sequence[str]) -> np.ndarray:
    """Classes of all characters by which texts may be cut: no piece lies across a cut, so no join does.

    The finest that the pieces allow: letters and other signs, each with the spaces before them; words with the spaces
    before them; lines.
    """
    data, offsets = text_buffers(pa.array(pieces, pa.large_string()))
    classes = np.where(letters_table(), np.uint8(LETTER), np.uint8(OTHER))
    classes[ord(" ")] = SPACE
    classes[[ord("\n"), ord("\t")]] = ALONE
    if not are_words(data, offsets, classes):
        classes[classes == OTHER] = LETTER
    if not are_words(data, offsets, classes):
        classes[classes == SPACE] = LETTER
    return classes

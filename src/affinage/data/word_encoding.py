"""SentencePiece on long texts, faster: words are encoded once and then looked up."""

import re
from array import array
from collections.abc import Sequence

import numpy as np
import sentencepiece
from jaxtyping import Int64, UInt

# Ways to cut a text, the finest first: into letters or other signs with the spaces before them, into words with the
# spaces before them, not at all. Where no piece of a vocabulary lies across a cut, no merge does, and the parts can be
# encoded one by one. Newline and tab are tokens of their own.
_CUTS = (
    re.compile(r" *+[^\W\d_]++| *+(?:[^\w \n\t]|[\d_])++| ++|[\n\t]"),
    re.compile(r" *+[^ \n\t]++| ++|[\n\t]"),
    re.compile(r"(?s:.++)"),
)
_LONGEST_KEPT = 64  # characters; what is longer hardly comes again
_WORDS_KEPT = 1_000_000  # about 200 MB


class WordEncoder:
    """Encodes texts with the ids that SentencePiece gives, asking it once for every distinct word.

    Two and a half to three times faster than SentencePiece on English and French (benchmarks/data_encode.py), four
    times once the words are known. kitoken, in Rust, is four times faster from the start, but has a single author.
    """

    def __init__(
        self, model: sentencepiece.SentencePieceProcessor, first_piece: int, dtype: type[np.unsignedinteger]
    ) -> None:
        """`first_piece` is the first id that BPE may join from others; `dtype` holds every id."""
        ids = (i for i in range(first_piece, model.get_piece_size()) if not model.is_byte(i))
        pieces = [model.id_to_piece(i).replace("\u2581", " ") for i in ids]
        self._cut = next(cut for cut in _CUTS if all(map(cut.fullmatch, pieces)))
        self._words = _Words(model, np.dtype(dtype).char)
        self._dtype = np.dtype(dtype)

    def encode(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " texts"]]:
        """Ids of all texts, end to end, and where each text ends in them. U+2581 and surrogates must not occur."""
        look_up, cut = self._words.__getitem__, self._cut.findall
        encoded = [b"".join(map(look_up, cut(text))) for text in texts]
        ends = np.cumsum([len(ids) for ids in encoded], dtype=np.int64) // self._dtype.itemsize
        return np.frombuffer(b"".join(encoded), self._dtype), ends


class _Words(dict[str, bytes]):
    """The ids of every word met so far, as bytes that can be joined."""

    def __init__(self, model: sentencepiece.SentencePieceProcessor, typecode: str) -> None:
        super().__init__()
        self._model = model
        self._typecode = typecode

    def __missing__(self, word: str) -> bytes:
        ids = array(self._typecode, self._model.encode(word)).tobytes()
        if len(word) <= _LONGEST_KEPT:
            if len(self) >= _WORDS_KEPT:
                self.clear()
            self[word] = ids
        return ids

"""A SentencePiece BPE model as a tokenizer."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from affinage.data.atomic import write_atomically
from affinage.data.special_tokens import CONTROL_PIECES, FIXED_PIECES
from affinage.data.tokenizer import MODEL, REPLACEMENT, Tokenizer, read_sentencepiece
from affinage.data.word_encoding import WordEncoder
from affinage.errors import UserError

_SURROGATES = re.compile("[\ud800-\udfff]")  # not encodable; JSON can smuggle them into a str
_SPACE = "\u2581"  # how SentencePiece spells a space inside a piece


class BpeTokenizer(Tokenizer):
    """A SentencePiece BPE model with byte fallback: every text has ids, and decodes to itself.

    The one exception is U+2581, SentencePiece's sign for a space, which decodes as a space; cleaning removes it.
    """

    kind = "bpe"

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._model = read_sentencepiece(self._path)
        pieces = [self._model.id_to_piece(i) for i in range(len(FIXED_PIECES))]
        if pieces != list(FIXED_PIECES) or not all(self._model.is_control(i) for i in range(2, len(CONTROL_PIECES))):
            raise UserError(
                f"the first ids are {pieces}, not {list(FIXED_PIECES)}",
                where=str(path),
                fix="Of another project's model, tokenizer.json is read, which transformers makes of this file:\n"
                "  AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        self._piece_bytes = np.array([self._bytes_of(i) for i in range(self.vocabulary)], np.int64)
        self._words = WordEncoder(self._model, len(FIXED_PIECES), self.dtype)

    def _bytes_of(self, token: int) -> int:
        if token < len(CONTROL_PIECES):
            return 0
        if self._model.is_byte(token):
            return 1
        return len(self._model.id_to_piece(token).replace(_SPACE, " ").encode())

    @property
    def vocabulary(self) -> int:
        """Number of ids, the ten fixed ones included."""
        return int(self._model.get_piece_size())

    @property
    def model_path(self) -> Path:
        """The SentencePiece model file."""
        return self._path

    @property
    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for, int64 [vocabulary]; 0 for control tokens."""
        return self._piece_bytes

    def write(self, folder: Path) -> None:
        """A copy of the SentencePiece model file."""
        write_atomically(folder / MODEL, self._path.read_bytes())

    def encode(self, text: str) -> list[int]:
        """Ids of raw text: no <s> or </s> is added, and text that spells a control token stays text."""
        ids: list[int] = self._model.encode(_plain(text))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        flat, ends = self.encode_flat(texts)
        return [part.tolist() for part in np.split(flat, ends[:-1])] if len(texts) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """`encode` of every text, end to end: ids `dtype` [tokens] and where each text ends in them, int64 [texts].

        Faster than SentencePiece on whole texts, with the same ids: see WordEncoder.
        """
        return self._words.encode([_plain(text) for text in texts])

    def id_to_piece(self, token: int) -> str:
        """How the vocabulary spells one id; a leading space is U+2581, a byte is <0x41>."""
        return str(self._model.id_to_piece(token))

    def byte_lengths(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """UTF-8 bytes that each id of `encode(text)` stands for, int64 [len(ids)]; they sum to the text's bytes."""
        return self.piece_bytes[np.asarray(ids, np.int64)]

    def _decode_text(self, ids: list[int]) -> str:
        return str(self._model.decode(ids)) if ids else ""


def _plain(text: str) -> str:
    """The text as SentencePiece sees it: its sign for a space is a space."""
    return (text if text.isascii() else _SURROGATES.sub(REPLACEMENT, text)).replace(_SPACE, " ")

"""A tokenizer with an id for every character."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from affinage.data.atomic import write_atomically
from affinage.data.special_tokens import CONTROL_PIECES, FIXED_PIECES, UNK
from affinage.data.tokenizer import CHARACTERS, Tokenizer
from affinage.errors import UserError


class CharacterTokenizer(Tokenizer):
    """One id per character of the training text, after the ten fixed ones; every other character is <unk>."""

    kind = "char"

    def __init__(self, characters: Sequence[str]) -> None:
        self._pieces = [*FIXED_PIECES, *characters]
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i >= len(CONTROL_PIECES)}

    @classmethod
    def read(cls, path: Path) -> "CharacterTokenizer":
        """From the JSON file that `write` made."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["characters"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError("this is not a list of characters", where=str(path)) from error

    def write(self, folder: Path) -> None:
        """As JSON: {"characters": [...]}, in the order of their ids from 10 on."""
        content = json.dumps({"characters": self._pieces[len(FIXED_PIECES) :]}, ensure_ascii=False, indent=0)
        write_atomically(folder / CHARACTERS, content.encode())

    @property
    def vocabulary(self) -> int:
        """Number of ids, the ten fixed ones included."""
        return len(self._pieces)

    @property
    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for, int64 [vocabulary]; 0 for control tokens, <unk> among them."""
        texts = ["" if i < len(CONTROL_PIECES) else piece for i, piece in enumerate(self._pieces)]
        return np.array([len(text.encode()) for text in texts], np.int64)

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, one per character; characters never seen in training are <unk>."""
        get = self._ids.get
        return [get(character, UNK) for character in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def id_to_piece(self, token: int) -> str:
        """The character, or the name of the control token."""
        return self._pieces[token]

    def byte_lengths(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """UTF-8 bytes that each id of `encode(text)` stands for, int64 [len(ids)]; they sum to the text's bytes."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return (1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)).astype(np.int64)

    def _decode_text(self, ids: list[int]) -> str:
        return "".join([self._pieces[i] for i in ids])

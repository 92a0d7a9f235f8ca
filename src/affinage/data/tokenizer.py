"""Text to token ids and back, with the first ten ids the same in every tokenizer."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import sentencepiece

from affinage.data.chat_template import ChatTemplate
from affinage.data.special_tokens import (
    BOS,
    CONTROL_PIECES,
    EOS,
    FIXED_PIECES,
    IM_END,
    IM_START,
    MARKS,
    PAD,
    UNK,
    Marks,
    frame,
    shielded_piece,
)
from affinage.errors import UserError

MODEL = "tokenizer.model"
CHARACTERS = "characters.json"
REPLACEMENT = "\ufffd"  # what decoding gives for bytes and ids that are no text


class Tokenizer(ABC):
    """Maps text to ids and back. Ids 0 to 7 are control tokens that raw text never produces."""

    kind: str
    template: ChatTemplate | None = None  # what conversations are written in; None: ChatML
    fixed_ids: ClassVar[bool] = True  # whether the first ten ids are affinage's

    @staticmethod
    def load(folder: Path | str) -> "Tokenizer":
        """The tokenizer that `train_tokenizer` wrote into `folder`, of either kind.

        Raises UserError if there is none.
        """
        from affinage.data.bpe_tokenizer import BpeTokenizer  # subclasses, so not importable above
        from affinage.data.character_tokenizer import CharacterTokenizer
        from affinage.data.hub_tokenizer import HubTokenizer

        folder = Path(folder)
        if (folder / MODEL).is_file() and not _is_foreign(folder):
            return BpeTokenizer(folder / MODEL)
        if (folder / CHARACTERS).is_file():
            return CharacterTokenizer.read(folder / CHARACTERS)
        if (folder / "tokenizer.json").is_file():
            return HubTokenizer(folder)
        raise UserError(
            "there is no tokenizer here",
            where=str(folder),
            fix=f"a tokenizer folder holds {MODEL} (SentencePiece), {CHARACTERS} or tokenizer.json",
        )

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of ids, the ten fixed ones included."""

    @property
    def opening(self) -> tuple[int, ...]:
        """Ids that a text begins with: <s>."""
        return (self.bos,)

    @property
    def bos(self) -> int:
        """The id that stands for an empty context."""
        return BOS

    @property
    def eos(self) -> int:
        """The id that ends a text."""
        return EOS

    @property
    def pad(self) -> int | None:
        """The id that fills rows up, if there is one for it."""
        return PAD

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end what a model says."""
        ends = () if self.template is None else self.template.ends(self)
        return tuple(dict.fromkeys((*self._stops, *ends)))

    @property
    def _stops(self) -> tuple[int, ...]:
        return (EOS, IM_END)

    def use_template(self, source: str | None) -> None:
        """Write conversations in this Jinja template; in ChatML if None. Raises UserError if it is none."""
        self.template = None if source is None else ChatTemplate(source, self.special_tokens)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings of the tokens that a chat template may name, as of an exported chat model."""
        named = {"bos_token": BOS, "eos_token": IM_END, "pad_token": PAD, "unk_token": UNK}
        return {name: CONTROL_PIECES[token] for name, token in named.items()}

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of what a chat template made, and the characters of the text that each stands for.

        What spells a control token is that token, unless it is shielded: see `affinage.data.chat_template.shield`.
        """
        controls, shielded = self.controls, {shielded_piece(piece): piece for piece in self.controls}
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for part in re.split(self._spelled, text):
            if part in controls:
                ids.append(controls[part])
                offsets.append((at, at + len(part)))
            elif part:
                plain, places = _without(part, shielded)
                found = self.encode(plain)
                ids += found
                offsets += [(at + places[a], at + places[b]) for a, b in self._characters(plain, found)]
            at += len(part)
        return ids, offsets

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        pieces = sorted(self.controls, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, pieces)) + ")")

    def _characters(self, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The characters that each id of `encode(text)` stands for; those of one character's bytes have it all."""
        ends = np.cumsum(self.byte_lengths(text, ids))
        before = np.cumsum([0, *(len(character.encode("utf-8", "surrogatepass")) for character in text)])
        starts = np.searchsorted(before, np.concatenate([[0], ends[:-1]]), side="right") - 1
        return list(zip(starts.tolist(), np.searchsorted(before, ends, side="left").tolist(), strict=True))

    @property
    def marks(self) -> Marks:
        """What rows of its ids are read by."""
        return MARKS

    def frame(self, language: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after the text of a document."""
        return frame(language)

    @property
    def chat_ids(self) -> tuple[int, int]:
        """The ids of ChatML's <|im_start|> and <|im_end|>; UserError where the vocabulary has none."""
        return (IM_START, IM_END)

    @property
    def controls(self) -> dict[str, int]:
        """The ids that raw text never becomes, by their spelling."""
        return {piece: token for token, piece in enumerate(CONTROL_PIECES)}

    def encode_message(self, role: str, content: str) -> tuple[list[int], int]:
        """Ids of `{role}\\n{content}`, and how many of them are not the content's."""
        head = self.encode(role + "\n")
        return [*head, *self.encode(content)], len(head)

    @property
    def model_path(self) -> Path | None:
        """The SentencePiece model file, or None if this tokenizer is not one."""
        return None

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the file that `load` reads into `folder`."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of raw text: no <s> or </s> is added, and text that spells a control token stays text."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """`encode` of every text, end to end: ids `dtype` [tokens] and where each text ends in them, int64 [texts]."""
        encoded = self.encode_batch(texts)
        ends = np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(encoded), self.dtype, int(ends[-1]) if len(ends) else 0)
        return flat, ends

    @abstractmethod
    def id_to_piece(self, token: int) -> str:
        """How the vocabulary spells one id."""

    @property
    @abstractmethod
    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for, int64 [vocabulary]; 0 for control tokens."""

    @abstractmethod
    def byte_lengths(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """UTF-8 bytes that each id of `encode(text)` stands for, int64 [len(ids)]; they sum to the text's bytes."""

    @abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """Text of ids among which there is no control token."""

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest unsigned type that holds every id."""
        return np.uint16 if self.vocabulary < 2**16 else np.uint32

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Text of ids. Control tokens are left out, or spelled if `keep_special`; what is no text decodes as U+FFFD."""
        parts: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if len(CONTROL_PIECES) <= token < self.vocabulary:
                run.append(token)
                continue
            parts.append(self._decode_text(run))
            run = []
            if 0 <= token < len(CONTROL_PIECES):
                parts.append(CONTROL_PIECES[token] if keep_special else REPLACEMENT if token == UNK else "")
            else:
                parts.append(REPLACEMENT)
        return "".join([*parts, self._decode_text(run)])


def _without(text: str, shielded: dict[str, str]) -> tuple[str, list[int]]:
    """The text without its shields, and where each of its characters, and its end, stand in the text."""
    places: list[int] = []
    at = 0
    for part in re.split("(" + "|".join(map(re.escape, shielded)) + ")", text):
        places += [at, *range(at + 2, at + len(part))] if part in shielded else range(at, at + len(part))
        at += len(part)
    return "".join(text[place] for place in places), [*places, len(text)]


def _is_foreign(folder: Path) -> bool:
    """Whether the SentencePiece model is one of another project's, with a tokenizer.json beside it."""
    if not (folder / "tokenizer.json").is_file():
        return False
    model = read_sentencepiece(folder / MODEL)
    return [model.id_to_piece(i) for i in range(len(FIXED_PIECES))] != list(FIXED_PIECES)


def read_sentencepiece(path: Path) -> sentencepiece.SentencePieceProcessor:
    """The model in a file. Raises UserError if there is none in it."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError, TypeError) as error:
        raise UserError("this is not a model of SentencePiece", where=str(path)) from error

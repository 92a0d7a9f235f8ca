"""Text to token ids and back, with the first ten ids the same in every tokenizer."""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import sentencepiece

from affinage.data.atomic import write_atomically
from affinage.data.chat_template import ChatTemplate
from affinage.data.fertility import measure
from affinage.data.special_tokens import (
    BOS,
    CODE,
    CONTROL_PIECES,
    ENDCODE,
    EOS,
    FIXED_PIECES,
    IM_END,
    IM_START,
    MARKS,
    NEWLINE,
    PAD,
    TAB,
    UNK,
    Marks,
    frame,
    shielded_piece,
)
from affinage.data.tokenizer_training import balanced_sample, collect_characters, train_bpe
from affinage.data.word_encoding import WordEncoder
from affinage.errors import UserError
from affinage.recipe.data import TokenizerSettings

__all__ = [
    "BOS",
    "CODE",
    "ENDCODE",
    "EOS",
    "IM_END",
    "IM_START",
    "NEWLINE",
    "PAD",
    "TAB",
    "UNK",
    "BpeTokenizer",
    "CharacterTokenizer",
    "Tokenizer",
    "train_tokenizer",
]

_MODEL = "tokenizer.model"
_CHARACTERS = "characters.json"
_REPLACEMENT = "\ufffd"  # what decoding gives for bytes and ids that are no text
_SURROGATES = re.compile("[\ud800-\udfff]")  # not encodable; JSON can smuggle them into a str
_SPACE = "\u2581"  # how SentencePiece spells a space inside a piece


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
        folder = Path(folder)
        if (folder / _MODEL).is_file() and not _is_foreign(folder):
            return BpeTokenizer(folder / _MODEL)
        if (folder / _CHARACTERS).is_file():
            return CharacterTokenizer.read(folder / _CHARACTERS)
        if (folder / "tokenizer.json").is_file():
            from affinage.data.hub_tokenizer import HubTokenizer  # a subclass, so not importable above

            return HubTokenizer(folder)
        raise UserError(
            "there is no tokenizer here",
            where=str(folder),
            fix=f"a tokenizer folder holds {_MODEL} (SentencePiece), {_CHARACTERS} or tokenizer.json",
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
                parts.append(CONTROL_PIECES[token] if keep_special else _REPLACEMENT if token == UNK else "")
            else:
                parts.append(_REPLACEMENT)
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
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / _MODEL))
    return [model.id_to_piece(i) for i in range(len(FIXED_PIECES))] != list(FIXED_PIECES)


def _plain(text: str) -> str:
    """The text as SentencePiece sees it: its sign for a space is a space."""
    return (text if text.isascii() else _SURROGATES.sub(_REPLACEMENT, text)).replace(_SPACE, " ")


class BpeTokenizer(Tokenizer):
    """A SentencePiece BPE model with byte fallback: every text has ids, and decodes to itself.

    The one exception is U+2581, SentencePiece's sign for a space, which decodes as a space; cleaning removes it.
    """

    kind = "bpe"

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
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
        write_atomically(folder / _MODEL, self._path.read_bytes())

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


class CharacterTokenizer(Tokenizer):
    """One id per character of the training text, after the ten fixed ones; every other character is <unk>."""

    kind = "characters"

    def __init__(self, characters: Sequence[str]) -> None:
        self._pieces = [*FIXED_PIECES, *characters]
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i >= len(CONTROL_PIECES)}

    @classmethod
    def read(cls, path: Path) -> "CharacterTokenizer":
        """From the JSON file that `write` made."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["characters"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError("this is not a list of characters", where=str(path)) from error

    def write(self, folder: Path) -> None:
        """As JSON: {"characters": [...]}, in the order of their ids from 10 on."""
        content = json.dumps({"characters": self._pieces[len(FIXED_PIECES) :]}, ensure_ascii=False, indent=0)
        write_atomically(folder / _CHARACTERS, content.encode())

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


def train_tokenizer(
    split_folder: Path,
    folder: Path,
    settings: TokenizerSettings,
    languages: Sequence[str],
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a tokenizer on `split_folder`/train and write it into `folder`, with its quality as the summary.

    The sample is balanced over `languages` and depends on `seed` and the documents only, not on the order of files.
    `progress` is told, in words, what is being done. Raises UserError if the text does not suffice for the vocabulary.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    train = split_folder / "train"
    if settings.kind == "characters":
        progress("collecting characters")
        CharacterTokenizer(collect_characters(train)).write(folder)
    else:
        progress("choosing the sample")
        sample = balanced_sample(train, languages, round(settings.sample_megabytes * 1e6), seed)
        progress(f"training {settings.vocabulary} pieces on {sample.bytes / 1e6:.1f} MB")
        write_atomically(folder / _MODEL, train_bpe(sample.texts, settings))
    progress("measuring")
    tokenizer = Tokenizer.load(folder)
    summary = {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary}
    if settings.kind == "bpe":
        summary["sample"] = sample.by_language
    return summary | measure(tokenizer, split_folder) | {"seconds": time.monotonic() - started}

"""The tokenizer of a model from elsewhere: a tokenizer.json of Hugging Face's `tokenizers`, with ids of its own."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from affinage.data import special_tokens
from affinage.data.atomic import write_atomically
from affinage.data.chat import opens
from affinage.data.foreign_json import encodable, read_object
from affinage.data.special_tokens import CONTROL_PIECES, Marks, shielded_piece
from affinage.data.tokenizer import REPLACEMENT, Tokenizer
from affinage.errors import UserError

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # where transformers 5 writes it
IM_START, IM_END = CONTROL_PIECES[special_tokens.IM_START], CONTROL_PIECES[special_tokens.IM_END]
_ANCHOR = "a"
_BYTE, _BYTE_LEVEL = re.compile("<0x[0-9A-F]{2}>"), frozenset(pre_tokenizers.ByteLevel.alphabet())
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def template_in(folder: Path) -> str | None:
    """The chat template of a tokenizer's folder, its default one if it has several; None if it has none."""
    own_file, config = folder / TEMPLATE, folder / CONFIG
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8")
        except ValueError as error:
            raise UserError(f"this is no text: {error}", where=str(own_file)) from error
    told = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(told, list):  # several, by name
        several = [each for each in told if isinstance(each, dict)]
        told = next((each.get("template") for each in several if each.get("name") == "default"), None)
    return told if isinstance(told, str) else None


class HubTokenizer(Tokenizer):
    """Text that spells a special token stays text.

    A document is what the tokenizer itself puts before a text, the text, and its end-of-text token; ChatML needs two
    tokens that the vocabulary has or is given (`add_chat_tokens`).
    """

    kind = "hub"
    fixed_ids: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._fast = FastTokenizer.from_file(str(folder / FILE))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"this is not a tokenizer: {error}", where=str(folder / FILE)) from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        self._grown = False
        self._special = {id_ for id_, token in self._fast.get_added_tokens_decoder().items() if token.special}
        config = folder / CONFIG
        self._config: dict[str, Any] = read_object(config) if config.is_file() else {}

    @cached_property  # the library makes a dictionary of all tokens for it: milliseconds, for every id that is decoded
    def vocabulary(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._fast.get_vocab(with_added_tokens=True).values())

    def write(self, folder: Path) -> None:
        """Copies of the files it was read from."""
        for name in (FILE, CONFIG, TEMPLATE):
            if (self._folder / name).is_file():
                write_atomically(folder / name, (self._folder / name).read_bytes())
        if self._grown:
            self._fast.encode_special_tokens = False  # files do not say it
            write_atomically(folder / FILE, self._fast.to_str(pretty=True).encode())
            self._fast.encode_special_tokens = True

    def add_chat_tokens(self) -> tuple[int, ...]:
        """Gives the vocabulary those of ChatML's two tokens that it has not, after its last id; returns their ids."""
        before = self.vocabulary
        lacking = [piece for piece in (IM_START, IM_END) if self._fast.token_to_id(piece) is None]
        self._fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in lacking])
        del self.vocabulary  # it has grown
        self.__dict__.pop("_reading_special", None)
        added = [token for piece in lacking if (token := self._fast.token_to_id(piece)) is not None]
        if any(token < before for token in added):
            raise UserError("its ids have gaps, so none can be added", where=str(self._folder / FILE))
        self._special.update(added)
        self._grown = self._grown or bool(added)
        return tuple(added)

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text; nothing for GPT-2 and Qwen.

        Its bos_token also where only a chat template of ours says so: tokenizer.json does not, as `encode` adds none.
        """
        plain = self._fast.encode(_ANCHOR, add_special_tokens=False).ids
        whole = self._fast.encode(_ANCHOR).ids
        before = tuple(whole[: len(whole) - len(plain)]) if whole[len(whole) - len(plain) :] == plain else ()
        begin = self._named("bos_token")
        return (begin,) if not before and begin is not None and opens(self._template) else before

    @property
    def _template(self) -> str:
        return template_in(self._folder) or ""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings of the tokens that a chat template may name: those that its configuration names."""
        named = {name: self._config.get(name) for name in _NAMED}
        spelled = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
        return {name: token for name, token in spelled.items() if isinstance(token, str)}

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As transformers encodes it; piece by piece only where a shield stands in the text."""
        if any(shielded_piece(piece) in text for piece in self.controls):
            return super().encode_rendered(text)
        encoded = self._reading_special.encode(encodable(text), add_special_tokens=False)
        return encoded.ids, encoded.offsets

    @cached_property
    def _reading_special(self) -> FastTokenizer:
        """One of its own that takes what spells a special token for it: to switch `_fast` to and fro is seen by other
        threads, in which a server encodes."""
        return FastTokenizer.from_str(self._fast.to_str())  # files do not say `encode_special_tokens`

    def _characters(self, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
        offsets: list[tuple[int, int]] = self._fast.encode(encodable(text), add_special_tokens=False).offsets
        return offsets

    @property
    def bos(self) -> int:
        """The token that stands for an empty context: its bos_token, or else its eos_token."""
        named = self._named("bos_token")
        return self.eos if named is None else named

    @property
    def eos(self) -> int:
        """Its eos_token.

        Raises:
            UserError: it has none.
        """
        named = self._named("eos_token")
        if named is None:
            raise UserError("this tokenizer names no eos_token", where=str(self._folder / CONFIG))
        return named

    @property
    def pad(self) -> int | None:
        """Its pad_token."""
        return self._named("pad_token")

    @property
    def _stops(self) -> tuple[int, ...]:
        """The end of a text, and of a message where it has ChatML's token."""
        ends = (self.eos, self.marks.end, self._fast.token_to_id(IM_END))
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    @cached_property
    def marks(self) -> Marks:
        """What rows of its ids are read by.

        A chat model's eos_token may end messages, not documents; then its <|endoftext|> does, or its pad_token.
        """
        end: int | None = self.eos
        if end == self._fast.token_to_id(IM_END):
            end = self._fast.token_to_id("<|endoftext|>")
            end = self.pad if end is None else end
        if end is None:
            raise UserError("this tokenizer has no token that ends a document", where=str(self._folder / CONFIG))
        begin = self.opening[0] if self.opening and self.opening[0] != end else None
        return Marks(begin, end, end if self.pad in (None, begin) else int(self.pad or 0))

    def frame(self, language: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What it puts before a text, and its end of a text; source code is a text like others."""
        return self.opening, (self.marks.end,)

    @property
    def chat_ids(self) -> tuple[int, int]:
        """The ids of ChatML's <|im_start|> and <|im_end|>.

        Raises:
            UserError: the vocabulary has none.
        """
        start, end = (self._fast.token_to_id(piece) for piece in (IM_START, IM_END))
        if start is None or end is None:
            raise UserError(
                f"conversations are written with {IM_START} and {IM_END}, which this model's vocabulary lacks",
                where=str(self._folder),
                fix="Take them in with `affinage import FOLDER_OR_HUB_ID --chat-tokens`, then fine-tune it; "
                "or keep the template that it has: `chat_template: tokenizer`.",
            )
        return start, end

    @property
    def controls(self) -> dict[str, int]:
        """Its special tokens."""
        return {self.id_to_piece(token): token for token in sorted(self._special)}

    def encode_message(self, role: str, content: str) -> tuple[list[int], int]:
        """Ids of `{role}\\n{content}` as one text, as transformers encodes it, and how many are not the content's."""
        encoded = self._fast.encode(f"{role}\n{encodable(content)}", add_special_tokens=False)
        return encoded.ids, sum(end <= len(role) + 1 for _, end in encoded.offsets)

    def _named(self, key: str) -> int | None:
        token = self._config.get(key)
        if token is None and key == "eos_token":
            token = "<|endoftext|>"  # GPT-2's configuration leaves it to the class
        spelled = token.get("content") if isinstance(token, dict) else token
        found: int | None = self._fast.token_to_id(spelled) if isinstance(spelled, str) else None
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with nothing put before it; half a surrogate pair is read as U+FFFD."""
        ids: list[int] = self._fast.encode(encodable(text), add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        plain = list(map(encodable, texts))
        return [encoded.ids for encoded in self._fast.encode_batch(plain, add_special_tokens=False)]

    def id_to_piece(self, token: int) -> str:
        """How its vocabulary spells one id."""
        return self._fast.id_to_token(token) or ""

    @property
    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for, int64 [vocabulary]; 0 for special tokens."""
        return np.array([self._bytes_of(token) for token in range(self.vocabulary)], np.int64)

    def _bytes_of(self, token: int) -> int:
        text, piece = self.decode([token]), self.id_to_piece(token)
        if REPLACEMENT in text:  # parts of characters, of each of which decoding makes three bytes
            if _BYTE.fullmatch(piece):
                return 1
            if _BYTE_LEVEL.issuperset(piece):  # byte-level BPE spells every byte as a character
                return len(piece)
        return len(text.encode())

    def byte_lengths(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """UTF-8 bytes that each id of `encode(text)` stands for, int64 [len(ids)]; they sum to the text's bytes.

        Of tokens that share a character, the first one has all its bytes.
        """
        text = encodable(text)
        ends = [end for _, end in self._fast.encode(text, add_special_tokens=False).offsets]
        ends[-1:] = [len(text)] if ends else []
        bytes_before = np.cumsum([0, *(len(character.encode()) for character in text)], dtype=np.int64)
        reached = np.maximum.accumulate(bytes_before[np.array([0, *ends], np.int64)])
        return np.diff(reached)

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Text of ids; special tokens are left out, or spelled if `keep_special`."""
        kept = [token for token in map(int, ids) if keep_special or token not in self._special]
        return self._decode_text([token for token in kept if token < self.vocabulary])

    def _decode_text(self, ids: list[int]) -> str:
        # After another token: some decoders drop the space that the first token of a text begins with.
        anchor = self._anchor
        text: str = self._fast.decode([*anchor, *ids], skip_special_tokens=False)
        return text[len(self._fast.decode(anchor, skip_special_tokens=False)) :]

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode(_ANCHOR)

"""Text to token ids and back, by a tokenizer.json: one of affinage's, whose first ten ids are fixed, or of any model.

No text ever becomes a control token: the library matches them in text before anything else, so each is renamed here to
a spelling that no text has. What a chat template writes gets them by `encode_rendered`; `guard` protects its messages.
"""

import json
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import pre_tokenizers

from affinage.data.chat import ChatTemplate
from affinage.data.fast_bpe import FastBpe
from affinage.data.special_tokens import BOS, CODE_FRAME, CODE_LANGUAGE, FIXED_PIECES, MARKS, NAMED, UNK, Marks
from affinage.errors import UserError
from affinage.json_files import encodable, read_object, write_atomically, write_json

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # where transformers 5 writes it
_GENERATION = "generation_config.json"

REPLACEMENT = "\ufffd"  # what decoding returns for bytes and ids that are no text
SPACE = "\u2581"  # how pieces spell a space
_MARK, _GUARD = "\U0010fffe", "\U0010ffff"  # noncharacters: no text has them after `_plain`
_MARKUP = re.compile(r"[<>\[\]|｜]")  # what an added token that is not special has if it is more than a word
_TAG = re.compile(r"</?\w+>")  # such as <think>: structure that an assistant itself writes
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NAME = re.compile(f"{_MARK}([0-9]+){_MARK}")  # of a control token in the library's tokenizer
_ANCHOR = "a"


class Tokenizer:
    """Maps text to ids and back; a document is `<s> text </s>`, or what another model's tokenizer puts around it."""

    def __init__(self, folder: Path | str, template: str | None = None) -> None:
        """Read the tokenizer in a folder, which writes conversations in a Jinja `template`, or in ChatML if None.

        Raises UserError if there is no tokenizer, and for a template that is not Jinja.
        """
        self.folder = Path(folder)
        if not (self.folder / FILE).is_file():
            fix = "A tokenizer's folder holds tokenizer.json; transformers converts other files:\n"
            fix += "  AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            raise UserError("there is no tokenizer here", where=str(self.folder), fix=fix)
        state = read_object(self.folder / FILE)
        try:
            self._build(state)
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"this is not a tokenizer: {error}", where=str(self.folder / FILE)) from error
        self.special_tokens = self._named_tokens()  # spellings of those that a chat template may name: bos_token
        self.template = None if template is None else ChatTemplate(template, self)

    def _build(self, state: dict[str, Any]) -> None:
        # A byte's piece is the model's own affair: "<0x41>" in a text is six characters.
        tokens = [token for token in state.get("added_tokens", ()) if not _BYTE.fullmatch(token["content"])]
        special = {token["content"] for token in tokens if token["special"] and token["content"].strip()}
        controls = [token for token in tokens if token["content"] in special or _MARKUP.search(token["content"])]
        self.controls: dict[str, int] = {token["content"]: token["id"] for token in controls}
        self._shown = {token["id"]: "" for token in controls if token["special"]}  # what decoding shows of them
        self._names = {content: f"{_MARK}{id_:07}{_MARK}" for content, id_ in self.controls.items()}
        self._fast = FastTokenizer.from_str(json.dumps(_renamed(state | {"added_tokens": tokens}, self._names)))
        ids = self._fast.get_vocab() | self.controls
        self.pieces = {id_: piece for piece, id_ in ids.items()}
        self.vocabulary = 1 + max(self.pieces)
        self.fixed_ids = [self.pieces.get(id_) for id_ in range(10)] == list(FIXED_PIECES)
        self.tags = {id_ for text, id_ in self.controls.items() if _TAG.fullmatch(text) and id_ not in self._shown}
        self._shown |= {UNK: REPLACEMENT} if self.fixed_ids else {}
        by_bytes = bool(state["model"].get("byte_fallback"))
        self.kind = "hub" if not self.fixed_ids else "bpe" if by_bytes else "char"
        self._byte_level = "ByteLevel" in json.dumps(state.get("decoder"))
        alphabet = pre_tokenizers.ByteLevel.alphabet() if self._byte_level else [f"<0x{n:02X}>" for n in range(256)]
        self._spells_everything = (by_bytes or self._byte_level) and set(self.pieces.values()).issuperset(alphabet)
        normalizer = (state.get("normalizer") or {}).get("type", "NFC")  # which conversations are in already
        self._exact = self.kind == "bpe" or (self._byte_level and normalizer == "NFC")
        self._anchor = self.encode(_ANCHOR)
        self._control = re.compile(_any_of([*self.controls]) or "(?!)")
        self._beginning = re.compile(f"(?s)(?=({self._control.pattern})).")  # also of one within another

    def _named_tokens(self) -> dict[str, str]:
        if self.fixed_ids:
            return dict(NAMED)
        spelled: dict[str, str] = {}
        for file in ("special_tokens_map.json", CONFIG):
            for name, token in _object_in(self.folder / file).items():
                content = token.get("content") if isinstance(token, dict) else token
                spelled |= {name: content} if name in _NAMED and isinstance(content, str) else {}
        return spelled

    def write(self, folder: Path) -> None:
        """Write the files that make this tokenizer into a folder."""
        for name in (FILE, CONFIG, "special_tokens_map.json", TEMPLATE, "tokenizer.model"):
            if (self.folder / name).is_file():
                write_atomically(folder / name, (self.folder / name).read_bytes())
        if self._configured_stops and not (folder / _GENERATION).exists():
            write_json(folder / _GENERATION, {"eos_token_id": list(self._configured_stops)})

    # ---- special ids ----

    def id_of(self, piece: str) -> int | None:
        """Return the id of a piece or a control token, None if the vocabulary lacks it."""
        return self.controls.get(piece, self._fast.token_to_id(piece))

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Ids that a text begins with: <s>; what another tokenizer itself puts before a text."""
        if self.fixed_ids:
            return (BOS,)
        whole: list[int] = self._fast.encode(_ANCHOR).ids
        before = len(whole) - len(self._anchor)
        return tuple(whole[:before]) if whole[before:] == self._anchor else ()

    @property
    def bos(self) -> int:
        """The id that stands for an empty context: that of <s>, or else the one that ends a text."""
        begin = self.id_of(self.special_tokens.get("bos_token", ""))
        return self.eos if begin is None else begin

    @property
    def eos(self) -> int:
        """The id that ends a text. Raises UserError if the tokenizer names none."""
        # GPT-2's configuration leaves it to the class.
        end = MARKS.end if self.fixed_ids else self.id_of(self.special_tokens.get("eos_token", "<|endoftext|>"))
        if end is None:
            raise UserError("this tokenizer names no eos_token", where=str(self.folder / CONFIG))
        return end

    @property
    def pad(self) -> int | None:
        """The id that fills rows up, if there is one for it."""
        return self.id_of(self.special_tokens.get("pad_token", ""))

    @cached_property
    def _configured_stops(self) -> tuple[int, ...]:
        """The eos_token_id, one or several, that the model's own files name."""
        for name in () if self.fixed_ids else (_GENERATION, "config.json"):
            ends = _object_in(self.folder / name).get("eos_token_id")
            if ends := [id_ for id_ in (ends if isinstance(ends, list) else [ends]) if type(id_) is int]:
                return tuple(id_ for id_ in ends if 0 <= id_ < self.vocabulary)
        return ()

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end an answer of a model: ends of texts, of messages, and those that the model's files name."""
        ends = () if self.template is None else self.template.ends
        named = (self.eos, self.marks.end, self.id_of("<|im_end|>"), *self._configured_stops, *ends)
        return tuple(dict.fromkeys(id_ for id_ in named if id_ is not None))

    @cached_property
    def marks(self) -> Marks:
        """The ids by which rows of documents are read. Raises UserError if none ends a document."""
        # A chat model's eos_token may end messages, not documents.
        ends = (self.eos, self.id_of("<|endoftext|>"), self.pad)
        end = next((id_ for id_ in ends if id_ not in (None, self.id_of("<|im_end|>"))), None)
        if end is None:
            raise UserError("this tokenizer has no token that ends a document", where=str(self.folder / CONFIG))
        begin = self.opening[0] if self.opening and self.opening[0] != end else None
        return Marks(begin, end, end if self.pad is None or self.pad == begin else self.pad)

    @property
    def conversation_marks(self) -> Marks:
        """The ids by which rows of conversations are read."""
        return self.marks if self.template is None else self.template.marks

    def frame(self, language: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after the text of a document; affinage's own put a pair around source code, too."""
        if self.fixed_ids and language == CODE_LANGUAGE:
            return CODE_FRAME
        return self.opening, (self.marks.end,)

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest unsigned type that holds every id."""
        return np.uint16 if self.vocabulary < 2**16 else np.uint32

    # ---- text to ids ----

    def encode(self, text: str) -> list[int]:
        """Return the ids of raw text, with nothing before it; what spells a control token stays text.

        Half a surrogate pair and the noncharacters U+10FFFE and U+10FFFF are read as U+FFFD.
        """
        return self._fast.encode(_plain(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        """Return `encode` of every text as an array of `dtype`; affinage's own BPE is compiled."""
        if self.kind == "bpe":
            flat, ends = self._fast_bpe.encode([_plain(text).replace(SPACE, " ") for text in texts])
            return np.split(flat, ends)[:-1]
        encodings = self._fast.encode_batch_fast(list(map(_plain, texts)), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    @cached_property
    def _fast_bpe(self) -> FastBpe:
        pieces = {piece.replace(SPACE, " "): id_ for id_, piece in self.pieces.items() if piece not in self.controls}
        return FastBpe(pieces, self.dtype)

    def control_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Return where control tokens are spelled in a text: (id, first character, end) of each."""
        return [(self.controls[match[0]], *match.span()) for match in self._control.finditer(text)]

    def guard(self, text: str, *, tags: bool = False) -> str:
        """Return the text of a message with a guard in what spells a control token, but for `tags` such as <think>."""

        def broken(first: re.Match[str]) -> str:
            return first[0] if tags and self.controls[first[1]] in self.tags else first[0] + _GUARD

        text = _plain(text)
        return self._beginning.sub(broken, text) if self._control.search(text) else text  # ten times as fast

    def encode_rendered(self, text: str, spans: Sequence[tuple[int, int]] = ()) -> tuple[list[int], list[bool]]:
        """Return the ids of what a chat template wrote, and which lie, at least in part, in spans of characters.

        What spells a control token is that token, unless `guard` has put a guard into it.
        """
        text = encodable(text).replace(_MARK, REPLACEMENT)
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        parts = [text[begin:end] for begin, end in pairwise(edges)]  # those at odd places are the spans
        named = [self._control.sub(lambda spelled: self._names[spelled[0]], part).replace(_GUARD, "") for part in parts]
        ids: list[int] = []
        if self._exact or not spans:  # a quarter faster without the places of tokens
            ids = self._fast.encode_batch_fast(["".join(named)], add_special_tokens=False)[0].ids
        sizes = np.maximum(self.piece_bytes[np.array(ids, np.int64)], 1)  # of a control token: as if it was a byte
        places = [*accumulate(len(part.encode()) - 7 * part.count(_MARK) for part in named)]  # names have 15 bytes
        if not spans or sizes.sum() == places[-1]:
            ends = np.cumsum(sizes)
            first = np.searchsorted(ends, places[:-1:2], "right").tolist()
            last = np.searchsorted(ends - sizes, places[1::2]).tolist()
        else:
            encoded: Any = self._fast.encode("".join(named), add_special_tokens=False)
            ids, places = encoded.ids, [*accumulate(map(len, named))]
            # A list of the places of all tokens would take a third as long as the encoding.
            begin_of, end_of = (lambda k, edge=edge: encoded.token_to_chars(k)[edge] for edge in (0, 1))
            first = [bisect_right(range(len(ids)), begin, key=end_of) for begin in places[:-1:2]]
            last = [bisect_left(range(len(ids)), end, key=begin_of) for end in places[1::2]]
        trained = np.zeros(len(ids), bool)
        for begin, end in zip(first, last, strict=True):
            trained[begin:end] = True
        return ids, trained.tolist()

    # ---- ids to text ----

    @cached_property
    def piece_bytes(self) -> Int64[np.ndarray, " vocabulary"]:
        """UTF-8 bytes of text that each id stands for; 0 for control tokens."""
        alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet() if self._byte_level else ())
        sizes = np.zeros(self.vocabulary, np.int64)
        for token, piece in self.pieces.items():
            if alphabet.issuperset(piece):  # every byte as a character
                sizes[token] = len(piece)
            else:
                sizes[token] = 1 if _BYTE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())
        sizes[list(self.controls.values())] = 0
        return sizes

    def byte_lengths(self, text: str, ids: Sequence[int] | np.ndarray) -> Int64[np.ndarray, " tokens"]:
        """Return the UTF-8 bytes of each id of `encode(text)`; of tokens that share a character the first has all."""
        if self.kind == "bpe":
            return self.piece_bytes[np.asarray(ids, np.int64)]
        text = _plain(text)
        ends = [end for _, end in self._fast.encode(text, add_special_tokens=False).offsets]
        ends[-1:] = [len(text)] if ends else []
        places = pairwise(accumulate(ends, max, initial=0))
        return np.array([len(text[begin:end].encode()) for begin, end in places], np.int64)

    def unspelled(self, text: str) -> int:
        """Return how many characters of a text are in none of its tokens, or only in the unknown one."""
        if self._spells_everything:
            return 0
        normalizer: Any = self._fast.normalizer
        text = normalizer.normalize_str(_plain(text)) if normalizer else _plain(text)
        lost = Counter(text) - Counter(self.decode(self.encode(text)))
        return sum(count for character, count in lost.items() if not (character.isspace() or character == SPACE))

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Return the text of ids, special tokens only if `keep_special`, and U+FFFD for bytes that are no text."""
        shown = {} if keep_special else self._shown
        # After another token: some decoders drop the space that the first token of a text begins with.
        text = self._fast.decode([*self._anchor, *map(int, ids)], skip_special_tokens=False)
        before = self._fast.decode(self._anchor, skip_special_tokens=False)
        return _NAME.sub(lambda name: shown.get(int(name[1]), self.pieces[int(name[1])]), text[len(before) :])


cached_tokenizer = lru_cache(maxsize=1)(Tokenizer)  # a worker reads it once for all its tasks


def template_in(folder: Path) -> str | None:
    """The chat template of a tokenizer's folder, its default one if it has several; None if it has none."""
    if (folder / TEMPLATE).is_file():
        try:
            return (folder / TEMPLATE).read_text(encoding="utf-8")
        except ValueError as error:
            raise UserError(f"this is no text: {error}", where=str(folder / TEMPLATE)) from error
    template = _object_in(folder / CONFIG).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _object_in(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _plain(text: str) -> str:
    """The text without what UTF-8 has no form for, and without the two noncharacters that are used here."""
    return encodable(text).replace(_MARK, REPLACEMENT).replace(_GUARD, REPLACEMENT)


def _any_of(words: Sequence[str]) -> str:
    """A regular expression for the longest of the words at a place, a tree: thousands take no longer than a few."""
    if len(words) < 2:
        return "".join(map(re.escape, words))
    common = os.path.commonprefix(words)  # noqa: RUF071 (characters)
    rest = sorted((word[len(common) :] for word in words), reverse=True)
    branches = (_any_of([*some]) for _, some in groupby(rest, lambda word: word[:1]))
    return f"{re.escape(common)}(?:{'|'.join(branches)})"


def _renamed(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The content of tokenizer.json, in which every control token is spelled as no text can: by its name."""
    model = dict(state["model"])
    if isinstance(model["vocab"], dict):
        if "merges" in model and not names.keys().isdisjoint(model["vocab"]):
            pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    model |= {"unk_token": names[model["unk_token"]]} if model.get("unk_token") in names else {}
    added = [token | {"content": names.get(token["content"], token["content"])} for token in state["added_tokens"]]
    return state | {"model": model, "added_tokens": added, "truncation": None, "padding": None}

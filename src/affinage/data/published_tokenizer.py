"""Tokenizers that others published, to measure ours beside: their files, as their authors gave them out."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from affinage.errors import UserError

KINDS = "a tokenizer.json, a SentencePiece .model, or a merges file (.bpe, .txt) with its vocabulary .json beside it"


class PublishedTokenizer:
    """Encodes and decodes text without adding or interpreting special tokens."""

    def __init__(self, path: Path) -> None:
        """Read it from one file, or the folder of a model. Raises UserError if that is none of a tokenizer."""
        self.name = path.name
        path = _in_folder(path) if path.is_dir() else path
        self._pieces: sentencepiece.SentencePieceProcessor | None = None
        self._fast: Tokenizer | None = None
        if not path.is_file():
            raise UserError("there is no such file", where=str(path), fix=f"tokenizer.compare takes {KINDS}")
        try:
            if ".model" in path.suffixes:
                self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
            elif path.suffix == ".json":
                self._fast = Tokenizer.from_file(str(path))
            elif path.suffix in (".bpe", ".txt"):
                self._fast = _of_merges(path)
        except Exception as error:  # neither library raises anything more special
            if isinstance(error, UserError):
                raise
            raise UserError(f"this is not a tokenizer: {error}", where=str(path), fix=f"it takes {KINDS}") from error
        if self._pieces is None and self._fast is None:
            raise UserError("no tokenizer's file ends so", where=str(path), fix=f"tokenizer.compare takes {KINDS}")

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        if self._pieces is not None:
            return int(self._pieces.get_piece_size())
        assert self._fast is not None
        return int(self._fast.get_vocab_size())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text."""
        if self._pieces is not None:
            encoded: list[list[int]] = self._pieces.encode(list(texts))
            return encoded
        assert self._fast is not None
        return [each.ids for each in self._fast.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        if self._pieces is not None:
            return str(self._pieces.decode(list(ids)))
        assert self._fast is not None
        return str(self._fast.decode(list(ids), skip_special_tokens=False))


def _in_folder(folder: Path) -> Path:
    """The tokenizer's file in the folder of a model."""
    found = [file for file in (folder / "tokenizer.json", *sorted(folder.glob("*.model"))) if file.is_file()]
    if not found:
        fix = f"tokenizer.compare takes {KINDS}, or a folder of one of the first two"
        raise UserError("this folder holds no tokenizer.json and no .model", where=str(folder), fix=fix)
    return found[0]


def _of_merges(path: Path) -> Tokenizer:
    """A byte-level BPE as GPT-2's: a list of merges and, in the same folder, the ids of its pieces."""
    beside = [file for file in sorted(path.parent.glob("*.json")) if _is_vocabulary(file)]
    if len(beside) != 1:
        raise UserError(
            f"there are {len(beside)} vocabularies beside these merges, not one",
            where=str(path),
            fix="Put the merges and their vocabulary, a .json of pieces and ids, into a folder of their own.",
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(json.loads(beside[0].read_text(encoding="utf-8")), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _is_vocabulary(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(content) and all(isinstance(value, int) for value in content.values())

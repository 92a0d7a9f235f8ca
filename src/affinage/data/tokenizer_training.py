"""What a tokenizer is made from: a sample balanced over the languages, SentencePiece's trainer, the characters seen."""

import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece

from affinage.config.data import TokenizerSettings
from affinage.data.atomic import write_atomically
from affinage.data.character_tokenizer import CharacterTokenizer
from affinage.data.documents import read_documents
from affinage.data.fertility import measure
from affinage.data.order import document_keys
from affinage.data.special_tokens import CONTROL_PIECES, FIXED_PIECES
from affinage.data.tokenizer import MODEL, Tokenizer
from affinage.errors import UserError

_OTHER = "other"  # the group of documents in none of the recipe's languages, such as code
# SentencePiece stores the number of threads in the model file: a constant keeps the file the same on every machine.
_THREADS = 4
_UNUSABLE = str.maketrans({"\u2585": " ", "\0": " "})  # the trainer skips whole lines that contain these


@dataclass(frozen=True)
class Sample:
    """Text to train on, and how many bytes of it are in each language."""

    texts: list[str]
    by_language: dict[str, int]

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(self.by_language.values())


def fair_shares(sizes: Sequence[int], budget: int) -> list[int]:
    """Split `budget` evenly; what a small group cannot use goes to the larger ones, evenly again."""
    shares = [0] * len(sizes)
    left = budget
    for rank, group in enumerate(sorted(range(len(sizes)), key=lambda g: sizes[g])):
        shares[group] = min(sizes[group], left // (len(sizes) - rank))
        left -= shares[group]
    return shares


def balanced_sample(documents: Path, languages: Sequence[str], budget: int, seed: int) -> Sample:
    """Choose whole documents, `budget` bytes in total, as evenly as there is text over `languages`.

    Documents in other languages share one further part. Which ones are chosen, and their order, depends on `seed` and
    the documents' ids alone. Two passes over `documents`; memory is that of the sample.
    """
    keys, groups, sizes = _index(documents, languages, seed)
    names = [*languages, _OTHER]
    totals = [int(sizes[groups == g].sum()) for g in range(len(names))]
    taken = np.zeros(len(keys), np.int64)  # bytes wanted of each document
    for group, share in enumerate(fair_shares(totals, budget)):
        members = np.flatnonzero(groups == group)
        members = members[np.argsort(keys[members], kind="stable")]
        before = np.cumsum(sizes[members]) - sizes[members]
        taken[members] = np.clip(share - before, 0, sizes[members])
    texts = _collect(documents, taken)
    order = sorted(texts, key=lambda position: (keys[position], position))
    counts = {name: int(taken[groups == g].sum()) for g, name in enumerate(names)}
    return Sample([texts[position] for position in order], {name: n for name, n in counts.items() if n})


def _index(documents: Path, languages: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shuffle key, language group and UTF-8 bytes of every document, in the order of the files."""
    group_of = {language: g for g, language in enumerate(languages)}
    keys, groups, sizes = [], [], []
    for batch in read_documents(documents, ("id", "source", "language", "text")):
        keys.append(document_keys(batch, seed, "tokenizer"))
        groups.append([group_of.get(language, len(languages)) for language in batch.column("language").to_pylist()])
        sizes.append(pc.binary_length(batch.column("text").cast(pa.large_binary())).to_numpy())
    if not keys:
        raise UserError("there is no text to train a tokenizer on", where=str(documents))
    return np.concatenate(keys), np.concatenate(groups), np.concatenate(sizes).astype(np.int64)


def _collect(documents: Path, taken: np.ndarray) -> dict[int, str]:
    """The first `taken[i]` bytes of every document i of which any are wanted, by its position."""
    texts: dict[int, str] = {}
    start = 0
    for batch in read_documents(documents, ("text",)):
        wanted = taken[start : start + len(batch)]
        for row in np.flatnonzero(wanted):
            text = batch.column("text")[int(row)].as_py()
            texts[start + int(row)] = text.encode()[: int(wanted[row])].decode(errors="ignore")
        start += len(batch)
    return texts


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that SentencePiece will not skip. A newline is a token of its own, so none crosses a line anyway."""
    for text in texts:
        for line in text.translate(_UNUSABLE).split("\n"):
            if line:
                yield line


def train_bpe(texts: Iterable[str], settings: TokenizerSettings) -> bytes:
    """Train SentencePiece BPE with byte fallback and give the content of its .model file.

    Text is taken as it is: no Unicode normalisation, no added or removed spaces. The same texts give the same bytes.
    Raises UserError when the text does not suffice for the vocabulary, or the vocabulary for the text's characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=settings.vocab_size,
            character_coverage=settings.character_coverage,
            byte_fallback=True,
            split_digits=settings.split_digits,
            allow_whitespace_only_pieces=True,  # runs of spaces, which indent code, become pieces
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=2**30,  # the most it accepts; the default, 4192 bytes, silently drops longer lines
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=CONTROL_PIECES[0],
            unk_piece=CONTROL_PIECES[1],
            bos_piece=CONTROL_PIECES[2],
            eos_piece=CONTROL_PIECES[3],
            control_symbols=list(CONTROL_PIECES[4:]),  # user_defined_symbols would be found in raw text
            user_defined_symbols=list(FIXED_PIECES[len(CONTROL_PIECES) :]),
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(str(error), settings) from error
    return model.getvalue()


def _explained(message: str, settings: TokenizerSettings) -> Exception:
    """SentencePiece's refusal as advice in terms of the recipe."""
    if match := re.search(r"Vocabulary size too high.*?<= (\d+)", message, re.DOTALL):
        return UserError(
            f"the training text is too small for a vocabulary of {settings.vocab_size} pieces",
            where="tokenizer.vocab_size",
            fix=f"Set tokenizer.vocab_size to {match[1]} or less, or give more text.",
        )
    if match := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(
            f"{settings.vocab_size} pieces do not hold the bytes and the characters of the training text",
            where="tokenizer.vocab_size",
            fix=f"Set tokenizer.vocab_size to {int(match[1]) + 1} or more, or lower tokenizer.character_coverage (now "
            f"{settings.character_coverage}).",
        )
    return RuntimeError(message)


def collect_characters(documents: Path) -> list[str]:
    """Every character of `documents`, by code point, without those that have a fixed id already."""
    seen: set[str] = set()
    for batch in read_documents(documents, ("text",)):
        for text in batch.column("text"):
            seen.update(text.as_py())
    if not seen:
        raise UserError("there is no text to take characters from", where=str(documents))
    return sorted(seen.difference(FIXED_PIECES))


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
    if settings.kind == "char":
        progress("collecting characters")
        CharacterTokenizer(collect_characters(train)).write(folder)
    else:
        progress("choosing the sample")
        sample = balanced_sample(train, languages, settings.sample_bytes, seed)
        progress(f"training {settings.vocab_size} pieces on {sample.bytes / 1e6:.1f} MB")
        write_atomically(folder / MODEL, train_bpe(sample.texts, settings))
    progress("measuring")
    tokenizer = Tokenizer.load(folder)
    summary = {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary}
    if settings.kind == "bpe":
        summary["sample"] = sample.by_language
    return summary | measure(tokenizer, split_folder) | {"seconds": time.monotonic() - started}

"""Train a tokenizer: a sample balanced over languages, SentencePiece's trainer, and its result as tokenizer.json."""

import heapq
import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from affinage.config.data import TokenizerSettings
from affinage.data.atomic import write_atomically
from affinage.data.documents import read_documents
from affinage.data.fertility import measure
from affinage.data.order import document_keys
from affinage.data.special_tokens import CONTROL_PIECES, FIXED_PIECES, UNK
from affinage.data.tokenizer import FILE, Tokenizer
from affinage.errors import UserError

_OTHER = "other"  # the group of documents in none of the recipe's languages, such as code
# SentencePiece stores the number of threads in the model file: a constant keeps the file the same on every machine.
_THREADS = 4
_UNUSABLE = str.maketrans({"\u2585": " ", "\0": " "})  # the trainer skips whole lines that contain these
_SPACE = "\u2581"  # how SentencePiece spells a space inside a piece


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
    the documents' ids alone. One pass; memory is `budget` for each language at most.
    Raises UserError if there is no text.
    """
    chosen: dict[str, list[tuple[int, bytes]]] = {name: [] for name in (*languages, _OTHER)}  # heaps, largest key first
    held, totals = Counter[str](), Counter[str]()
    for batch in read_documents(documents, ("id", "source", "language", "text")):
        keys = document_keys(batch, seed, "tokenizer").tolist()
        texts = batch.column("text").cast(pa.large_binary())
        sizes = pc.binary_length(texts).to_pylist()
        for key, language, size, text in zip(keys, batch.column("language").to_pylist(), sizes, texts, strict=True):
            name = language if language in languages else _OTHER
            heap = chosen[name]
            totals[name] += size
            if held[name] >= budget and -key <= heap[0][0]:
                continue
            heapq.heappush(heap, (-key, text.as_py()))
            held[name] += size
            while held[name] - len(heap[0][1]) >= budget:
                held[name] -= len(heapq.heappop(heap)[1])
    if not totals:
        raise UserError("there is no text to train a tokenizer on", where=str(documents))
    sample: list[tuple[int, str]] = []
    shares = dict(zip(chosen, fair_shares([totals[name] for name in chosen], budget), strict=True))
    for name, heap in chosen.items():
        left = shares[name]
        for key, text in sorted(heap, reverse=True):
            if left > 0:
                sample.append((-key, text[:left].decode(errors="ignore")))
                left -= len(text)
    return Sample([text for _, text in sorted(sample)], {name: share for name, share in shares.items() if share})


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that SentencePiece will not skip. A newline is a token of its own, so none crosses a line anyway."""
    for text in texts:
        for line in text.translate(_UNUSABLE).split("\n"):
            if line:
                yield line


def train_bpe(texts: Iterable[str], settings: TokenizerSettings) -> bytes:
    """Train SentencePiece BPE with byte fallback and return the content of its .model file.

    Text is taken as it is: no Unicode normalization, no added or removed spaces. The same texts give the same bytes.
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
        most = int(match[1])
        fix = f"Set tokenizer.vocab_size to {most} or less, or give more text."
        return UserError(
            f"the training text is too small for a vocabulary of {settings.vocab_size} pieces",
            where="tokenizer.vocab_size",
            fix=fix if most >= 300 else "Give more text, or set tokenizer.kind to char.",  # the recipe's least is 300
        )
    if match := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(
            f"{settings.vocab_size} pieces do not hold the bytes and the characters of the training text",
            where="tokenizer.vocab_size",
            fix=f"Set tokenizer.vocab_size to {int(match[1]) + 1} or more, or lower tokenizer.character_coverage (now "
            f"{settings.character_coverage}).",
        )
    return RuntimeError(message)


def bpe_json(model_proto: bytes) -> bytes:
    """Return the tokenizer.json of a SentencePiece BPE model with byte fallback."""
    model = sentencepiece.SentencePieceProcessor(model_proto=model_proto)
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    words = {piece: i for piece, i in vocab.items() if i >= len(FIXED_PIECES) and not model.is_byte(i)}
    # SentencePiece keeps the pieces only, the best first: every way to split a piece into two is a merge.
    merges = []
    for piece in words:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in words and right in words]
        merges += sorted(known, key=lambda pair: (words[pair[0]], words[pair[1]]))
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token=CONTROL_PIECES[UNK], fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", _SPACE)
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _json(fast)


def characters_json(characters: Iterable[str]) -> bytes:
    """Return the tokenizer.json with an id for each of the characters, after the ten fixed ones."""
    vocab = {piece: i for i, piece in enumerate((*FIXED_PIECES, *characters))}
    fast = FastTokenizer(models.BPE(vocab, [], unk_token=CONTROL_PIECES[UNK]))
    fast.decoder = decoders.Fuse()
    return _json(fast)


def _json(fast: FastTokenizer) -> bytes:
    fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in CONTROL_PIECES])
    return fast.to_str(pretty=True).encode()


def collect_characters(documents: Path) -> list[str]:
    """Return every character of `documents`, by code point, without those that have a fixed id already."""
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
    Raises UserError if the text does not suffice for the vocabulary.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    train = split_folder / "train"
    sample: Sample | None = None
    if settings.kind == "char":
        progress("collecting characters")
        write_atomically(folder / FILE, characters_json(collect_characters(train)))
    else:
        progress("choosing the sample")
        sample = balanced_sample(train, languages, settings.sample_bytes, seed)
        progress(f"training {settings.vocab_size} pieces on {sample.bytes / 1e6:.1f} MB")
        model = train_bpe(sample.texts, settings)
        write_atomically(folder / "tokenizer.model", model)  # for programs that read SentencePiece's models
        write_atomically(folder / FILE, bpe_json(model))
    progress("measuring")
    tokenizer = Tokenizer.load(folder)
    summary = {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary}
    summary |= {"sample": sample.by_language} if sample is not None else {}
    return summary | measure(tokenizer, split_folder) | {"seconds": time.monotonic() - started}

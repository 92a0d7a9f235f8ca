"""Train a tokenizer on a sample balanced over languages, and measure how well it fits the text."""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from affinage.config.data import TokenizerSettings
from affinage.data.documents import read_documents
from affinage.data.order import document_keys
from affinage.data.special_tokens import CONTROL_PIECES, FIXED_PIECES, UNK
from affinage.data.tokenizer import FILE, SPACE, Tokenizer
from affinage.errors import UserError
from affinage.json_files import write_atomically

_OTHER = "other"  # the group of documents in none of the recipe's languages, such as code
# SentencePiece stores the number of threads in the model file: a constant keeps the file the same on every machine.
_THREADS = 4
_UNUSABLE = str.maketrans({"\u2585": " ", "\0": " "})  # the trainer skips whole lines that contain these
_MEASURED_BYTES = 2_000_000  # of each source and language: three digits of a ratio, encoded and decoded in a second


def train_tokenizer(
    split_folder: Path, folder: Path, settings: TokenizerSettings, languages: Sequence[str]
) -> dict[str, Any]:
    """Train a tokenizer on `split_folder`/train and write it into `folder`; return its quality, see `measure`.

    Raises UserError as `balanced_sample` and `train_bpe` do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {}
    if settings.kind == "char":
        characters: set[str] = set()
        for batch in read_documents(split_folder / "train", ("text",)):
            characters.update(*batch["text"].to_pylist())
        write_atomically(folder / FILE, characters_json(sorted(characters.difference(FIXED_PIECES))))
    else:
        texts, summary["sample"] = balanced_sample(split_folder / "train", languages, settings.sample_bytes)
        model = train_bpe(texts, settings)
        write_atomically(folder / "tokenizer.model", model)  # for programs that read SentencePiece's models
        write_atomically(folder / FILE, bpe_json(model))
    tokenizer = Tokenizer(folder)
    return summary | {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary, **measure(tokenizer, split_folder)}


# ---- the sample ----


def balanced_sample(documents: Path, languages: Sequence[str], budget: int) -> tuple[list[str], dict[str, int]]:
    """Return texts of `budget` bytes, as evenly as there is text over `languages` and others, and the bytes of each.

    Which ones, and their order, depends on the documents' ids alone. Memory is about `budget` for each
    language. Raises UserError if there is no text.
    """
    chosen: dict[str, list[tuple[int, bytes]]] = defaultdict(list)  # by language: keys and texts
    totals = Counter[str]()  # bytes
    for batch in read_documents(documents, ("id", "source", "language", "text")):
        keys, texts = document_keys(batch, "tokenizer").tolist(), batch.column("text").cast(pa.large_binary())
        for key, language, text in zip(keys, batch.column("language").to_pylist(), texts.to_pylist(), strict=True):
            name = language if language in languages else _OTHER
            chosen[name].append((key, text))
            totals[name] += len(text)
        chosen |= {name: _first(documents, budget) for name, documents in chosen.items()}
    if not totals:
        raise UserError("there is no text to train a tokenizer on", where=str(documents))
    sample: list[tuple[int, bytes]] = []
    shares, left = dict[str, int](), budget
    for number, (name, total) in enumerate(reversed(totals.most_common())):  # what a language lacks goes to larger ones
        shares[name] = min(total, left // (len(totals) - number))
        left -= shares[name]
        sample += _first(chosen[name], shares[name])
    return [text.decode(errors="ignore") for _, text in sorted(sample)], shares


def _first(documents: list[tuple[int, bytes]], size: int) -> list[tuple[int, bytes]]:
    """The documents with the smallest keys, `size` bytes in total; the last one is cut."""
    first = []
    for key, text in sorted(documents):
        if size > 0:
            first.append((key, text[:size]))
            size -= len(text)
    return first


# ---- training ----


def train_bpe(texts: Iterable[str], settings: TokenizerSettings) -> bytes:
    """Train SentencePiece BPE with byte fallback and return the content of its .model file.

    Text is taken as it is: no Unicode normalization, no added or removed spaces. The same texts give the same bytes.
    Raises UserError when the text does not suffice for the vocabulary, or the vocabulary for the text's characters.
    """
    model = io.BytesIO()
    # A newline is a token of its own, so no piece crosses a line anyway.
    lines = (line for text in texts for line in text.translate(_UNUSABLE).split("\n") if line)
    special: dict[str, Any] = {}
    for id_, name in enumerate(("pad", "unk", "bos", "eos")):
        special |= {f"{name}_id": id_, f"{name}_piece": CONTROL_PIECES[id_]}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=settings.vocab_size,
            character_coverage=settings.character_coverage,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,  # runs of spaces, which indent code, become pieces
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=2**30,  # the most it accepts; the default, 4192 bytes, silently drops longer lines
            **special,
            control_symbols=list(CONTROL_PIECES[4:]),  # user_defined_symbols would be found in raw text
            user_defined_symbols=list(FIXED_PIECES[len(CONTROL_PIECES) :]),
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        # SentencePiece's message names a size that fits, after the condition in brackets that does not hold.
        what = f"{settings.vocab_size} pieces do not fit the training text: {str(error).rpartition('] ')[2].strip()}"
        fix = "Set another size, give more text, set tokenizer.kind to char, or lower tokenizer.character_coverage."
        least = TokenizerSettings.model_fields["vocab_size"].metadata[0].ge
        if (most := re.search(r"<= (\d+)", what)) and int(most[1]) < least:
            what, fix = f"the text has too few words for {least} pieces", "Give more, or set tokenizer.kind to char."
        raise UserError(what, where="tokenizer.vocab_size", fix=fix) from error
    return model.getvalue()


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
    fast.normalizer = normalizers.Replace(" ", SPACE)
    fast.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _json(fast)


def characters_json(characters: Sequence[str]) -> bytes:
    """Return the tokenizer.json with an id for each of the characters, after the ten fixed ones."""
    if not characters:
        raise UserError("there is no text to take characters from", where="tokenizer.kind")
    vocab = {piece: i for i, piece in enumerate((*FIXED_PIECES, *characters))}
    fast = FastTokenizer(models.BPE(vocab, [], unk_token=CONTROL_PIECES[UNK]))
    fast.decoder = decoders.Fuse()
    return _json(fast)


def _json(fast: FastTokenizer) -> bytes:
    fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in CONTROL_PIECES])
    return fast.to_str(pretty=True).encode()


# ---- measuring ----


def measure(tokenizer: Tokenizer, split_folder: Path) -> dict[str, Any]:
    """Measure on held-out documents (on training ones where none are held out), about 2 MB per source and language.

    Returns `languages` and `sources` {name: {bytes_per_token, tokens_per_word, tokens, words, bytes}} and `round_trip`
    {documents, exact}. A word is what stands between white space.
    """
    part = "train" if next(read_documents(split_folder / "validation"), None) is None else "validation"
    read, round_trip = Counter[tuple[str, str]](), Counter[str](documents=0, exact=0)
    counts: dict[str, dict[str, Counter[str]]] = {"languages": defaultdict(Counter), "sources": defaultdict(Counter)}
    for batch in read_documents(split_folder / part):
        for source, language, text in zip(*(batch.column(name).to_pylist() for name in ("source", "language", "text"))):
            if read[source, language] < _MEASURED_BYTES:
                ids, size = tokenizer.encode(text), len(text.encode())
                read[source, language] += size
                round_trip.update(documents=1, exact=tokenizer.decode(ids) == text)
                for group in (counts["sources"][source], counts["languages"][language]):
                    group.update(tokens=len(ids), words=len(text.split()), bytes=size)

    def rates(count: Counter[str]) -> dict[str, float]:
        per_token, per_word = count["bytes"] / max(count["tokens"], 1), count["tokens"] / max(count["words"], 1)
        return {"bytes_per_token": per_token, "tokens_per_word": per_word, **count}

    rated = {key: {name: rates(groups[name]) for name in sorted(groups)} for key, groups in counts.items()}
    return {"measured_on": part, **rated, "round_trip": round_trip}

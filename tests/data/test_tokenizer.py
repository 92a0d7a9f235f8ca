"""Tokenizers of both kinds: lossless round trips, exact bytes, and training that depends on the text alone."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from affinage.config.data import TokenizerSettings
from affinage.data.fast_bpe import FastBpe
from affinage.data.special_tokens import FIXED_PIECES, NEWLINE, TAB, UNK
from affinage.data.tokenizer import Tokenizer
from affinage.data.tokenizer_training import balanced_sample, measure, train_bpe, train_tokenizer
from run_affinage import refused
from source_forms import split_of, write_documents
from tiny_corpus import TRICKY, texts_with, write_split

# Pieces that the vocabulary, the control tokens or white space are made of.
texts = texts_with(*TRICKY, "  ", "\n", "12", "the", "é")


def test_the_first_ten_ids_are_fixed_and_decoding_shows_control_tokens_only_if_asked(tokenizer: Tokenizer):
    assert [tokenizer.pieces[i] for i in range(10)] == list(FIXED_PIECES)
    assert tokenizer.encode("\n\t") == [NEWLINE, TAB]
    ids = [2, 6, *tokenizer.encode("the"), 7, 3, 0]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(np.array(ids), keep_special=True) == "<s><|im_start|>the<|im_end|></s><pad>"


@given(text=texts)
def test_any_text_decodes_to_itself_and_its_bytes_are_counted_once(bpe: Tokenizer, text: str):
    for each in (text, *TRICKY):
        ids = bpe.encode(each)
        assert bpe.decode(ids) == each
        assert bpe.byte_lengths(each, ids).sum() == len(each.encode())
    assert bpe.decode(bpe.encode("a\u2581b\ud800")) == "a b\ufffd"  # what cannot be kept


def test_characters_have_one_id_each_and_strangers_are_unknown(characters: Tokenizer):
    assert len(characters.encode("cheese")) == 6
    ids = characters.encode("a漢b")
    assert ids[1] == UNK and characters.decode(ids) == "a\ufffdb"
    assert characters.byte_lengths("a漢b", ids).tolist() == [1, 3, 1]


def test_digits_are_split_and_long_lines_are_learned_from(tmp_path: Path):
    split_of(tmp_path, ["In 1999 it was 1999. " * 50, "xylophone quartz " * 1000])  # 17,000 bytes on one line
    train_tokenizer(tmp_path, tmp_path / "out", TokenizerSettings(vocab_size=310), ("en",))
    tokenizer = Tokenizer(tmp_path / "out")
    assert len(tokenizer.encode("1999")) == 4 and len(tokenizer.encode(" xylophone")) == 1


def test_training_twice_gives_the_same_bytes_whatever_the_order_of_files(split_folder: Path, tmp_path: Path):
    again = write_split(tmp_path / "again", reverse=True)
    settings = TokenizerSettings(vocab_size=400, sample_bytes=20_000)
    for split, name in ((split_folder, "a"), (split_folder, "b"), (again, "c")):
        train_tokenizer(split, tmp_path / name, settings, ("en", "fr"))
    assert len({(tmp_path / name / "tokenizer.model").read_bytes() for name in "abc"}) == 1


@pytest.mark.parametrize(("vocabulary", "advice"), [(30_000, r"<= \d+"), (300, r"300 vs \d+")])
def test_a_vocabulary_that_cannot_be_is_refused_with_one_that_can(tmp_path: Path, vocabulary: int, advice: str):
    split_of(tmp_path, ["".join(chr(0x4E00 + i) for i in range(200)) + " the river and the stone"])
    settings = TokenizerSettings(vocab_size=vocabulary, character_coverage=1)
    mistake = refused(train_tokenizer, tmp_path, tmp_path / "out", settings, ("en",))
    assert mistake.where == "tokenizer.vocab_size" and re.search(advice, mistake.what)
    refused(train_tokenizer, split_of(tmp_path / "few", ["a b"]), tmp_path, settings, ("en",), match="too few words")
    for kind in ("bpe", "char"):
        no_text = split_of(tmp_path / kind, [])
        refused(train_tokenizer, no_text, tmp_path, TokenizerSettings(kind=kind), ("en",))


def test_the_sample_is_balanced_over_languages_and_what_one_lacks_goes_to_the_others(split_folder, tmp_path):
    texts, shares = balanced_sample(split_folder / "train", ("en", "fr"), 10_000)
    assert abs(shares["en"] - shares["fr"]) <= 1
    assert sum(len(text.encode()) for text in texts) == pytest.approx(10_000, abs=10)
    rows = [("en", 60), ("fr", 10), ("de", 20), ("en", 60)]
    write_documents(tmp_path, [{"text": "a" * size, "language": language} for language, size in rows])
    texts, shares = balanced_sample(tmp_path, ("en", "fr"), 100)
    assert shares == {"fr": 10, "other": 20, "en": 70} and sum(map(len, texts)) == 100


def test_the_tokenizer_is_measured_by_language_and_source(bpe: Tokenizer, split_folder: Path):
    measured = measure(bpe, split_folder)
    assert measured["measured_on"] == "validation" and set(measured["languages"]) == {"en", "fr"}
    for entry in (*measured["languages"].values(), *measured["sources"].values()):
        assert entry["bytes_per_token"] == pytest.approx(entry["bytes"] / entry["tokens"])
        assert entry["tokens_per_word"] == pytest.approx(entry["tokens"] / entry["words"])
    assert measured["round_trip"] == {"documents": 8, "exact": 8}


# ---- the compiled encoder gives SentencePiece's ids

TRAINING = ["it's l'été: (a  b) -- of the, of the. aaaa aaaa == == x1 y22 naïve ça; où? 漢字漢字 " * 5]
PIECES = ["  ", "\n", "\t", "12", "the", " of the,", "é", "e\u0301", "aaa", "--", "==", "\0", "\r", "字", "_", "²"]
any_texts = texts_with(*PIECES, without="\u2581", most=30)


@pytest.fixture(scope="module", params=[{}, {"split_by_whitespace": False}], ids=str)
def model(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary whose pieces may cross from one word to the next."""
    train = sentencepiece.SentencePieceTrainer.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece.SentencePieceTrainer, "train", lambda **options: train(**options, **request.param))
        trained = train_bpe(TRAINING, TokenizerSettings(vocab_size=330))
    return sentencepiece.SentencePieceProcessor(model_proto=trained)


def encoder_of(model: sentencepiece.SentencePieceProcessor) -> FastBpe:
    pieces = {model.id_to_piece(i).replace("\u2581", " "): i for i in range(8, model.get_piece_size())}
    return FastBpe(pieces, np.uint16)


@pytest.fixture(scope="module")
def encoder(model: sentencepiece.SentencePieceProcessor) -> FastBpe:
    return encoder_of(model)


def parts(flat: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, ends[:-1])]


@given(batch=st.lists(any_texts, min_size=1, max_size=4))
def test_any_text_has_the_ids_of_sentencepiece(batch, model, encoder):
    assert parts(*encoder.encode(batch)) == [model.encode(text) for text in batch]


def test_tricky_long_and_repetitive_texts_have_the_ids_of_sentencepiece(model, encoder):
    rng, signs = random.Random(1), " ab\né<|s1🙂'=-"
    batch = [*TRICKY, *("".join(rng.choices(signs, k=rng.randint(0, 300))) for _ in range(200))]
    batch += ["a" * 30_000, "ab" * 10_000, "=" * 5_000, " " * 5_000, "the" * 3_000 + "é" * 3_000, "字漢" * 2_000, ""]
    assert parts(*encoder.encode(batch)) == [model.encode(text) for text in batch]


def test_threads_may_share_an_encoder(model: sentencepiece.SentencePieceProcessor, encoder: FastBpe):
    rng = random.Random(2)
    words = ["".join(rng.choices("thofae'é", k=rng.randint(1, 9))) for _ in range(400)]
    batches = [[" ".join(rng.choices(words, k=2_000)) for _ in range(2)] for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(encoder.encode, batches))
    assert [parts(*each) for each in encoded] == [[model.encode(text) for text in batch] for batch in batches]

"""Tokenizers of both kinds: lossless round trips, exact bytes, and training that depends on the text alone."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.config.data import TokenizerSettings
from affinage.data.special_tokens import FIXED_PIECES, NEWLINE, TAB, UNK
from affinage.data.tokenizer import Tokenizer
from affinage.data.tokenizer_training import balanced_sample, measure, train_tokenizer
from affinage.errors import UserError
from source_forms import write_documents
from tiny_corpus import TRICKY, write_split

# Single characters as often as pieces that the vocabulary, the control tokens or white space are made of.
texts = st.lists(
    st.one_of(
        st.characters(exclude_characters="\u2581\U0010fffe\U0010ffff"),
        st.sampled_from([*TRICKY, "  ", "\n", "12", "the", "é"]),
    ),
    max_size=12,
).map("".join)


def test_the_first_ten_ids_are_fixed_and_decoding_shows_control_tokens_only_if_asked(tokenizer: Tokenizer):
    assert [tokenizer.id_to_piece(i) for i in range(10)] == list(FIXED_PIECES)
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


def test_batches_equal_single_texts(tokenizer: Tokenizer):
    rng = random.Random(1)
    batch = [*TRICKY, *("".join(rng.choices(" ab\né<|s1🙂", k=rng.randint(0, 60))) for _ in range(50))]
    batch += [*(text * 100 for text in TRICKY), " " * 3_000, "=" * 3_000]
    encoded = tokenizer.encode_batch(batch)
    assert {ids.dtype for ids in encoded} == {np.dtype(tokenizer.dtype)}
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(text) for text in batch]


def test_characters_have_one_id_each_and_strangers_are_unknown(characters: Tokenizer):
    assert len(characters.encode("cheese")) == 6
    ids = characters.encode("a漢b")
    assert ids[1] == UNK
    assert characters.decode(ids) == "a\ufffdb"
    assert characters.byte_lengths("a漢b", ids).tolist() == [1, 3, 1]


def split_of(folder: Path, *texts: str) -> Path:
    write_documents(folder / "train", [{"text": text, "language": "en"} for text in texts])
    write_documents(folder / "validation", [])
    return folder


def test_digits_are_split_and_long_lines_are_learned_from(tmp_path: Path):
    split_of(tmp_path, "In 1999 it was 1999. " * 50, "xylophone quartz " * 1000)  # 17,000 bytes on one line
    settings = TokenizerSettings(vocab_size=310)
    train_tokenizer(tmp_path, tmp_path / "out", settings, ("en",), seed=0)
    tokenizer = Tokenizer(tmp_path / "out")
    assert len(tokenizer.encode("1999")) == 4
    assert len(tokenizer.encode(" xylophone")) == 1


def test_training_twice_gives_the_same_bytes_whatever_the_order_of_files(split_folder: Path, tmp_path: Path):
    again = write_split(tmp_path / "again", reverse=True)
    settings = TokenizerSettings(vocab_size=400, sample_bytes=20_000)
    for split, name in ((split_folder, "a"), (split_folder, "b"), (again, "c")):
        train_tokenizer(split, tmp_path / name, settings, ("en", "fr"), seed=3)
    assert len({(tmp_path / name / "tokenizer.model").read_bytes() for name in "abc"}) == 1


@pytest.mark.parametrize(("vocabulary", "advice"), [(30_000, r"\d+ or less"), (300, r"\d+ or more")])
def test_a_vocabulary_that_cannot_be_is_refused_with_one_that_can(tmp_path: Path, vocabulary: int, advice: str):
    split_of(tmp_path, "".join(chr(0x4E00 + i) for i in range(200)) + " the river and the stone")
    with pytest.raises(UserError) as error:
        train_tokenizer(
            tmp_path, tmp_path / "out", TokenizerSettings(vocab_size=vocabulary, character_coverage=1), ("en",), 0
        )
    assert error.value.where == "tokenizer.vocab_size" and re.search(advice, error.value.fix)
    for kind in ("bpe", "char"):
        with pytest.raises(UserError):  # no text
            train_tokenizer(split_of(tmp_path / kind), tmp_path, TokenizerSettings(kind=kind), ("en",), seed=0)


def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path):
    for content in (None, "{}", "x", '{"model": {"vocab": {"a": "b"}}}'):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError) as error:
            Tokenizer(tmp_path)
        assert str(tmp_path) in error.value.where


def test_the_sample_is_balanced_over_languages(split_folder: Path):
    (texts, shares), (others, _) = (
        balanced_sample(split_folder / "train", ("en", "fr"), 10_000, seed=seed) for seed in (0, 1)
    )
    assert abs(shares["en"] - shares["fr"]) <= 1
    assert sum(len(text.encode()) for text in texts) == pytest.approx(10_000, abs=10)
    assert others != texts


def test_the_tokenizer_is_measured_by_language_and_source(bpe: Tokenizer, split_folder: Path):
    measured = measure(bpe, split_folder)
    assert measured["measured_on"] == "validation" and set(measured["languages"]) == {"en", "fr"}
    for group in ("languages", "sources"):
        for entry in measured[group].values():
            assert entry["bytes_per_token"] == pytest.approx(entry["bytes"] / entry["tokens"])
            assert entry["tokens_per_word"] == pytest.approx(entry["tokens"] / entry["words"])
    assert measured["round_trip"] == {"documents": 8, "exact": 8}

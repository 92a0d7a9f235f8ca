import random
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.bpe_tokenizer import BpeTokenizer
from affinage.data.documents import DocumentWriter
from affinage.data.special_tokens import CONTROL_PIECES, FIXED_PIECES, NEWLINE, TAB, UNK
from affinage.data.tokenizer import Tokenizer
from affinage.data.tokenizer_training import balanced_sample, fair_shares, train_tokenizer
from affinage.errors import UserError
from affinage.recipe.data import TokenizerSettings
from tiny_corpus import TRICKY, write_split

# Single characters as often as pieces that the vocabulary, the control tokens or white space are made of.
texts = st.lists(
    st.one_of(st.characters(exclude_characters="\u2581"), st.sampled_from([*TRICKY, "  ", "\n", "12", "the", "é"])),
    max_size=12,
).map("".join)


def test_the_first_ten_ids_are_the_same_in_every_tokenizer(tokenizer: Tokenizer):
    assert [tokenizer.id_to_piece(i) for i in range(10)] == list(FIXED_PIECES)
    assert tokenizer.encode("\n\t") == [NEWLINE, TAB]


@pytest.mark.parametrize("text", TRICKY)
def test_every_text_decodes_to_itself(bpe: Tokenizer, text: str):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(i >= len(CONTROL_PIECES) for i in ids)


@given(text=texts)
def test_any_text_round_trips_without_a_control_id_and_counts_its_bytes(text: str, tiny_bpe_path: Path):
    tokenizer = BpeTokenizer(tiny_bpe_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(i >= len(CONTROL_PIECES) for i in ids)
    assert tokenizer.byte_lengths(text, ids).sum() == len(text.encode())


@pytest.fixture(scope="module")
def tiny_bpe_path(bpe: Tokenizer) -> Path:
    assert bpe.model_path is not None
    return bpe.model_path


def test_the_space_sign_of_sentencepiece_in_text_is_harmless(bpe: Tokenizer):
    assert bpe.decode(bpe.encode("a\u2581b")) == "a b"


def test_text_that_is_not_unicode_is_encoded_as_replacement_characters(bpe: Tokenizer):
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"


def test_batches_equal_single_texts(tokenizer: Tokenizer):
    rng = random.Random(1)
    batch = [*TRICKY, *("".join(rng.choices(" ab\né<|s1🙂", k=rng.randint(0, 60))) for _ in range(200))]
    expected = [tokenizer.encode(text) for text in batch]
    assert tokenizer.encode_batch(batch) == expected
    flat, ends = tokenizer.encode_flat(batch)
    assert flat.dtype == tokenizer.dtype
    assert [part.tolist() for part in np.split(flat, ends[:-1])] == expected
    assert tokenizer.encode_flat([])[1].tolist() == []


def test_digits_are_split_only_if_asked(split_folder: Path, tmp_path: Path):
    with DocumentWriter(tmp_path / "train") as writer:
        writer.add(id="0", source="s", language="en", text="In 1999 and 1999 it was 1999, again 1999. " * 50)
    with DocumentWriter(tmp_path / "validation"):
        pass
    counts = []
    for split_digits in (True, False):
        folder = tmp_path / str(split_digits)
        settings = TokenizerSettings(vocabulary=300, split_digits=split_digits)
        train_tokenizer(tmp_path, folder, settings, ("en",), seed=0)
        counts.append(len(Tokenizer.load(folder).encode("1999")))
    assert counts[0] == 4 and counts[1] < 4


def test_characters_have_one_id_each_and_strangers_are_unknown(characters: Tokenizer):
    assert len(characters.encode("cheese")) == 6
    ids = characters.encode("a漢b")
    assert ids[1] == UNK
    assert characters.decode(ids) == "a\ufffdb"
    assert characters.byte_lengths("a漢b", ids).tolist() == [1, 3, 1]


def test_decoding_shows_control_tokens_only_if_asked(tokenizer: Tokenizer):
    ids = [2, 6, *tokenizer.encode("the"), 7, 3, 0]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(np.array(ids), keep_special=True) == "<s><|im_start|>the<|im_end|></s><pad>"
    assert tokenizer.decode([tokenizer.vocabulary + 5]) == "\ufffd"


def test_training_twice_gives_the_same_bytes_whatever_the_order_of_files(split_folder: Path, tmp_path: Path):
    again = write_split(tmp_path / "again", reverse=True)
    settings = TokenizerSettings(vocabulary=400, sample_megabytes=0.02)
    for split, name in ((split_folder, "a"), (split_folder, "b"), (again, "c")):
        train_tokenizer(split, tmp_path / name, settings, ("en", "fr"), seed=3)
    models = {(tmp_path / name / "tokenizer.model").read_bytes() for name in "abc"}
    assert len(models) == 1


def test_a_line_longer_than_the_trainers_default_is_learned_from(tmp_path: Path):
    with DocumentWriter(tmp_path / "train") as writer:
        writer.add(id="0", source="s", language="en", text="xylophone quartz " * 1000)  # 17,000 bytes on one line
    with DocumentWriter(tmp_path / "validation"):
        pass
    train_tokenizer(tmp_path, tmp_path / "out", TokenizerSettings(vocabulary=300), ("en",), seed=0)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert len(tokenizer.encode(" xylophone")) == 1


@pytest.mark.parametrize(
    ("vocabulary", "advice"),
    [(30_000, r"Set tokenizer\.vocabulary to \d+ or less"), (300, r"Set tokenizer\.vocabulary to \d+ or more")],
)
def test_a_vocabulary_that_cannot_be_is_refused_with_one_that_can(tmp_path: Path, vocabulary: int, advice: str):
    wide = "".join(chr(0x4E00 + i) for i in range(200))
    with DocumentWriter(tmp_path / "train") as writer:
        writer.add(id="0", source="s", language="en", text=wide + " the river and the stone")
    with pytest.raises(UserError, match=r"tokenizer\.vocabulary") as error:
        train_tokenizer(tmp_path, tmp_path / "out", TokenizerSettings(vocabulary=vocabulary, coverage=1), ("en",), 0)
    assert re.search(advice, error.value.fix)


def test_no_text_is_refused(tmp_path: Path):
    with DocumentWriter(tmp_path / "train"):
        pass
    for kind in ("bpe", "characters"):
        with pytest.raises(UserError, match="no text"):
            train_tokenizer(tmp_path, tmp_path / "out", TokenizerSettings(kind=kind), ("en",), seed=0)


def test_a_folder_without_tokenizer_and_a_foreign_model_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to learn from"] * 9),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=19,
        minloglevel=2,
        user_defined_symbols=["<|im_start|>"],
    )
    with pytest.raises(UserError, match="the first ids are"):
        Tokenizer.load(tmp_path)


@given(st.lists(st.integers(0, 1000), max_size=6), st.integers(0, 5000))
def test_shares_are_fair(sizes: list[int], budget: int):
    shares = fair_shares(sizes, budget)
    assert sum(shares) == min(sum(sizes), budget)
    cut_off = [share for share, size in zip(shares, sizes) if share < size]
    assert all(share <= size for share, size in zip(shares, sizes))
    # Whoever gets less than they have gets as much as anybody, up to the rounding of one byte per group.
    assert not cut_off or min(cut_off) >= max(shares) - len(sizes)


def test_the_sample_is_balanced_over_languages(split_folder: Path):
    sample = balanced_sample(split_folder / "train", ("en", "fr"), 10_000, seed=0)
    assert abs(sample.by_language["en"] - sample.by_language["fr"]) <= 1
    assert sum(len(text.encode()) for text in sample.texts) == pytest.approx(10_000, abs=10)
    other = balanced_sample(split_folder / "train", ("en", "fr"), 10_000, seed=1)
    assert other.texts != sample.texts


def test_the_quality_report_counts_what_was_encoded(split_folder: Path, tmp_path: Path):
    summary = train_tokenizer(split_folder, tmp_path, TokenizerSettings(vocabulary=500), ("en", "fr"), seed=0)
    assert summary["measured_on"] == "validation"
    assert summary["round_trip"] == {"documents": 8, "exact": 8}
    assert set(summary["languages"]) == {"en", "fr"} and set(summary["sources"]) == {"tales", "letters/old"}
    assert sum(each["bytes"] for each in summary["languages"].values()) == sum(
        each["bytes"] for each in summary["sources"].values()
    )
    assert 1 < summary["languages"]["en"]["bytes_per_token"] < 8
    assert summary["languages"]["fr"]["tokens_per_word"] > 1

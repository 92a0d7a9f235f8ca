"""The compiled encoder gives SentencePiece's ids, whatever the text and however the vocabulary was split."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from affinage.data import word_encoding
from affinage.data.bpe_kernels import Words, encode_texts
from affinage.data.code_points import text_buffers
from affinage.data.special_tokens import FIXED_PIECES
from affinage.data.tokenizer_training import train_bpe
from affinage.data.word_encoding import WordEncoder, vocabulary_of
from affinage.recipe.data import TokenizerSettings
from tiny_corpus import TRICKY

TRAINING = ["it's l'été: (a  b) -- of the, of the. aaaa aaaa == == x1 y22 naïve ça; où? 漢字漢字 " * 5]
pieces_of_text = ["  ", "\n", "\t", "12", "the"]
pieces_of_text += [" of the,", "é", "e\u0301", "aaa", "--", "==", "\0", "\r", "字", "_", "²"]
texts = st.lists(
    st.one_of(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), st.sampled_from(pieces_of_text)),
    max_size=30,
).map("".join)


@pytest.fixture(
    scope="module", params=[{}, {"split_by_unicode_script": False}, {"split_by_whitespace": False}], ids=str
)
def model(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary whose pieces may cross from letters to other signs, or from one word to the next."""
    train = sentencepiece.SentencePieceTrainer.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece.SentencePieceTrainer, "train", lambda **options: train(**options, **request.param))
        trained = train_bpe(TRAINING, TokenizerSettings(vocabulary=330))
    return sentencepiece.SentencePieceProcessor(model_proto=trained)


@pytest.fixture(scope="module")
def encoder(model: sentencepiece.SentencePieceProcessor) -> WordEncoder:
    return WordEncoder(model, len(FIXED_PIECES), np.uint16)


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoding, "_WORTH_COMPILING", 0)


def parts(flat: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, ends[:-1])]


@given(batch=st.lists(texts, min_size=1, max_size=4))
def test_any_text_has_the_ids_of_sentencepiece(batch, model, encoder):
    assert parts(*encoder.encode(batch)) == [model.encode(text) for text in batch]


def test_tricky_long_and_repetitive_texts_have_the_ids_of_sentencepiece(model, encoder):
    rng = random.Random(1)
    signs = " ab\né<|s1🙂'=-"
    batch = [*TRICKY, *("".join(rng.choices(signs, k=rng.randint(0, 300))) for _ in range(300))]
    batch += ["a" * 30_000, "ab" * 10_000, "=" * 5_000, " " * 5_000, "the" * 3_000 + "é" * 3_000, "字漢" * 2_000, ""]
    assert parts(*encoder.encode(batch)) == [model.encode(text) for text in batch]


def test_threads_have_memories_of_their_own(model, encoder):
    rng = random.Random(2)
    batches = [["".join(rng.choices("the of\na'é ", k=2_000)) for _ in range(20)] for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(encoder.encode, batches))
    for batch, result in zip(batches, found):
        assert parts(*result) == [model.encode(text) for text in batch]


def test_a_full_memory_of_words_begins_anew(model):
    known = vocabulary_of(model, len(FIXED_PIECES))
    small = Words(
        np.full(32, -1, np.int32),
        np.empty(16, np.uint64),
        np.zeros(17, np.int32),
        np.zeros(17, np.int32),
        np.empty(400, np.uint8),
        np.empty(400, np.int32),
        np.zeros(1, np.int64),
    )
    rng = random.Random(3)
    batch = [" ".join("".join(rng.choices("thofae'é", k=rng.randint(1, 9))) for _ in range(200)) for _ in range(20)]
    data, offsets = text_buffers(pa.array(batch, pa.large_string()))
    ids, ends = np.empty(data.size, np.uint16), np.empty(len(batch), np.int64)
    count = encode_texts(data, offsets, known, small, ids, ends)
    assert parts(ids[:count], ends) == [model.encode(text) for text in batch]


def test_little_text_is_left_to_sentencepiece(model, monkeypatch):
    monkeypatch.setattr(word_encoding, "_WORTH_COMPILING", 100)
    encoder = WordEncoder(model, len(FIXED_PIECES), np.uint16)
    for text in ("of the", "été " * 100, "of the"):
        assert parts(*encoder.encode([text])) == [model.encode(text)]
    assert encoder.encode([])[1].tolist() == []

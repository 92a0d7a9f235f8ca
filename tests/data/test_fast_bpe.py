"""The compiled encoder gives SentencePiece's ids, whatever the text and however the vocabulary was split."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from affinage.config.data import TokenizerSettings
from affinage.data.fast_bpe import FastBpe
from affinage.data.tokenizer_training import train_bpe
from tiny_corpus import TRICKY

TRAINING = ["it's l'été: (a  b) -- of the, of the. aaaa aaaa == == x1 y22 naïve ça; où? 漢字漢字 " * 5]
PIECES = ["  ", "\n", "\t", "12", "the", " of the,", "é", "e\u0301", "aaa", "--", "==", "\0", "\r", "字", "_", "²"]
texts = st.lists(
    st.one_of(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), st.sampled_from(PIECES)),
    max_size=30,
).map("".join)


@pytest.fixture(scope="module", params=[{}, {"split_by_whitespace": False}], ids=str)
def model(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary whose pieces may cross from one word to the next."""
    train = sentencepiece.SentencePieceTrainer.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece.SentencePieceTrainer, "train", lambda **options: train(**options, **request.param))
        trained = train_bpe(TRAINING, TokenizerSettings(vocab_size=330))
    return sentencepiece.SentencePieceProcessor(model_proto=trained)


@pytest.fixture(scope="module")
def encoder_of(model: sentencepiece.SentencePieceProcessor) -> Callable[..., FastBpe]:
    pieces = {model.id_to_piece(i).replace("\u2581", " "): i for i in range(8, model.get_piece_size())}
    return lambda **settings: FastBpe(pieces, np.uint16, **settings)


@pytest.fixture(scope="module")
def encoder(encoder_of: Callable[..., FastBpe]) -> FastBpe:
    return encoder_of()


def parts(flat: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, ends[:-1])]


@given(batch=st.lists(texts, min_size=1, max_size=4))
def test_any_text_has_the_ids_of_sentencepiece(batch, model, encoder):
    assert parts(*encoder.encode(batch)) == [model.encode(text) for text in batch]


def test_tricky_long_and_repetitive_texts_have_the_ids_of_sentencepiece(model, encoder):
    rng = random.Random(1)
    signs = " ab\né<|s1🙂'=-"
    batch = [*TRICKY, *("".join(rng.choices(signs, k=rng.randint(0, 300))) for _ in range(200))]
    batch += ["a" * 30_000, "ab" * 10_000, "=" * 5_000, " " * 5_000, "the" * 3_000 + "é" * 3_000, "字漢" * 2_000, ""]
    assert parts(*encoder.encode(batch)) == [model.encode(text) for text in batch]


def test_the_memory_begins_again_when_it_is_full(model, encoder_of):
    rng = random.Random(2)
    words = ["".join(rng.choices("thofae'é", k=rng.randint(1, 9))) for _ in range(400)]
    batch = [" ".join(rng.choices(words, k=200)) for _ in range(20)]
    assert parts(*encoder_of(cached_words=16).encode(batch)) == [model.encode(text) for text in batch]


def test_threads_may_share_an_encoder(model, encoder_of):
    rng, encoder = random.Random(3), encoder_of(cached_words=64)
    batches = [["".join(rng.choices("thofae'é ", k=20_000))] for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(encoder.encode, batches))
    assert [parts(*each) for each in encoded] == [[model.encode(text) for text in batch] for batch in batches]

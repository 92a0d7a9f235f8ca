"""A split and tokenizers of both kinds, made once for all tests of this folder."""

from pathlib import Path

import pytest

from affinage.config.data import TokenizerSettings
from affinage.data.tokenizer import Tokenizer
from affinage.data.tokenizer_training import train_tokenizer
from tiny_corpus import write_split


@pytest.fixture(scope="session")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_split(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="session")
def bpe(split_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer(split_folder, folder, TokenizerSettings(vocab_size=500), ("en", "fr"))
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def characters(split_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("characters")
    train_tokenizer(split_folder, folder, TokenizerSettings(kind="char"), ("en", "fr"))
    return Tokenizer(folder)


@pytest.fixture(params=["bpe", "characters"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)

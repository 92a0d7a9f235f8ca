"""Published tokenizers are read from their own files and measured on the same documents as ours."""

from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from affinage.data.fertility import compare, measure
from affinage.data.published_tokenizer import PublishedTokenizer
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError

TEXTS = ["It was the best of times.", "  L'été, où l'on va\n\tici  ", "x = {1: '<|endoftext|>'}", "漢字 🙂", ""]
NONE = ["nowhere.json", "some.json", "some.exe", "empty", "lonely/merges.txt", "double/merges.txt"]


@pytest.fixture(scope="module")
def byte_level() -> ByteLevelBPETokenizer:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS * 20, vocab_size=320)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_level: ByteLevelBPETokenizer, bpe: Tokenizer) -> Path:
    """Files as they are published; GPT-2 has merges under one name, and the vocabulary under another."""
    folder = tmp_path_factory.mktemp("published")
    for name in ("gpt", "whole", "empty", "lonely", "double"):
        (folder / name).mkdir()
    byte_level.save_model(str(folder / "gpt"))
    vocabulary = (folder / "gpt/vocab.json").rename(folder / "gpt/gpt_encoder.json").read_bytes()
    merges = (folder / "gpt/merges.txt").rename(folder / "gpt/gpt_vocab.bpe").read_bytes()
    byte_level.save(str(folder / "whole/tokenizer.json"))
    files = {"other.model.v1": bpe.model_path.read_bytes(), "some.json": b"{}", "some.exe": b""}
    files |= {"lonely/merges.txt": merges, "double/merges.txt": merges}  # without a vocabulary, and with two
    files |= {"double/a.json": vocabulary, "double/b.json": vocabulary}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", ["gpt/gpt_vocab.bpe", "whole/tokenizer.json", "whole", "other.model.v1"])
def test_the_ids_are_those_of_the_library(folder: Path, byte_level, bpe: Tokenizer, name: str):
    published, pieces = PublishedTokenizer(folder / name), name.startswith("other")
    assert published.vocabulary == (bpe.vocabulary if pieces else byte_level.get_vocab_size())
    encoded = published.encode_batch(TEXTS)
    assert encoded == [bpe.encode(text) if pieces else byte_level.encode(text).ids for text in TEXTS]
    assert [published.decode(ids) for ids in encoded] == TEXTS


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_tokenizer_is_refused(folder: Path, name: str):
    with pytest.raises(UserError) as error:
        PublishedTokenizer(folder / name)
    assert error.value.where == str(folder / name) and error.value.fix


def test_all_are_measured_on_the_same_documents(folder: Path, bpe: Tokenizer, split_folder: Path):
    ours, theirs = compare(bpe, [str(folder / "gpt/gpt_vocab.bpe")], split_folder)["tokenizers"]
    assert (ours["name"], theirs["name"]) == ("", "gpt_vocab.bpe")
    assert {key: ours[key] for key in measure(bpe, split_folder)} == measure(bpe, split_folder)
    assert ours["measured_on"] == "validation" and set(ours["languages"]) == {"en", "fr"}
    for group in ("languages", "sources"):
        assert {name: entry["bytes"] for name, entry in ours[group].items()} == {
            name: entry["bytes"] for name, entry in theirs[group].items()
        }
        for entry in (*ours[group].values(), *theirs[group].values()):
            assert entry["bytes_per_token"] == pytest.approx(entry["bytes"] / entry["tokens"])
            assert entry["tokens_per_word"] == pytest.approx(entry["tokens"] / entry["words"])
    assert ours["round_trip"] == theirs["round_trip"] == {"documents": 8, "exact": 8}

"""Published tokenizers are read from their own files and measured on the same documents as ours."""

from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from affinage.data.fertility import compare, measure
from affinage.data.published_tokenizer import PublishedTokenizer
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError

TEXTS = ["It was the best of times.", "  L'été, où l'on va\n\tici  ", "x = {1: '<|endoftext|>'}", "漢字 🙂", ""]


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
    vocabulary = (folder / "gpt/vocab.json").rename(folder / "gpt/gpt_encoder.json").read_text()
    merges = (folder / "gpt/merges.txt").rename(folder / "gpt/gpt_vocab.bpe").read_text()
    byte_level.save(str(folder / "whole/tokenizer.json"))
    (folder / "other.model.v1").write_bytes(bpe.model_path.read_bytes())
    (folder / "some.json").write_text("{}")
    (folder / "some.exe").write_text("")
    for name in ("lonely/merges.txt", "double/merges.txt"):  # without a vocabulary, and with two
        (folder / name).write_text(merges)
    for name in ("double/a.json", "double/b.json"):
        (folder / name).write_text(vocabulary)
    return folder


@pytest.mark.parametrize("name", ["gpt/gpt_vocab.bpe", "whole/tokenizer.json", "whole", "other.model.v1"])
def test_the_ids_are_those_of_the_library(folder: Path, byte_level, bpe: Tokenizer, name: str):
    published = PublishedTokenizer(folder / name)
    pieces = name.startswith("other")
    assert published.vocabulary == (bpe.vocabulary if pieces else byte_level.get_vocab_size())
    encoded = published.encode_batch(TEXTS)
    assert encoded == [bpe.encode(text) if pieces else byte_level.encode(text).ids for text in TEXTS]
    assert [published.decode(ids) for ids in encoded] == TEXTS


@pytest.mark.parametrize(
    "name", ["nowhere.json", "some.json", "some.exe", "empty", "lonely/merges.txt", "double/merges.txt"]
)
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
        assert ours[group].keys() == theirs[group].keys()
        for name, entry in theirs[group].items():
            assert entry["bytes"] == ours[group][name]["bytes"]
            assert entry["bytes_per_token"] == pytest.approx(entry["bytes"] / entry["tokens"])
    assert ours["languages"]["fr"]["tokens_per_word"] > 1 and 1 < ours["languages"]["en"]["bytes_per_token"] < 8
    assert ours["round_trip"] == theirs["round_trip"] == {"documents": 8, "exact": 8}

"""Published tokenizers are read from their own files and measured on the same documents as ours."""

import json
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
def merges(tmp_path_factory: pytest.TempPathFactory, byte_level: ByteLevelBPETokenizer) -> Path:
    """As GPT-2 was published: merges under one name, the vocabulary under another."""
    folder = tmp_path_factory.mktemp("published")
    byte_level.save_model(str(folder))
    (folder / "vocab.json").rename(folder / "gpt_encoder.json")
    (folder / "merges.txt").rename(folder / "gpt_vocab.bpe")
    return folder / "gpt_vocab.bpe"


def test_merges_with_a_vocabulary_beside_them(merges: Path, byte_level: ByteLevelBPETokenizer):
    published = PublishedTokenizer(merges)
    assert published.vocabulary == byte_level.get_vocab_size()
    encoded = published.encode_batch(TEXTS)
    assert encoded == [byte_level.encode(text).ids for text in TEXTS]
    assert [published.decode(ids) for ids in encoded] == TEXTS


def test_a_tokenizer_json_and_a_sentencepiece_model(tmp_path: Path, byte_level: ByteLevelBPETokenizer, bpe: Tokenizer):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "other.model.v1").write_bytes(bpe.model_path.read_bytes())
    assert PublishedTokenizer(tmp_path / "tokenizer.json").encode_batch(TEXTS) == [
        byte_level.encode(text).ids for text in TEXTS
    ]
    assert PublishedTokenizer(tmp_path).encode_batch(TEXTS) == PublishedTokenizer(
        tmp_path / "tokenizer.json"
    ).encode_batch(TEXTS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        PublishedTokenizer(tmp_path / "empty")
    pieces = PublishedTokenizer(tmp_path / "other.model.v1")
    assert pieces.vocabulary == bpe.vocabulary
    assert pieces.encode_batch(TEXTS) == [bpe.encode(text) for text in TEXTS]


def test_all_are_measured_on_the_same_documents(merges: Path, bpe: Tokenizer, split_folder: Path):
    ours, theirs = compare(bpe, [str(merges)], split_folder)["tokenizers"]
    assert (ours["name"], theirs["name"]) == ("", "gpt_vocab.bpe")
    assert {key: ours[key] for key in measure(bpe, split_folder)} == measure(bpe, split_folder)
    for group in ("languages", "sources"):
        assert ours[group].keys() == theirs[group].keys()
        for name, entry in theirs[group].items():
            assert entry["bytes"] == ours[group][name]["bytes"]
            assert entry["bytes_per_token"] == pytest.approx(entry["bytes"] / entry["tokens"])
    assert theirs["round_trip"]["exact"] == theirs["round_trip"]["documents"] == ours["round_trip"]["documents"]


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, merges: Path):
    (tmp_path / "some.json").write_text("{}")
    (tmp_path / "some.exe").write_text("")
    (tmp_path / "lonely.bpe").write_text(merges.read_text())
    for name, reason in (
        ("nowhere.json", "no such file"),
        ("some.json", "not a tokenizer"),
        ("some.exe", "ends so"),
        ("lonely.bpe", "0 vocabularies"),
    ):
        with pytest.raises(UserError, match=reason):
            PublishedTokenizer(tmp_path / name)
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="2 vocabularies"):
        PublishedTokenizer(tmp_path / "lonely.bpe")

"""Published tokenizers are measured on the same documents as ours."""

from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from affinage.data.fertility import compare, measure
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError


def test_all_are_measured_on_the_same_documents(tmp_path: Path, bpe: Tokenizer, split_folder: Path):
    other = ByteLevelBPETokenizer()
    other.train_from_iterator(["It was the best of times.", "L'été, où l'on va"] * 20, vocab_size=320)
    (tmp_path / "gpt").mkdir()
    other.save(str(tmp_path / "gpt/tokenizer.json"))
    paths = [str(tmp_path / "gpt"), str(tmp_path / "gpt/tokenizer.json")]
    ours, theirs, again = compare(bpe, paths, split_folder)["tokenizers"]
    assert (ours["name"], theirs["name"]) == ("", "gpt") and again == theirs
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


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, bpe: Tokenizer, split_folder: Path):
    with pytest.raises(UserError) as error:
        compare(bpe, [str(tmp_path)], split_folder)
    assert "AutoTokenizer" in error.value.fix

"""Tokens that stand for more bytes than one byte can count: all of them are counted, and trained."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from affinage.data.conversations import prepare_conversations
from affinage.data.documents import DocumentWriter
from affinage.data.row_files import open_rows
from affinage.data.rows import pack_rows
from affinage.data.tokenizer import Tokenizer
from affinage.recipe.data import RowsSettings
from affinage.recipe.tuning import SftSettings

LONG = "x" * 254  # with the space before it 255 bytes: one more, for "it is trained", is 0 in 8 bits
SPECIAL = ["</s>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def words(tmp_path) -> Tokenizer:
    """A tokenizer of whole words, which counts the spaces before a word as the word's."""
    pieces = ["[UNK]", "a", "b", "user", "assistant", LONG]
    fast = FastTokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(SPECIAL)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer.load(folder)


def test_bytes_of_validation_rows(words, tmp_path):
    text = "a" + " " * 300 + "b" + " " * 700 + "b"
    for part in ("train", "validation"):
        with DocumentWriter(tmp_path / "split" / part) as writer:
            writer.add(id="1", source="s", language="en", text=text)
    pack_rows(tmp_path / "split", words, tmp_path / "rows", RowsSettings(context=8), seed=0)
    predicted = np.load(tmp_path / "rows" / "validation" / "s.en" / "bytes.npy").sum()
    assert predicted == len(text) - len("a"), "nothing comes before the first token that could predict it"


def test_a_long_token_of_an_answer_is_trained(words, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a b", "completion": f"b {LONG} b"}) + "\n")
    schedule = {"peak": 1e-3, "floor": 1e-4}
    sources = [str(tmp_path / "chat.jsonl")]
    settings = SftSettings(sources=sources, steps=1, batch=1, schedule=schedule, held_out=0)
    prepare_conversations(settings, words, tmp_path / "rows", context=32, seed=0)
    files = open_rows(tmp_path / "rows" / "train" / "chat")
    trained = files.read_range(0, 1)[np.asarray(files.masks[0][0:1], bool)]
    assert words.encode(f"b {LONG} b") == trained[:-1].tolist()
    assert np.load(files.folder / "bytes.npy").sum() == words.piece_bytes[trained].sum()

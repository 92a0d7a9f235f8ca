"""Documents to rows: all of them once, whole, with their bytes and where they came from."""

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from affinage.config.data import PackingSettings, safe_name
from affinage.data.dataloader import ValidationRows
from affinage.data.special_tokens import BOS, EOS, PAD
from affinage.data.token_shards import TokenShards
from affinage.data.tokenize import tokenize
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserWarned
from affinage.json_files import read_object
from run_affinage import refused
from source_forms import rows_of, split_of
from tiny_corpus import write_split

CONTEXT = 32


@pytest.fixture(scope="module")
def packed(split_folder: Path, bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder of rows for each way of packing."""
    folder = tmp_path_factory.mktemp("rows")
    for packing in ("concat", "best_fit"):
        settings = PackingSettings(seq_len=CONTEXT, num_shards=8, strategy=packing)
        tokenize(split_folder, bpe, folder / packing, settings)
    return folder


def documents_by_group(split_folder: Path, part: str) -> dict[str, dict[tuple[str, str], str]]:
    """By group, the text by source and id."""
    groups = defaultdict(dict)
    for row in rows_of(split_folder / part):
        groups[f"{safe_name(row['source'])}.{row['language']}"][row["source"], row["id"]] = row["text"]
    return groups


def spans_in(folder: Path) -> list[dict]:
    """The pieces of documents of a folder, their rows numbered through all shards."""
    found, first = [], 0
    for file in sorted(folder.glob("documents-*.parquet")):
        found += [span | {"row": span["row"] + first} for span in pq.read_table(file).to_pylist()]
        first += len(np.load(file.parent / file.name.replace("documents", "tokens").replace(".parquet", ".npy")))
    return found


def read_all(folder: Path) -> np.ndarray:
    """All rows of a folder, with numpy alone."""
    files = read_object(folder / "shards.json")["files"]
    return np.concatenate([np.load(folder / name) for name in files if name.startswith("tokens")])


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize(("part", "overlap"), [("train", 0), ("validation", 1)])
def test_rows_hold_every_token_of_every_document_and_tell_whose(packed, split_folder, bpe, packing, part, overlap):
    """A validation row that continues a document begins with the last token of the row before it."""
    groups = documents_by_group(split_folder, part)
    assert {path.name for path in (packed / packing / part).iterdir()} == set(groups)
    for group, documents in groups.items():
        folder = packed / packing / part / group
        rows, facts, spans = read_all(folder), read_object(folder / "shards.json"), spans_in(folder)
        assert rows.dtype == np.uint16 and rows.shape[1] == CONTEXT
        expected = {name: [BOS, *bpe.encode(text), EOS] for name, text in documents.items()}
        found = {name: np.zeros(len(tokens), int) for name, tokens in expected.items()}
        covered = np.zeros(rows.shape, int)
        for span in spans:
            name, row, begin, end = (span["source"], span["id"]), span["row"], span["start"], span["stop"]
            said = slice(span["offset"], span["offset"] + end - begin)
            assert rows[row, begin:end].tolist() == expected[name][said] and span["url"] == f"file:///{span['source']}"
            found[name][said] += 1
            covered[row, begin:end] += 1
        assert (covered == (rows != PAD)).all() and (np.diff([span["row"] for span in spans]) >= 0).all()
        repeated = sum(int((times - 1).sum()) for times in found.values())
        assert all(times.min() == 1 for times in found.values()) and repeated == overlap * (len(rows) - 1)
        assert facts["tokens"] == sum(map(len, expected.values())) and facts["documents"] == len(documents)
        assert facts["bytes"] == sum(len(text.encode()) for text in documents.values())


def test_every_byte_of_validation_text_is_predicted_exactly_once(packed, split_folder: Path, bpe: Tokenizer):
    """Bits per byte: the bytes that are counted are those of the tokens that the loss counts."""
    for group, documents in documents_by_group(split_folder, "validation").items():
        validation = ValidationRows(packed / "concat/validation" / group, batch=4)
        predicted = ends = 0
        for batch in validation:
            ids, targets = batch["segment_ids"], batch["tokens"][:, 1:]
            counted = (batch["loss_mask"][:, 1:] > 0) & (ids[:, 1:] == ids[:, :-1])
            predicted += bpe.piece_bytes[targets[counted]].sum()
            ends += np.count_nonzero(targets[counted] == EOS)
        assert validation.bytes == predicted == sum(len(text.encode()) for text in documents.values())
        assert ends == len(documents)
    limited = ValidationRows(packed / "concat/validation" / group, batch=4, limit=5)
    lengths = np.load(packed / "concat/validation" / group / "row_bytes-00000-of-00001.npy")
    assert limited.rows == 5 and len(limited) == 2
    assert limited.bytes == lengths[np.arange(5) * validation.rows // 5].sum()
    *_, last = limited
    assert last["tokens"].shape == (4, CONTEXT)
    assert last["loss_mask"][1:].sum() == 0 and (last["tokens"][1:] == PAD).all()


def test_the_order_is_shuffled_and_does_not_depend_on_files(split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    again = write_split(tmp_path / "split", reverse=True)
    for split, name in ((split_folder, "a"), (again, "b")):
        tokenize(split, bpe, tmp_path / name, PackingSettings(seq_len=CONTEXT))
    a, b = (read_all(tmp_path / name / "train/tales.en") for name in "ab")
    assert (a == b).all()
    ids = [span["id"] for span in spans_in(tmp_path / "a/train/tales.en")]
    assert ids != sorted(ids)


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_shards_hold_consecutive_documents_and_are_even_counted_and_hashed(split_folder, bpe, tmp_path, count):
    tokenize(split_folder, bpe, tmp_path, PackingSettings(seq_len=CONTEXT, num_shards=count))
    groups = documents_by_group(split_folder, "train")
    shards = len(list(tmp_path.glob("train/*/tokens-*.npy")))
    assert shards == max(count, len(groups)) or len(groups) < shards < 120
    for group, documents in groups.items():
        folder, first = tmp_path / "train" / group, 0
        for file in sorted(folder.glob("documents-*")):
            ids = [(s["source"], s["id"]) for s in pq.read_table(file).to_pylist() if s["offset"] == 0]
            assert set(ids) == set(list(documents)[first : (first := first + len(ids))])
        facts = read_object(folder / "shards.json")
        for name, counted in facts["files"].items():
            content = (folder / name).read_bytes()
            assert counted["sha256"] == hashlib.sha256(content).hexdigest() and counted["bytes"] == len(content)
        heights = [counted["rows"] for counted in facts["files"].values()]
        assert sum(heights) == facts["rows"] and (count > 7 or max(heights) <= 2 * min(heights))
        assert first == len(documents)


def test_characters_without_a_token_are_counted_with_their_bytes_and_warned_of(characters: Tokenizer, tmp_path: Path):
    text = "漢 the 漢字 river" * 9
    split, settings = split_of(tmp_path, ["the river"], [text], language=""), PackingSettings(seq_len=CONTEXT)
    with pytest.warns(UserWarned, match="27 characters"):
        assert tokenize(split, characters, tmp_path / "rows", settings)["unspelled"] == 27
    assert ValidationRows(tmp_path / "rows/validation/s.und", batch=2).bytes == len(text.encode())


UNKNOWN = {"<unk>": 0, "a": 1, "b": 2}


@pytest.mark.parametrize("model", [
    models.BPE({"a": 0, "b": 1}, []),
    models.BPE(UNKNOWN, [], unk_token="<unk>", byte_fallback=True),  # without byte pieces
    models.BPE(UNKNOWN, [], unk_token="<unk>", fuse_unk=True),  # one token for several
    None,  # of bytes, without an alphabet
])  # fmt: skip
def test_characters_that_an_imported_vocabulary_lacks_are_counted(model: models.BPE | None, tmp_path: Path):
    fast = FastTokenizer(model or models.BPE({"a": 0, "b": 1}, []))
    if model is None:
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).unspelled("ab é漢") == 2


@pytest.mark.parametrize(("vocabulary", "dtype"), [(0, "uint16"), (2**16, "uint32")])
def test_ids_have_as_many_bits_as_they_need_and_long_tokens_all_their_bytes(tmp_path: Path, vocabulary, dtype: str):
    """By a tokenizer of whole words, which counts the spaces before a word as the word's."""
    pieces = ["[UNK]", "a", "b", *map(str, range(vocabulary))]
    fast = FastTokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(["</s>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    text = "a" + " " * 300 + "b" + " " * 700 + "b"
    split = split_of(tmp_path / "split", [text], [text, text])
    tokenize(split, Tokenizer(tmp_path), tmp_path / "rows", PackingSettings(seq_len=8))
    assert read_all(tmp_path / "rows/train/s.en").dtype == dtype
    predicted = ValidationRows(tmp_path / "rows/validation/s.en", batch=1).bytes
    assert predicted == 2 * (len(text) - len("a")), "nothing comes before a first token that could predict it"


def test_no_training_text_and_damaged_rows_are_refused(bpe: Tokenizer, tmp_path: Path):
    settings = PackingSettings(seq_len=CONTEXT)
    refused(lambda: tokenize(split_of(tmp_path / "empty", [], ["x"]), bpe, tmp_path / "none", settings))
    tokenize(split_of(tmp_path / "split", ["the river " * 99], ["x"]), bpe, tmp_path / "rows", settings)
    shard = tmp_path / "rows/train/s.en/tokens-00000-of-00001.npy"
    content, others = shard.read_bytes(), np.zeros((2, CONTEXT), np.uint16)
    TokenShards(shard.parent)
    for damage in (lambda: shard.write_bytes(content[:-100]), lambda: np.save(shard, others)):
        damage()
        error = refused(TokenShards, shard.parent)
        assert error.where == str(shard.parent) and error.fix

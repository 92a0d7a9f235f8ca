"""Documents to rows: all of them once, whole, with their bytes and where they came from."""

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from affinage.data.conversations import prepare_conversations
from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.row_files import file_safe, open_rows, write_rows
from affinage.data.rows import pack_rows
from affinage.data.special_tokens import BOS, EOS, PAD
from affinage.data.tokenizer import Tokenizer
from affinage.data.validation_rows import ValidationRows
from affinage.errors import UserError
from affinage.recipe.data import RowsSettings
from affinage.recipe.tuning import SftSettings
from tiny_corpus import write_split

CONTEXT = 32


@pytest.fixture(scope="module")
def packed(split_folder: Path, bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    pack_rows(split_folder, bpe, folder, RowsSettings(context=CONTEXT, shards=8), seed=0)
    return folder


@pytest.fixture(scope="module")
def whole(split_folder: Path, bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    pack_rows(split_folder, bpe, folder, RowsSettings(context=CONTEXT, packing="best-fit"), seed=0)
    return folder


def documents_by_group(split_folder: Path, part: str) -> dict[str, dict[tuple[str, str], str]]:
    groups: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for batch in read_documents(split_folder / part):
        for document in batch.to_pylist():
            groups[f"{file_safe(document['source'])}.{document['language']}"][document["source"], document["id"]] = (
                document["text"]
            )
    return groups


def read_all(folder: Path) -> np.ndarray:
    """All rows of a folder, with numpy alone."""
    facts = json.loads((folder / "rows.json").read_text())
    return np.concatenate([np.load(folder / name) for name in facts["files"] if name.startswith("rows")])


def stream_of(rows: np.ndarray, overlap: int) -> list[int]:
    """The tokens that were cut into rows, without the repeated ones and the padding."""
    tokens = [*rows[0].tolist(), *(token for row in rows[1:] for token in row[overlap:].tolist())]
    return tokens[: len(tokens) - list(reversed(tokens)).index(EOS)]


@pytest.mark.parametrize(("part", "overlap"), [("train", 0), ("validation", 1)])
def test_rows_hold_every_document_once_whole_and_nothing_else(
    packed: Path, split_folder: Path, bpe: Tokenizer, part: str, overlap: int
):
    groups = documents_by_group(split_folder, part)
    assert {path.name for path in (packed / part).iterdir()} == set(groups)
    for group, documents in groups.items():
        rows = read_all(packed / part / group)
        assert rows.dtype == np.uint16 and rows.shape[1] == CONTEXT
        stream = stream_of(rows, overlap)
        found = [bpe.decode(text) for text in split_at_documents(stream)]
        assert sorted(found) == sorted(documents.values())
        facts = json.loads((packed / part / group / "rows.json").read_text())
        assert facts["tokens"] == len(stream)
        assert facts["documents"] == len(documents)
        assert facts["bytes"] == sum(len(text.encode()) for text in documents.values())
        assert np.count_nonzero(rows == PAD) == rows.size - len(stream) - overlap * (len(rows) - 1)


def split_at_documents(stream: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for token in stream:
        if token == BOS:
            found.append([])
        else:
            found[-1].append(token)
    assert all(document[-1] == EOS and EOS not in document[:-1] for document in found)
    return found


def test_every_byte_of_validation_text_is_predicted_exactly_once(packed: Path, split_folder: Path, bpe: Tokenizer):
    """Bits per byte: the bytes that are counted are those of the tokens that the loss counts."""
    for group, documents in documents_by_group(split_folder, "validation").items():
        validation = ValidationRows(packed / "validation" / group, batch=4)
        predicted = ends = 0
        for batch in validation:
            tokens, mask, segment_ids = batch["tokens"], batch["loss_mask"], batch["segment_ids"]
            for row in range(len(tokens)):
                for t in range(CONTEXT - 1):
                    if mask[row, t + 1] and segment_ids[row, t + 1] == segment_ids[row, t]:
                        predicted += int(bpe.piece_bytes[tokens[row, t + 1]])
                        ends += tokens[row, t + 1] == EOS
        assert validation.bytes == predicted == sum(len(text.encode()) for text in documents.values())
        assert ends == len(documents)


def test_a_limit_counts_the_bytes_of_the_rows_it_takes(packed: Path):
    folder = next((packed / "validation").iterdir())
    whole = ValidationRows(folder, batch=4)
    limited = ValidationRows(folder, batch=4, limit=5)
    assert limited.rows == 5 and len(limited) == 2
    assert limited.bytes == np.load(folder / "bytes.npy")[np.arange(5) * whole.rows // 5].sum()
    last = limited.batch(1)
    assert last["tokens"].shape == (4, CONTEXT)
    assert last["loss_mask"][1:].sum() == 0 and (last["tokens"][1:] == PAD).all()


@pytest.mark.parametrize(("packing", "part"), [("concat", "train"), ("concat", "validation"), ("best-fit", "train")])
def test_lineage_names_the_document_of_every_token(
    packed: Path, whole: Path, split_folder: Path, bpe: Tokenizer, packing: str, part: str
):
    packed = packed if packing == "concat" else whole
    for group, documents in documents_by_group(split_folder, part).items():
        rows = read_all(packed / part / group)
        spans = pq.read_table(packed / part / group / "documents.parquet").to_pylist()
        covered = np.zeros(rows.shape, int)
        for span in spans:
            covered[span["row"], span["start"] : span["stop"]] += 1
            said = rows[span["row"], span["start"] : span["stop"]].tolist()
            tokens = [BOS, *bpe.encode(documents[span["source"], span["id"]]), EOS]
            assert tokens[span["offset"] : span["offset"] + len(said)] == said
            assert span["url"] == f"file:///{span['source']}"
        assert [span["row"] for span in spans] == sorted(span["row"] for span in spans)
        assert (covered == (rows != PAD)).all()


def test_the_order_is_shuffled_and_does_not_depend_on_files(split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    again = write_split(tmp_path / "split", reverse=True)
    settings = RowsSettings(context=CONTEXT)
    for split, seed, name in ((split_folder, 0, "a"), (again, 0, "b"), (again, 1, "c")):
        pack_rows(split, bpe, tmp_path / name, settings, seed=seed)
    a, b, c = (read_all(tmp_path / name / "train" / "tales.en") for name in "abc")
    assert (a == b).all()
    assert a.shape == c.shape and (a != c).any()
    ids = pq.read_table(tmp_path / "a" / "train" / "tales.en" / "documents.parquet").column("id").to_pylist()
    assert ids != sorted(ids)


def test_shards_are_counted_hashed_and_nearly_equal(packed: Path):
    folder = packed / "train" / "tales.en"
    facts = json.loads((folder / "rows.json").read_text())
    assert list(facts["files"]) == [f"rows-{i:05d}-of-00002.npy" for i in range(2)]
    heights = []
    for name, counted in facts["files"].items():
        content = (folder / name).read_bytes()
        assert counted["sha256"] == hashlib.sha256(content).hexdigest()
        assert counted["bytes"] == len(content)
        heights.append(counted["rows"])
    assert sum(heights) == facts["rows"] and max(heights) - min(heights) <= 1
    assert len(list(packed.glob("train/*/rows-*.npy"))) == 8  # over four groups, by their size
    assert not list(packed.rglob("*.partial")) and not (packed / "scratch").exists()
    assert not list(packed.rglob("*.npy.json"))


@given(
    heights=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    shards=st.integers(1, 12),
)
def test_blocks_of_any_height_give_the_same_files(heights: list[int], shards: int, tmp_path_factory):
    rows = np.arange(sum(heights) * 3, dtype=np.uint32).reshape(-1, 3)
    blocks = np.split(rows, np.cumsum(heights)[:-1])
    folder = tmp_path_factory.mktemp("blocks")
    files = write_rows(folder, blocks, rows=len(rows), context=3, shards=shards, dtype=np.uint32)
    assert (np.concatenate([np.load(folder / name) for name in files]) == rows).all()
    assert len(files) == min(shards, len(rows))


def split_of(folder: Path, train: str, validation: str) -> Path:
    for part, text in (("train", train), ("validation", validation)):
        with DocumentWriter(folder / part) as writer:
            if text:
                writer.add(id=part, source="s", language="", text=text)
    return folder


def test_characters_count_the_bytes_of_strangers_too(characters: Tokenizer, tmp_path: Path):
    text = "漢 the 漢字 river" * 9
    pack_rows(
        split_of(tmp_path, "the river", text), characters, tmp_path / "rows", RowsSettings(context=CONTEXT), seed=0
    )
    assert ValidationRows(tmp_path / "rows/validation/s.und", batch=2).bytes == len(text.encode())


LONG = "x" * 254  # with the space before it 255 bytes: one more, for "it is trained", is 0 in 8 bits


def words(folder: Path, vocabulary: int = 0) -> Tokenizer:
    """A tokenizer of whole words, which counts the spaces before a word as the word's."""
    pieces = ["[UNK]", "a", "b", "user", "assistant", LONG, *map(str, range(vocabulary))]
    fast = FastTokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(0, "uint16"), (2**16, "uint32")])
def test_ids_have_as_many_bits_as_they_need_and_long_tokens_all_their_bytes(
    tmp_path: Path, vocabulary: int, dtype: str
):
    text = "a" + " " * 300 + "b" + " " * 700 + "b"
    tokenizer = words(tmp_path / "words", vocabulary)
    summary = pack_rows(split_of(tmp_path, text, text), tokenizer, tmp_path / "rows", RowsSettings(context=8), seed=0)
    assert summary["dtype"] == dtype and read_all(tmp_path / "rows/train/s.und").dtype == dtype
    predicted = ValidationRows(tmp_path / "rows/validation/s.und", batch=1).bytes
    assert predicted == len(text) - len("a"), "nothing comes before the first token that could predict it"


def test_a_long_token_of_an_answer_is_trained(tmp_path: Path):
    tokenizer, source = words(tmp_path / "words"), tmp_path / "chat.jsonl"
    source.write_text(json.dumps({"prompt": "a b", "completion": f"b {LONG} b"}) + "\n")
    schedule = {"peak": 1e-3, "floor": 1e-4}
    settings = SftSettings(sources=[str(source)], steps=1, batch=1, schedule=schedule, held_out=0)
    summary = prepare_conversations(settings, tokenizer, tmp_path / "rows", context=32, seed=0)
    files = open_rows(tmp_path / "rows/train/chat")
    trained = files.read_range(0, 1)[np.asarray(files.masks[0][0:1], bool)]
    assert tokenizer.encode(f"b {LONG} b") == trained[:-1].tolist()
    assert summary["train"]["bytes"] == tokenizer.piece_bytes[trained].sum() > len(LONG)


def test_what_a_killed_run_left_is_replaced(split_folder: Path, bpe: Tokenizer, packed: Path, tmp_path: Path):
    for stale in ("train/xx", "validation/yy", "scratch"):
        (tmp_path / stale).mkdir(parents=True)
        (tmp_path / stale / "anything.json").write_text("{}")
    pack_rows(split_folder, bpe, tmp_path, RowsSettings(context=CONTEXT, shards=8), seed=0)
    written, expected = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path, packed)
    )
    for found in (written, expected):
        del found[Path("packed.json")]  # which has the seconds
    assert written == expected


def test_no_training_text_and_damaged_rows_are_refused(bpe: Tokenizer, tmp_path: Path):
    settings = RowsSettings(context=CONTEXT)
    with pytest.raises(UserError):
        pack_rows(split_of(tmp_path / "empty", "", "x"), bpe, tmp_path / "none", settings, seed=0)
    pack_rows(split_of(tmp_path / "split", "the river " * 99, "x"), bpe, tmp_path / "rows", settings, seed=0)
    shard = tmp_path / "rows/train/s.und/rows-00000-of-00001.npy"
    content = shard.read_bytes()
    for damage in (lambda: shard.write_bytes(content[:-100]), lambda: np.save(shard, np.zeros((2, CONTEXT), np.uint16)),
                   (shard.parent / "rows.json").unlink):  # fmt: skip
        open_rows(shard.parent)
        damage()
        with pytest.raises(UserError) as error:
            open_rows(shard.parent)
        assert error.value.where == str(shard.parent) and error.value.fix
        shard.write_bytes(content)

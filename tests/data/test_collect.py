"""Collecting: every kind of file gives its documents, and bad input gives a message or a counted skip."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from affinage.data import readers, records
from affinage.data.collect import collect
from affinage.data.documents import read_documents
from affinage.data.engine import LocalEngine
from affinage.errors import UserError
from affinage.recipe.data import DataSettings
from affinage.recipe.sources import default_name

LINES = [{"text": "first text", "id": "x1"}, {"text": "deuxième texte"}]


def jsonl(records=LINES) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def run(tmp_path, *sources, world=None, workers=None, **settings):
    folder = tmp_path / "collected"
    summary = collect(DataSettings(sources=sources, **settings), folder, world, engine=LocalEngine(workers))
    return summary, [row for batch in read_documents(folder) for row in batch.to_pylist()]


def refused(tmp_path, *sources, **settings) -> str:
    with pytest.raises(UserError) as error:
        run(tmp_path, *sources, **settings)
    return str(error.value)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_of_any_compression(tmp_path, suffix):
    path = tmp_path / f"lines.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](jsonl()))
    summary, rows = run(tmp_path, str(path))
    assert [row["text"] for row in rows] == ["first text", "deuxième texte"]
    assert [row["id"] for row in rows] == ["x1", f"lines.jsonl{suffix}#2"]
    assert {row["source"] for row in rows} == {"lines"}
    assert summary["documents_in"] == summary["documents_out"] == 2 and summary["bytes_out"] == 25


def test_zstd_of_several_frames(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl()) + zstandard.compress(jsonl()))
    assert len(run(tmp_path, str(tmp_path / "a.jsonl.zst"))[1]) == 4


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    folder = tmp_path / "my_texts"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.md", "a.txt", "sub/c.txt", ".hidden.txt", "picture.png"):
        (folder / name).write_text(f"text of {name}\n")
    summary, rows = run(tmp_path, str(folder) + "/")
    assert [row["id"] for row in rows] == ["a.txt", "b.md", "sub/c.txt"]
    assert rows[0] == {
        "id": "a.txt",
        "source": "my_texts",
        "language": "",
        "url": "",
        "licence": "",
        "text": "text of a.txt\n",
    }
    assert summary["removed"] == {"unknown kind of file": 1}
    assert summary["samples"]["unknown kind of file"][0]["id"] == "picture.png"


def test_globs_roots_and_names(tmp_path):
    (tmp_path / "books").mkdir()
    for name in ("one.txt", "two.txt", "odd[1].txt", "notes.md"):
        (tmp_path / "books" / name).write_text(name)
    _, rows = run(tmp_path, "books/*.txt", {"path": "books/odd[1].txt", "name": "odd"}, root=str(tmp_path))
    assert [(row["source"], row["id"]) for row in rows] == [
        ("books", "odd[1].txt"),
        ("books", "one.txt"),
        ("books", "two.txt"),
        ("odd", "odd[1].txt"),
    ]


def test_fsspec_urls(tmp_path):
    import fsspec

    fsspec.filesystem("memory").pipe("/corpus/a.jsonl", jsonl())
    assert len(run(tmp_path, "memory://corpus/a.jsonl")[1]) == 2
    assert len(run(tmp_path, "memory://corpus")[1]) == 2


def test_every_empty_file_is_counted(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in {"a.jsonl": b"", "b.txt": b"", "c.jsonl": b"\n\n", "d.jsonl": jsonl()}.items():
        (folder / name).write_bytes(content)
    summary, rows = run(tmp_path, str(folder))
    assert summary["removed"] == {"empty": 3} and len(rows) == 2


def test_parquet_without_the_column_of_text_says_which_it_has(tmp_path):
    pq.write_table(pa.table({"content": ["eins"], "score": [1]}), tmp_path / "t.parquet")
    with pytest.raises(UserError) as caught:
        run(tmp_path, str(tmp_path / "t.parquet"), damaged_files="skip")
    assert "'text'; it has content, score" in caught.value.what and "text_key" in caught.value.fix


def test_parquet_with_a_text_key(tmp_path):
    table = pa.table({"content": ["eins", None, "drei"], "url": ["u1", "u2", "u3"], "score": [1, 2, 3]})
    pq.write_table(table, tmp_path / "t.parquet")
    summary, rows = run(tmp_path, {"path": str(tmp_path / "t.parquet"), "text_key": "content", "licence": "CC0"})
    assert [(row["id"], row["text"], row["url"]) for row in rows] == [
        ("t.parquet#1", "eins", "u1"),
        ("t.parquet#3", "drei", "u3"),
    ]
    assert rows[0]["licence"] == "CC0" and summary["removed"] == {"text is not a string": 1}


def test_what_a_record_says_of_itself_is_carried(tmp_path):
    record = {"text": "t", "id": 7, "lang": "en", "url": "http://x", "license": "MIT", "source": "a/b"}
    (tmp_path / "a.jsonl").write_bytes(jsonl([record]))
    _, (row,) = run(tmp_path, str(tmp_path / "a.jsonl"))
    assert row == {"id": "7", "source": "a_b", "language": "en?", "url": "http://x", "licence": "MIT", "text": "t"}
    _, (row,) = run(tmp_path, {"path": str(tmp_path / "a.jsonl"), "name": "mine", "language": "fr"})
    assert (row["source"], row["language"]) == ("mine", "fr")


def test_the_pocket_world_comes_from_its_folder(tmp_path):
    (tmp_path / "world" / "documents").mkdir(parents=True)
    (tmp_path / "world" / "documents" / "facts.jsonl").write_bytes(
        jsonl([{"id": "f1", "text": "Paris is the capital of France.", "lang": "en", "kind": "fact"}])
    )
    _, (row,) = run(tmp_path, "pocket-world", world=tmp_path / "world")
    assert (row["source"], row["id"]) == ("pocket-world", "f1")


def test_two_sources_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.jsonl").write_bytes(jsonl())
    _, rows = run(tmp_path, str(tmp_path / "a/same.jsonl"), str(tmp_path / "b/same.jsonl"))
    assert [row["source"] for row in rows] == ["same", "same", "same-2", "same-2"]


@pytest.mark.parametrize(
    ("path", "name"),
    [("x/novels_en.jsonl.gz", "novels_en"), ("data/*.txt", "data"), ("my folder/", "my_folder"), ("/", "source")],
)
def test_default_names(path, name):
    assert default_name(path) == name


def test_bad_records_are_counted_with_their_place(tmp_path):
    lines = [
        b'{"text": "good one"}',
        b'{"text": "broken',
        b'{"body": "no text"}',
        b'{"text": "caf\xe9"}',
        b'["a", "list"]',
        b'{"text": 5}',
        b'{"text": "  "}',
        b"",
        b"\0\0\0",
        b'{"text": "lone \\ud800 half"}',
        b"[" * 100_000,
    ]
    (tmp_path / "bad.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    summary, rows = run(tmp_path, str(tmp_path / "bad.jsonl"))
    assert [row["text"] for row in rows] == ["good one", "lone \ufffd half"]
    assert summary["removed"] == {
        "not JSON": 3,
        "empty": 1,
        "no text key": 1,
        "not UTF-8": 1,
        "not a JSON object": 1,
        "text is not a string": 1,
    }
    assert summary["samples"]["not UTF-8"][0]["id"] == "bad.jsonl#4"
    assert summary["documents_in"] == 10


def test_an_overlong_line_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1_000)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 512)
    lines = [{"text": "before"}, {"text": "x" * 5_000}, {"text": "after"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(lines))
    summary, rows = run(tmp_path, str(tmp_path / "a.jsonl"))
    assert [(row["id"], row["text"]) for row in rows] == [("a.jsonl#1", "before"), ("a.jsonl#3", "after")]
    assert summary["removed"] == {"too large": 1}


def test_binary_and_foreign_text_files_in_a_folder_are_counted(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good.txt").write_text("fine")
    (folder / "latin1.txt").write_bytes("déjà".encode("latin1"))
    (folder / "binary.txt").write_bytes(b"\x7fELF\0\0\0")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "utf16.txt").write_bytes("fenêtre".encode("utf-16"))
    summary, rows = run(tmp_path, str(folder))
    assert [row["text"] for row in rows] == ["fine", "fenêtre"]
    assert summary["removed"] == {"binary": 1, "empty": 1, "not UTF-8": 1}


def test_a_missing_path_is_refused(tmp_path):
    message = refused(tmp_path, str(tmp_path / "nowhere.jsonl"))
    assert "data.sources[0]" in message and "nowhere.jsonl" in message
    assert "nothing in it" in refused(tmp_path, str(tmp_path / "*.jsonl"))
    assert "png" in refused_file(tmp_path, "picture.png", b"x")


def refused_file(tmp_path, name, content, **settings) -> str:
    (tmp_path / name).write_bytes(content)
    return refused(tmp_path, str(tmp_path / name), **settings)


def test_an_unknown_protocol_is_refused(tmp_path):
    assert "nosuch" in refused(tmp_path, "nosuch://bucket/a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "no text in the file"),
        ("a.jsonl", b'{"body": "x", "n": 1}\n', "'text' among the keys body, n"),
        ("a.jsonl", b"plain words\nmore", "not JSON"),
        ("a.jsonl", b"plain words\nmore", "line 1"),
        ("a.jsonl.gz", gzip.compress(jsonl(), mtime=0)[:-12], "cut off"),
        ("a.jsonl.bz2", bz2.compress(jsonl())[:-12], "cut off"),
        ("a.jsonl.zst", zstandard.compress(jsonl())[:-6], "cut off"),
        ("a.jsonl.gz", b"this is not gzip", "damaged"),
        ("a.jsonl.zst", b"this is not zstd", "damaged"),
        ("a.jsonl.bz2", b"this is not bzip2", "damaged"),
        ("a.parquet", b"PAR1 not really", "damaged"),
        ("a.txt", b"\x00\x01\x02", "binary"),
        ("a.txt", "été".encode("latin1"), "iconv"),
    ],
)
def test_an_unusable_source_is_one_message(tmp_path, name, content, said):
    message = refused_file(tmp_path, name, content)
    assert said in message and name in message


def test_a_parquet_file_without_the_column_is_refused(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "t.parquet")
    message = refused(tmp_path, str(tmp_path / "t.parquet"))
    assert "no column 'text'; it has body" in message and "t.parquet" in message


def test_a_damaged_file_can_be_kept_up_to_the_damage(tmp_path):
    many = jsonl([{"text": f"text number {i} of many {i * 7919}"} for i in range(5_000)])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(many)[:-5_000])
    summary, rows = run(tmp_path, str(tmp_path / "a.jsonl.gz"), damaged_files="skip")
    assert 100 < len(rows) < 5_000
    assert summary["removed"]["damaged file"] == 1


def test_the_result_does_not_depend_on_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("affinage.data.collect.TASK_BYTES", 1_000)
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.jsonl").write_bytes(jsonl([{"text": f"text {i} {k}" * 3} for k in range(10)]))
    first = run(tmp_path, str(folder), workers=1)
    second = run(tmp_path, str(folder), workers=2)
    assert first[1] == second[1] and len(first[1]) == 300
    assert first[0] | {"seconds": 0} == second[0] | {"seconds": 0}


def test_an_error_in_a_worker_process_is_the_same_message(tmp_path, monkeypatch):
    monkeypatch.setattr("affinage.data.collect.TASK_BYTES", 10)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(jsonl())[:-12])
    with pytest.raises(UserError, match="cut off") as error:
        run(tmp_path, str(tmp_path / "*.gz"), workers=2)
    assert "a.jsonl.gz" in error.value.where and error.value.fix

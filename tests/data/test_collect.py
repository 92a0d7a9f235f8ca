"""Collecting: every kind of file gives its documents, bad input gives a message or a counted skip."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections import Counter

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from affinage.data import ingest as ingesting
from affinage.data import readers
from affinage.data.files import version_of
from run_affinage import refused
from source_forms import collected, write_files, write_lines

LINES = [{"text": "first text", "id": "x1"}, {"text": "deuxième texte"}]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def jsonl(records=LINES) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def run(tmp_path, *sources, **settings):
    return collected(tmp_path / "collected", *sources, **settings)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_of_any_compression(tmp_path, suffix):
    path = tmp_path / f"lines.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](jsonl()))
    summary, rows = run(tmp_path, str(path))
    assert [row["text"] for row in rows] == ["first text", "deuxième texte"]
    assert [row["id"] for row in rows] == ["x1", f"lines.jsonl{suffix}#2"]
    assert {row["source"] for row in rows} == {"lines"}
    assert summary["documents_in"] == summary["documents_out"] == 2 and summary["bytes_out"] == 25


def test_a_folder_is_read_recursively_in_sorted_order_and_what_is_no_text_is_counted(tmp_path):
    files = {name: f"text of {name}\n" for name in ("b.md", "a.txt", "sub/c.txt", ".hidden.txt", "picture.png")}
    files |= {"latin1.txt": b"d\xe9j\xe0", "binary.txt": b"\x7fELF\0\0\0", "utf16.txt": "fenêtre".encode("utf-16")}
    files |= {"a.jsonl": b"", "empty.txt": b"", "blank.jsonl": b"\n\n"}
    summary, rows = run(tmp_path, f"{write_files(tmp_path / 'my_texts', files)}/")
    assert [row["id"] for row in rows] == ["a.txt", "b.md", "sub/c.txt"]
    empty = {"language": "", "language_score": None, "url": "", "license": ""}
    assert rows[0] == {"id": "a.txt", "source": "my_texts", **empty, "text": "text of a.txt\n"}
    assert summary["removed"] == {"unknown kind of file": 1, "binary": 2, "empty": 1, "not UTF-8": 1}
    assert summary["samples"]["unknown kind of file"][0]["id"] == "picture.png"


def test_globs_roots_names_and_urls(tmp_path):
    write_files(tmp_path / "books", dict.fromkeys(("one.txt", "two.txt", "odd[1].txt", "notes.md"), "words"))
    _, rows = run(tmp_path, "books/*.txt", {"path": "books/odd[1].txt", "name": "odd"}, root=str(tmp_path))
    found = [(row["source"], row["id"]) for row in rows]
    assert found == [*(("books", f"{name}.txt") for name in ("odd[1]", "one", "two")), ("odd", "odd[1].txt")]
    fsspec.filesystem("memory").pipe("/corpus/a.jsonl", jsonl())
    for url in ("memory://corpus/a.jsonl", "memory://corpus"):
        assert len(run(tmp_path, url)[1]) == 2 and len(version_of(url)) == 32
    url = f"file://{tmp_path}/books/one.txt"
    assert [row["source"] for row in run(tmp_path, url, url, root="/elsewhere")[1]] == ["one", "one-2"]


def test_parquet_with_a_text_key_or_of_bytes(tmp_path):
    table = pa.table({"content": ["eins", None, "drei"], "url": ["u1", "u2", "u3"], "score": [1, 2, 3]})
    pq.write_table(table, tmp_path / "t.parquet")
    summary, rows = run(tmp_path, {"path": str(tmp_path / "t.parquet"), "text_key": "content", "license": "CC0"})
    found = [(row["id"], row["text"], row["url"], row["license"]) for row in rows]
    assert found == [("t.parquet#1", "eins", "u1", "CC0"), ("t.parquet#3", "drei", "u3", "CC0")]
    assert summary["removed"] == {"text is not a string": 1}
    for damaged in ("raise", "skip"):
        error = refused(run, tmp_path, str(tmp_path / "t.parquet"), on_error=damaged)
        assert "'text'" in error.what and "content" in error.what and "text_key" in error.fix
    pq.write_table(pa.table({"text": [b"fen\xc3\xaatre", b"caf\xe9"]}), tmp_path / "t.parquet")
    summary, rows = run(tmp_path, str(tmp_path / "t.parquet"))
    assert [row["text"] for row in rows] == ["fenêtre"] and summary["removed"] == {"not UTF-8": 1}


def test_what_a_record_says_of_itself_is_carried(tmp_path):
    record = {"text": "t", "id": 7, "lang": "en", "url": "http://x", "license": "MIT", "source": "a/b"}
    write_lines(tmp_path / "a.jsonl", [record])
    _, (row,) = run(tmp_path, str(tmp_path / "a.jsonl"))
    facts = {"id": "7", "source": "a_b", "language": "en?", "url": "http://x", "license": "MIT", "text": "t"}
    assert row == facts | {"language_score": None}
    _, (row,) = run(tmp_path, {"path": str(tmp_path / "a.jsonl"), "name": "mine", "language": "fr"})
    assert row == facts | {"source": "mine", "language": "fr", "language_score": None}
    trusted = {"path": str(tmp_path / "a.jsonl"), "language": "fr", "trust_language": True}
    assert run(tmp_path, trusted)[1][0]["language_score"] == 1.0


def test_bad_records_are_counted_with_their_place(tmp_path):
    bad = dict.fromkeys([b'{"text": "broken', b"[" * 100_000, b"\0\0\0"], "not JSON")
    bad |= {b'["a"]': "not a JSON object", b'{"text": "' + b"long " * 99 + b'", "x": oops}': "not JSON"}
    bad |= {b'{"body": "x"}': "no text key", b'{"\\ud83d": 1}': "no text key", b'{"text": 5}': "text is not a string"}
    bad |= {b'{"text": "  "}': "empty", b'{"text": "caf\xe9"}': "not UTF-8"}
    lines = [b'{"text": "good one"}', *bad, b"", b'{"text": "lone \\ud800 half", "id": "a\\u001b[2Jb"}']
    (tmp_path / "bad.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    summary, rows = run(tmp_path, str(tmp_path / "bad.jsonl"))
    assert [row["text"] for row in rows] == ["good one", "lone \ufffd half"]
    assert rows[1]["id"] == "a\\x1b[2Jb", "nothing that a terminal would obey"
    assert summary["removed"] == Counter(bad.values()) and summary["lone_surrogates"] == 1
    assert summary["samples"]["not UTF-8"][0]["id"] == "bad.jsonl#11" and summary["documents_in"] == 12
    late = summary["samples"]["not JSON"][3]
    assert "Expecting value (char 513)" in late["detail"] and "oops" in late["text"], "the excerpt is of that place"
    assert summary["samples"]["not a JSON object"][0]["text"] == '["a"]\n', "as the file has it"


@pytest.mark.parametrize("suffix", ["", ".bz2", ".zst"])
def test_a_huge_line_is_never_held(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1_000_000)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](jsonl([{"text": text} for text in ("before", "x" * 30_000_000, "after")])))
    tracemalloc.start()
    summary, rows = run(tmp_path, str(path))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert [row["text"] for row in rows] == ["before", "after"] and summary["removed"] == {"too large": 1}


@pytest.mark.parametrize(("name", "content", "told"), [
    *((name, None, "data.sources[0]: there is no file") for name in ("nowhere.jsonl", "*.jsonl")),
    ("picture.png", b"x", "data.sources[0]: nothing in"),
    ("a.jsonl", b"", "a.jsonl (empty)"),
    ("a.jsonl", b"\n", "no document"),
    *((name, b'[{"text": "x"}]', "jq -c '.[]'") for name in ("a.json", "a.jsonl")),
    ("a.jsonl", b'{"body": "x", "n": 1}\n', "body, n"),
    ("a.jsonl", b'[\n{"text": "x"}]', "not JSON"),
    ("a.jsonl.gz", gzip.compress(jsonl(), mtime=0)[:-12], "cut off"),
    ("a.jsonl.zst", zstandard.compress(jsonl())[:-6], "Truncated"),
    ("b.jsonl.gz", b"this is not gzip", "damaged"),
    ("b.jsonl.zst", b"this is not zstd", "damaged"),
    ("a.parquet", b"PAR1 not really", "damaged"),
    ("a.txt", b"\x00\x01\x02", "binary"),
    ("a.txt", "été".encode("latin1"), "iconv"),
])  # fmt: skip
def test_an_unusable_source_is_one_message(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refused(run, tmp_path, str(tmp_path / name))
    assert told in str(error) and name in str(error)
    assert refused(run, tmp_path, "nosuch://bucket/a.jsonl").where == "data.sources[0]"


@pytest.mark.parametrize(("suffix", "cut"), [(".gz", 8), (".xz", 4), (".bz2", 4), (".gz", 5_000), (".zst", 5_000)])
def test_what_stands_before_the_end_of_a_truncated_file_is_kept(tmp_path, suffix, cut):
    count, least = (5, 5) if cut < 10 else (5_000, 100)
    whole = COMPRESS[suffix](jsonl([{"text": f"text {i} of many {i * 7919}"} for i in range(count)]) + b" " * 40)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[:-cut])
    summary, rows = run(tmp_path, str(tmp_path / f"a.jsonl{suffix}"), on_error="skip")
    assert least <= len(rows) <= count and summary["removed"]["damaged file"] == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three files, each a task of its own."""
    monkeypatch.setattr(ingesting, "TASK_BYTES", 10_000)
    for k in range(3):
        lines = [{"id": str(i), "text": f"text {i:04d} " + "x" * 90} for i in range(100 * k, 100 * k + 50)]
        write_lines(tmp_path / "texts" / f"{k}.jsonl", lines)
    return tmp_path / "texts"


def test_a_limit_is_met_from_as_many_files_as_it_is_worth(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ingesting, "WAVE_BYTES", 1_000)
    source = {"path": str(folder), "max_bytes": 3_020}
    summary, rows = run(tmp_path, source)
    assert Counter(int(row["id"]) // 100 for row in rows) == {0: 10, 1: 10, 2: 10}
    monkeypatch.setattr(ingesting, "WAVE_BYTES", 3_000)
    summary, rows = run(tmp_path, source)
    assert summary["bytes_out"] == 3_000 and len({int(row["id"]) // 100 for row in rows}) == 1
    monkeypatch.setattr(ingesting, "WAVE", 2)
    assert run(tmp_path, {"path": str(folder), "max_bytes": 14_000})[0]["bytes_out"] == 14_000, "the next file, too"


@pytest.mark.parametrize("name", ["big.jsonl", "big.parquet"])
def test_a_large_file_is_read_in_parts_that_lose_nothing(tmp_path, monkeypatch, name):
    rows = [{"text": f"text {i} " + "é" * (i % 50)} for i in range(300)]
    write_lines(tmp_path / "big.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "big.parquet", row_group_size=20)
    whole = run(tmp_path, str(tmp_path / name))[1]
    for size in (700, 1_009, 5_000):
        monkeypatch.setattr(ingesting, "TASK_BYTES", size)
        found = run(tmp_path, str(tmp_path / name))[1]
        assert [row["text"] for row in found] == [row["text"] for row in rows]
        assert len({row["id"] for row in found}) == 300
        assert name == "big.jsonl" or found == whole, "rows are numbered in the file"


def test_a_sample_is_a_share_of_the_documents_or_of_what_a_source_may_give(folder, tmp_path):
    found = {share: {row["id"] for row in run(tmp_path, str(folder), sample=share)[1]} for share in (0.2, 0.5)}
    assert found[0.2] < found[0.5] and 15 < len(found[0.2]) < 45
    assert run(tmp_path, {"path": str(folder), "max_bytes": 10_000}, sample=0.5)[0]["bytes_out"] == 5_000

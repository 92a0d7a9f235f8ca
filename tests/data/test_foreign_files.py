"""Files as people have them: links, names and texts that are not UTF-8, large windows, ids that look like ours."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from affinage.data.collect import collect
from affinage.data.conversation_files import read_conversations
from affinage.data.documents import read_documents
from affinage.recipe.data import DataSettings
from affinage.recipe.sources import SourceSettings, location
from affinage.recipe.tuning import ConversationSettings
from affinage.stages.sources import fingerprints


def run(tmp_path, source, **settings):
    summary = collect(DataSettings(sources=[source], **settings), tmp_path / "collected")
    json.dumps(summary, ensure_ascii=False).encode()  # as it is written into the manifest
    return summary, [row for batch in read_documents(tmp_path / "collected") for row in batch.to_pylist()]


def half_utf8(folder):
    """A table of two texts, the second of them in Latin-1."""
    offsets = pa.array([0, 3, 6], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc\xe9t\xe9")])
    pq.write_table(pa.table({"text": texts, "prompt": texts, "completion": texts}), folder / "half.parquet")
    return folder / "half.parquet"


def test_a_glob_finds_links_as_it_finds_files(tmp_path):
    # The cache of the Hugging Face Hub is nothing but links.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot" / "folder.txt").mkdir(parents=True)
    (tmp_path / "blobs" / "1").write_text("a text")
    (tmp_path / "snapshot" / "a.txt").symlink_to(tmp_path / "blobs" / "1")
    (tmp_path / "snapshot" / "b.txt").write_text("another text")
    _, rows = run(tmp_path, str(tmp_path / "snapshot" / "*.txt"))
    assert [row["id"] for row in rows] == ["a.txt", "b.txt"]


def test_a_folder_is_read_through_links_to_folders_once(tmp_path):
    (tmp_path / "disk" / "wiki").mkdir(parents=True)
    (tmp_path / "disk" / "wiki" / "b.txt").write_text("far away")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("near")
    (folder / "wiki").symlink_to(tmp_path / "disk" / "wiki")
    (tmp_path / "disk" / "wiki" / "back").symlink_to(folder)
    (folder / "itself").symlink_to(folder)
    summary, rows = run(tmp_path, str(folder))
    assert [row["id"] for row in rows] == ["a.txt", "wiki/b.txt"] and summary["removed"] == {}
    assert list(fingerprints([str(folder)])) == [str(folder / "a.txt"), str(folder / "wiki" / "b.txt")]


def test_names_that_are_not_utf8(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    for name in (b"caf\xe9.txt", b"na\xefve.bin"):
        try:
            with open(os.path.join(os.fsencode(folder), name), "w") as file:
                file.write("un texte")
        except OSError:
            pytest.skip("this file system takes no such names")
    summary, rows = run(tmp_path, str(folder))
    assert [(row["id"], row["text"]) for row in rows] == [("caf\\xe9.txt", "un texte")]
    assert [sample["id"] for sample in summary["samples"]["unknown kind of file"]] == ["na\\xefve.bin"]
    assert str(folder / "caf\\xe9.txt") in fingerprints([str(folder)])


def test_half_a_character_in_a_key_or_an_id(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"\\ud83d": 1}\n')
    summary, _ = run(tmp_path, str(tmp_path / "a.jsonl"))
    assert summary["removed"] == {"no text key": 1}
    (tmp_path / "c.jsonl").write_text('{"id": "\\ud83d", "prompt": "p", "completion": "c"}\n')
    (found,) = read_conversations(ConversationSettings(path=str(tmp_path / "c.jsonl")))
    assert found.id == "\ufffd"


def test_a_table_with_a_text_that_is_not_utf8_loses_that_row_alone(tmp_path):
    path = half_utf8(tmp_path)
    summary, rows = run(tmp_path, str(path))
    assert [row["text"] for row in rows] == ["abc"]
    assert summary["removed"] == {"not UTF-8": 1} and summary["samples"]["not UTF-8"][0]["id"] == "half.parquet#2"
    good, bad = read_conversations(ConversationSettings(path=str(path)))
    assert good.messages[0]["content"] == "abc" and "not UTF-8" in str(bad) and "half.parquet:2" in str(bad)


def test_a_zstd_file_with_the_largest_window(tmp_path):
    made = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=31, hash_log=10, chain_log=10)
    ).compressobj()
    (tmp_path / "dump.jsonl.zst").write_bytes(made.compress(b'{"text": "of zstd --long=31"}\n') + made.flush())
    _, rows = run(tmp_path, str(tmp_path / "dump.jsonl.zst"))
    assert [row["text"] for row in rows] == ["of zstd --long=31"]


def test_a_book_that_states_what_is_no_charset(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"Character set encoding: rot13\n\nUn \xe9t\xe9 sans fin.\n")
    _, rows = run(tmp_path, {"path": str(tmp_path / "book.txt"), "kind": "gutenberg"})
    assert "Un été sans fin" in rows[0]["text"]


def test_no_two_documents_are_called_alike_when_ids_look_like_ours(tmp_path):
    ids = ["a", "a", "a@2", "a", "a@2"]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": id, "text": f"text {k}"}) + "\n" for k, id in enumerate(ids))
    )
    summary, rows = run(tmp_path, str(tmp_path / "a.jsonl"))
    assert [row["id"] for row in rows] == ["a", "a@3", "a@2", "a@4", "a@2@2"]
    assert summary["repeated_ids"]["documents"] == 3


def test_a_file_url_is_known_by_its_content(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = fingerprints([f"file://{tmp_path}/a.txt"])
    (tmp_path / "a.txt").write_text("two")
    assert fingerprints([f"file://{tmp_path}/a.txt"]) != before


def test_a_file_url_is_of_this_machine(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    url = f"file://{tmp_path}/c.jsonl"
    (found,) = read_conversations(ConversationSettings(path=url))
    assert found.messages[1]["content"] == "c"
    assert location(SourceSettings(path=url), "/elsewhere", "") == url, "it is no relative path"

"""Collecting a part: limits and samples; collecting again: after a kill, with repeated ids; and in bounded memory."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from dataclasses import replace

import pytest
import zstandard

from affinage.data import collect as collecting
from affinage.data import records, repeated_ids, sources
from affinage.data.collect import collect, divide, run
from affinage.data.documents import read_documents
from affinage.data.opening import SourceFile
from affinage.data.sources import ResolvedSource, resolve
from affinage.errors import UserError
from affinage.recipe.data import DataSettings, SourceSettings
from source_forms import write_lines


def rows_of(folder):
    return [row for batch in read_documents(folder) for row in batch.to_pylist()]


def lines(first, count):
    return [{"id": str(i), "text": f"text {i:04d} " + "x" * 90} for i in range(first, first + count)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three files, each a task of its own."""
    monkeypatch.setattr(collecting, "TASK_BYTES", 1_000)
    for k in range(3):
        write_lines(tmp_path / "texts" / f"{k}.jsonl", lines(100 * k, 50))
    return tmp_path / "texts"


def test_a_limit_takes_the_beginning_of_every_part(folder, tmp_path):
    settings = DataSettings(sources=[{"path": str(folder), "megabytes": 0.00305}])
    summary = collect(settings, tmp_path / "out")
    assert [row["id"] for row in rows_of(tmp_path / "out")] == [str(100 * k + i) for k in range(3) for i in range(10)]
    assert summary["bytes_out"] == 3_000
    collect(settings.model_copy(update={"sample": 0.5}), tmp_path / "half")
    assert sum(len(row["text"]) for row in rows_of(tmp_path / "half")) <= 1_525


def test_of_a_remote_sample_only_the_files_are_read_that_hold_it():
    files = tuple(SourceFile(f"s3://b/{i:03d}.jsonl", f"{i:03d}.jsonl", 10) for i in range(100))
    source = SourceSettings(path="s3://b/*.jsonl")
    found = ResolvedSource(source, "b", "data.sources[0]", files)

    def sampled(share):
        settings = DataSettings(sources=[source], sample=share)
        return sources._sampled(found, settings)

    assert (len(sampled(0.25).parts), sampled(0.25).sample) == (25, 1.0)
    assert (len(sampled(0.001).parts), sampled(0.001).sample) == (1, pytest.approx(0.1))
    assert set(sampled(0.1).parts) < set(sampled(0.2).parts)
    assert sampled(1.0) == found


def test_a_stage_that_failed_goes_on_with_what_is_missing(folder, tmp_path, monkeypatch):
    settings = DataSettings(sources=[str(folder)])
    collect(settings, tmp_path / "whole")
    read = []
    reading = collecting.read_records

    def dying(file, how):
        read.append(file.name)
        if file.name == "2.jsonl" and read.count("2.jsonl") == 1:
            raise KeyboardInterrupt
        return reading(file, how)

    monkeypatch.setattr(collecting, "read_records", dying)
    with pytest.raises(KeyboardInterrupt):
        collect(settings, tmp_path / "out")
    first = collect(settings, tmp_path / "out")
    assert read == ["0.jsonl", "1.jsonl", "2.jsonl", "2.jsonl"]
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole") and first["documents_out"] == 150
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"documents-0000{k}-00000.parquet" for k in range(3)
    ]


def test_notes_of_other_work_are_not_believed(folder, tmp_path):
    (folder / "2.jsonl").write_bytes(b"")
    (folder / "1.jsonl").rename(folder / "1.jsonl.gz")
    with pytest.raises(UserError, match="damaged"):
        collect(DataSettings(sources=[str(folder)]), tmp_path / "out")
    write_lines(folder / "0.jsonl", lines(900, 20))
    (folder / "1.jsonl.gz").unlink()
    collect(DataSettings(sources=[str(folder)]), tmp_path / "out")
    assert [row["id"] for row in rows_of(tmp_path / "out")] == [str(i) for i in range(900, 920)]


def test_repeated_ids_are_numbered_and_counted(folder, tmp_path):
    write_lines(folder / "1.jsonl", lines(0, 2))
    write_lines(folder / "2.jsonl", [*lines(1, 1), *lines(1, 1), *lines(500, 1)])
    summary = collect(DataSettings(sources=[{"path": str(folder), "name": "texts"}]), tmp_path / "out")
    ids = [row["id"] for row in rows_of(tmp_path / "out")]
    assert ids[50:] == ["0@2", "1@2", "1@3", "1@4", "500"] and len(set(ids)) == len(ids)
    assert summary["repeated_ids"] == {"documents": 4, "by_source": {"texts": 4}, "samples": ["0", "1"]}


def test_ids_are_numbered_the_same_after_a_kill(folder, tmp_path, monkeypatch):
    for name in ("1.jsonl", "2.jsonl"):
        write_lines(folder / name, lines(0, 50))
    settings = DataSettings(sources=[{"path": str(folder), "name": "texts"}])
    collect(settings, tmp_path / "whole")
    rename, done = repeated_ids._rename, []

    def dying(path, ids):
        rename(path, ids)
        done.append(path)
        if len(done) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(repeated_ids, "_rename", dying)
    with pytest.raises(KeyboardInterrupt):
        collect(settings, tmp_path / "out")
    collect(settings, tmp_path / "out")
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


def test_a_file_that_vanishes(folder, tmp_path):
    settings = DataSettings(sources=[str(folder)])
    (tmp_path / "out").mkdir()
    tasks = divide(resolve(settings, None), tmp_path / "out", settings)
    (folder / "1.jsonl").unlink()
    with pytest.raises(UserError, match="not there"):
        run(tasks[1])
    assert run(replace(tasks[1], skip_damaged=True)).funnel.removed == {"damaged file": 1}


COMPRESSED = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", ["", *COMPRESSED])
def test_a_huge_line_is_never_held(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1_000_000)
    long = json.dumps({"text": "before"}).encode() + b'\n{"text": "' + b"x" * 30_000_000 + b'"}\n{"text": "after"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSED.get(suffix, bytes)(long))
    del long
    tracemalloc.start()
    try:
        summary = collect(DataSettings(sources=[str(path)]), tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert [row["text"] for row in rows_of(tmp_path / "out")] == ["before", "after"]
    assert summary["removed"] == {"too large": 1}

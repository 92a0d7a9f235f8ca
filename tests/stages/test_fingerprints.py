"""A file of the user's is known by what it says, wherever and whenever it was copied; a large source by its date."""

import os
from pathlib import Path

import pytest

from affinage.stages import sources
from affinage.stages.sources import fingerprints


def test_a_copy_is_the_same_and_a_change_is_not(tmp_path: Path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_bytes(bytes(3_000_000))
    os.utime(tmp_path / "there" / "a.txt", (0, 0))
    here, there = (list(fingerprints([str(tmp_path / name)]).values()) for name in ("here", "there"))
    assert here == there and len(here) == 1
    with (tmp_path / "there" / "a.txt").open("r+b") as file:
        file.write(b"1")
    os.utime(tmp_path / "there" / "a.txt", (0, 0))
    assert list(fingerprints([str(tmp_path / "there")]).values()) != here


@pytest.mark.parametrize(("limit", "value"), [("_READ_WHOLE", 5), ("_READ_FILES", 1)])
def test_a_large_source_is_known_by_size_and_date(tmp_path: Path, monkeypatch, limit: str, value: int):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("def")
    monkeypatch.setattr(sources, limit, value)
    before = fingerprints([str(tmp_path)])
    assert all(said.startswith("3 bytes, changed at ") for said in before.values())
    os.utime(tmp_path / "b.txt", (0, 0))
    assert [name for name, said in fingerprints([str(tmp_path)]).items() if before[name] != said] == [
        str(tmp_path / "b.txt")
    ]

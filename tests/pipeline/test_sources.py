"""A file that changes is seen by its content."""

import os
from pathlib import Path

import pytest

from affinage.pipeline.sources import fingerprints

LARGE = 17_000_000


def replace(file: Path, content: bytes) -> None:
    """With one of the same size and time."""
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    assert len(content) == file.stat().st_size
    file.with_suffix(".new").write_bytes(content)
    os.utime(file.with_suffix(".new"), ns=times)
    file.with_suffix(".new").replace(file)


@pytest.mark.parametrize("size", [3, 1_000_000, LARGE])
def test_a_file_that_is_replaced_by_one_of_the_same_size_and_time_is_seen(tmp_path: Path, size: int):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(size))
    os.utime(file, (0, 0))
    before = fingerprints([str(file)])
    assert fingerprints([str(file)]) == before
    replace(file, b"1" * size)
    assert fingerprints([str(file)]) != before

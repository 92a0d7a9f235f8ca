"""Seals that hold anything at all: a reason why the checkpoint is not taken, and never more than that."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from affinage.checkpoint.seal import SEAL, damage, parse, seal

CONTENTS = b"a file of a checkpoint"
LINE = f"{hashlib.sha256(CONTENTS).hexdigest()}  data/d\n".encode()
names = st.sampled_from(["data/d", "data", "../data/d", "/etc/passwd", "", ".", "nul\0l", SEAL]) | st.text(max_size=8)
lines = st.builds(
    lambda digest, gap, name, end: f"{digest}{gap}{name}{end}".encode("utf-8", "surrogatepass"),
    st.sampled_from([LINE[:64].decode(), "0" * 64, "0" * 63, LINE[:64].decode().upper(), ""]),
    st.sampled_from(["  ", " ", " *", "\t", ""]),
    names,
    st.sampled_from(["\n", "\r\n", "", "\n\n"]),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The right line, with some of its bytes exchanged, and cut off or not."""
    contents = bytearray(LINE)
    for at in draw(st.lists(st.integers(0, len(LINE) - 1), min_size=1, max_size=3)):
        contents[at] = draw(st.integers(0, 255))
    return bytes(contents[: draw(st.integers(0, len(LINE)))]) if draw(st.booleans()) else bytes(contents)


seals = st.binary(max_size=200) | st.lists(lines, max_size=4).map(b"".join) | damaged()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("step")
    (found / "data").mkdir()
    (found / "data" / "d").write_bytes(CONTENTS)
    return found


@settings(max_examples=400)
@example(b"")
@example(b"\n")
@example(LINE * 2)
@example(LINE)
@given(seals)
def test_only_the_right_line_seals_a_checkpoint(folder: Path, contents: bytes):
    (folder / SEAL).write_bytes(contents)
    assert (damage(folder) == "") == (contents == LINE)


@settings(max_examples=400)
@given(seals)
def test_any_bytes_are_lines_of_a_seal_or_none(contents: bytes):
    try:
        found = parse(contents)
    except ValueError as error:
        assert len(str(error)) < 500  # it is told in a line
    else:
        assert found and "".join(f"{digest}  {name}\n" for name, digest in found.items()).encode() == contents


def test_a_seal_that_is_none_is_not_read(tmp_path: Path):
    (tmp_path / "d").write_bytes(CONTENTS)
    seal(tmp_path)
    assert damage(tmp_path) == ""
    (tmp_path / SEAL).unlink()
    os.mkfifo(tmp_path / SEAL)  # whoever opens it waits for a writer
    assert "no file at all" in damage(tmp_path)
    (tmp_path / SEAL).unlink()
    (tmp_path / SEAL).mkdir()
    assert "no file at all" in damage(tmp_path)
    (tmp_path / SEAL).rmdir()
    with (tmp_path / SEAL).open("wb") as file:
        file.truncate(2**40)  # takes nothing on the disk
    assert "bytes" in damage(tmp_path)

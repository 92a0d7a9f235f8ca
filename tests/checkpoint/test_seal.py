"""Seals of checkpoints: only the right lines seal one, whatever else is there, and a key signs them."""

import hashlib
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.seal import SEAL, damage, parse, seal
from affinage.cli.program import main
from affinage.errors import UserError
from affinage.pipeline.names import MODEL
from affinage.signing import KEY_VARIABLE

CONTENTS = b"a file of a checkpoint"
LINE = f"{hashlib.sha256(CONTENTS).hexdigest()}  data/d\n".encode()
KEY = bytes(range(32))
names = st.sampled_from(["data/d", "data", "../data/d", "/etc/passwd", "", ".", "nul\0l", SEAL]) | st.text(max_size=8)
lines = st.builds(
    lambda digest, gap, name, end: f"{digest}{gap}{name}{end}".encode("utf-8", "surrogatepass"),
    st.sampled_from([LINE[:64].decode(), "0" * 64, "0" * 63, LINE[:64].decode().upper(), ""]),
    st.sampled_from(["  ", " ", " *", "\t", ""]),
    names,
    st.sampled_from(["\n", "\r\n", "", "\n\n"]),
)
seals = st.binary(max_size=200) | st.lists(lines, max_size=4).map(b"".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("step")
    (found / "data").mkdir()
    (found / "data" / "d").write_bytes(CONTENTS)
    return found


@example(b"")
@example(b"\n")
@example(LINE * 2)
@example(LINE[:-1])
@example(LINE)
@given(seals)
def test_only_the_right_line_seals_a_checkpoint(folder: Path, contents: bytes):
    (folder / SEAL).write_bytes(contents)
    assert (damage(folder) == "") == (contents == LINE)
    try:
        found = parse(contents)
    except ValueError as error:
        assert len(str(error)) < 500  # it is told in a line
    else:
        assert found and "".join(f"{digest}  {name}\n" for name, digest in found.items()).encode() == contents


def test_a_seal_that_is_no_file_or_too_large_is_not_read(tmp_path: Path):
    (tmp_path / "d").write_bytes(CONTENTS)
    seal(tmp_path)
    assert damage(tmp_path) == ""
    (tmp_path / SEAL).unlink()
    os.mkfifo(tmp_path / SEAL)  # whoever opens it waits for a writer
    assert damage(tmp_path)
    (tmp_path / SEAL).unlink()
    with (tmp_path / SEAL).open("wb") as file:
        file.truncate(2**40)  # takes nothing on the disk
    assert damage(tmp_path)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "signed"])
def test_sha256sum_reads_a_seal(tmp_path: Path, key: bytes | None):
    (tmp_path / "a").write_text("a")
    seal(tmp_path, key)
    command = ["sha256sum", "-c", "--strict", SEAL]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "a").write_text("b")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


def test_who_has_no_key_makes_no_checkpoint_for_those_who_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    training, key = tmp_path / "small" / "pretrain", tmp_path / "key"
    training.mkdir(parents=True)
    (training / MODEL).write_text("{}")

    def saved(step: int) -> CheckpointStore:
        store = CheckpointStore(training / "checkpoints", keep_last=9)
        store.save(step, {"params": {"w": jnp.full(600, float(step), jnp.float32)}}, {})
        store.wait()
        return store

    def status(verb: str, what: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", verb, what, "--runs", str(tmp_path)])
        capsys.readouterr()
        return int(ended.value.code or 0)

    forger = saved(2)
    assert forger.restore_newest({"params": None})[0] == 2  # its hashes are right
    assert status("sign", "small/pretrain") == 2  # there is no key
    key.write_bytes(KEY)
    key.chmod(0o644)  # others may read it
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    with pytest.raises(UserError) as refused:
        CheckpointStore(training / "checkpoints")
    assert refused.value.where == f"{KEY_VARIABLE}={key}"
    key.chmod(0o600)
    store = saved(1)
    with pytest.warns(CheckpointWarning, match="checkpoint 2"):
        assert store.restore_newest({"params": None})[0] == 1
    with pytest.raises(UserError, match="not signed"):
        store.restore(2, {"params": None})
    assert status("verify", "small/pretrain") == 2
    assert status("sign", "small/pretrain@2") == 0 and status("verify", "small/pretrain") == 0

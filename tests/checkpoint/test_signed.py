"""Checkpoints that are signed: whoever has no key can neither make one nor change it, whatever hashes they write."""

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.remote import RemoteFolder
from affinage.checkpoint.remote_steps import RemoteSteps
from affinage.checkpoint.seal import SEAL, Unsigned, damage, parse, seal, sign
from affinage.cli.program import main
from affinage.errors import UserError
from affinage.signing import KEY_VARIABLE, signing_key
from affinage.stages.initial import MODEL

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
WEIGHT = jax.ShapeDtypeStruct((600,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    monkeypatch.setenv(KEY_VARIABLE, str(file))
    return file


def saved(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last=9)
    for step in steps:
        store.save(step, {"params": {"w": jnp.full(600, float(step), jnp.float32)}}, {"saved": "today"})
    store.wait()
    return store


def newest(store: CheckpointStore) -> tuple[int, float]:
    found = store.restore_newest({"params": {"w": WEIGHT}})
    assert found is not None
    return found[0], float(np.asarray(found[1]["params"]["w"])[0])


def test_a_forged_checkpoint_whose_hashes_are_right_is_passed_over(tmp_path: Path, key: Path):
    store = saved(tmp_path / "run", 1)
    with pytest.MonkeyPatch.context() as without:
        without.delenv(KEY_VARIABLE)
        forger = saved(tmp_path / "run", 2)
        assert newest(forger) == (2, 2.0)  # its hashes are right
    with pytest.warns(CheckpointWarning, match=f"checkpoint 2 cannot be read: it is not signed with .* {KEY_VARIABLE}"):
        assert newest(store) == (1, 1.0)


def test_a_signed_checkpoint_into_which_other_numbers_and_their_hashes_are_put_is_refused(tmp_path: Path, key: Path):
    store = saved(tmp_path / "run", 1, 2)
    step, other = tmp_path / "run" / "2", tmp_path / "run" / "1"
    first_line = (step / SEAL).read_text().splitlines()[0]
    shutil.rmtree(step / "params")
    shutil.copytree(other / "params", step / "params")
    (step / SEAL).unlink()
    seal(step)
    (step / SEAL).write_text(first_line + "\n" + (step / SEAL).read_text())
    assert damage(step) == "" and "not signed" in damage(step, key=KEY)
    with pytest.raises(UserError, match="not signed"):
        store.restore(2, {"params": {"w": WEIGHT}})


def test_each_line_of_a_seal_is_signed(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    seal(tmp_path, KEY)
    whole = (tmp_path / SEAL).read_bytes()
    assert list(parse(whole, KEY)) == ["a", "b"] == list(parse(whole))
    lines = whole.splitlines(keepends=True)
    others = [lines[0] + lines[1], lines[0] + lines[2] + lines[1], lines[1] + lines[2], whole + lines[2], lines[0]]
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for changed in (*others, *flipped):
        with pytest.raises(ValueError):
            parse(changed, KEY)
    for wrong in (OTHER, KEY[:-1]):
        with pytest.raises(Unsigned):
            parse(whole, wrong)


def test_sha256sum_reads_a_signed_seal(tmp_path: Path):
    (tmp_path / "a").write_text("a")
    seal(tmp_path, KEY)
    command = ["sha256sum", "-c", "--strict", SEAL]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout == b"a: OK\n"
    (tmp_path / "a").write_text("b")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


def test_a_copy_at_a_url_is_signed_as_the_save_was_and_else_not_taken(tmp_path: Path, key: Path):
    store = saved(tmp_path / "run", 1)
    remote = RemoteSteps(RemoteFolder(f"file://{tmp_path}/there"))
    remote.bring(1, store.folder / "1", (store.folder / "1" / SEAL).read_bytes(), lambda: None)
    assert remote.damage(1) == "" and remote.fetch(1, tmp_path / "back") == ""
    (tmp_path / "there" / "1" / SEAL).unlink()
    seal(tmp_path / "there" / "1")  # whoever may write there has no key
    assert "not signed" in remote.damage(1) and "not signed" in remote.fetch(1, tmp_path / "again")
    assert not (tmp_path / "again" / "1").exists()


def test_what_was_saved_without_the_key_is_signed_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    training = tmp_path / "small" / "pretrain"
    store = saved(training / "checkpoints", 1, 2)
    (training / MODEL).write_text("{}")
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)

    def said(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
            main(["checkpoint", *arguments, "--runs", str(tmp_path)])
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    status, told = said("sign", "small/pretrain")
    assert status == 2 and f"{KEY_VARIABLE}: there is no key" in told
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key"))
    status, told = said("verify", "small/pretrain")
    assert status == 2 and told.count("it is not signed") == 2
    (store.folder / "1" / "params" / "_METADATA").write_text("{}")
    status, told = said("sign", "small/pretrain@1")
    assert status == 2 and "not what was written" in told
    assert said("sign", "small/pretrain@2") == (0, "         2  signed\n")
    status, told = said("verify", "small/pretrain@2")
    assert status == 0 and "2  whole, and signed" in told
    assert newest(CheckpointStore(store.folder)) == (2, 2.0)


@pytest.mark.parametrize(
    ("mode", "contents", "told"),
    [
        (0o644, KEY, "others may read the key"),
        (0o600, KEY[:31], "32 to 4096 bytes"),
        (0o600, bytes(4097), "32 to 4096 bytes"),
        (None, KEY, "cannot be read: No such file"),
    ],
)
def test_a_key_that_is_none_is_told_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None, contents: bytes, told: str
):
    file = tmp_path / "key"
    if mode is not None:
        file.write_bytes(contents)
        file.chmod(mode)
    monkeypatch.setenv(KEY_VARIABLE, str(file))
    with pytest.raises(UserError, match=told) as refused:
        CheckpointStore(tmp_path / "run")
    assert refused.value.where == f"{KEY_VARIABLE}={file}"


def test_a_key_that_is_no_file_does_not_stop_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="Is a directory"):
        signing_key()
    os.mkfifo(tmp_path / "pipe", 0o600)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "pipe"))  # whoever opens it waits for a writer
    with pytest.raises(UserError, match="no file"):
        signing_key()
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert signing_key() is None


def test_signing_anew_changes_nothing_but_the_signature(tmp_path: Path):
    (tmp_path / "a").write_text("a")
    seal(tmp_path)
    before = (tmp_path / SEAL).read_bytes()
    sign(tmp_path, OTHER)
    sign(tmp_path, KEY)
    assert (tmp_path / SEAL).read_bytes().partition(b"\n")[2] == before and damage(tmp_path, key=KEY) == ""


def test_a_key_that_cannot_be_read_is_told_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key"))
    with pytest.raises(SystemExit) as ended:
        main(["run", "quickstart", "--runs", str(tmp_path / "runs")])
    assert ended.value.code == 2 and "the key cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "quickstart").exists()

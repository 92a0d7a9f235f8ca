"""A training that is copied to a URL: what is there is whole or not taken, and a machine without it goes on from it."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.mirror import Mirror, bring_newest, forget
from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside
from affinage.checkpoint.remote_steps import RemoteSteps
from affinage.checkpoint.seal import SEAL, seal
from affinage.cli.program import main
from affinage.errors import UserError

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"params": {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=HERE)}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/pretrain-0"


@pytest.fixture(params=["file", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("s3", "gs"))])
def any_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place of each kind where nothing is yet."""
    if request.param == "file":
        yield f"file://{tmp_path}/elsewhere/pretrain-0"
        return
    import object_stores

    with object_stores.bucket(request.param, monkeypatch) as url_of:
        yield url_of("pretrain-0")


def state(value: float) -> dict:
    return {"params": {"w": jnp.arange(16, dtype=jnp.float32).reshape(8, 2) + value}}


def saved(folder: Path, *steps: int, copies: Mirror | None = None, settles: bool = False, **rules: Any) -> None:
    store = CheckpointStore(folder / "checkpoints", copies=copies, **rules)
    for step in steps:
        store.save(step, state(step), {"saved": "today"})
        store.wait()
        assert not settles or copies is None or copies.settle() == ""


def steps_at(url: str) -> RemoteSteps:
    return RemoteSteps(RemoteFolder(url) / "checkpoints")


def assert_brings(url: str, folder: Path, step: int, said: list[str] | None = None) -> None:
    assert bring_newest(url, folder, (said if said is not None else []).append) == step
    found = CheckpointStore(folder / "checkpoints").restore_newest(ABSTRACT)
    assert found is not None and found[0] == step
    np.testing.assert_array_equal(found[1]["params"]["w"], state(step)["params"]["w"])


def test_a_machine_without_it_gets_the_newest_checkpoint_and_what_is_beside_it(any_url: str, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 1, 2)
    (here / "metrics.jsonl").write_text("{}\n")
    (here / "kept" / "1").mkdir(parents=True)
    (here / "kept" / "1" / "SHA256SUMS").write_text("of something\n")
    (here / "alive").write_text("of this machine\n")
    with Mirror(any_url, here) as mirror:
        assert mirror.settle() == ""
        saved(here, 3, copies=mirror)
        (here / "metrics.jsonl").write_text("{}\n{}\n")
        assert mirror.settle() == "" and mirror.newest == 3
    assert steps_at(any_url).steps() == [2, 3]
    assert_brings(any_url, there, 3)
    assert (there / "metrics.jsonl").read_text() == "{}\n{}\n"
    assert (there / "kept" / "1" / "SHA256SUMS").read_text() == "of something\n"
    assert not (there / "alive").exists()
    assert bring_newest(any_url, there, print) is None  # it has it
    saved(there, 4)
    assert bring_newest(any_url, there, print) is None  # what is newer here stays
    for step in (3, 4):
        next((there / "checkpoints" / str(step)).rglob("commit_success.txt")).write_text("damaged")
    assert_brings(any_url, there, 3)


@pytest.mark.full
@pytest.mark.parametrize("any_url", ["gs"], indirect=True)
def test_contents_arrive_as_they_are(any_url: str, tmp_path: Path):
    folder, file = RemoteFolder(any_url), tmp_path / "a file"
    # Two of these are the lines between which gcsfs puts what it sends.
    for contents in (b"", b"\r\n", b"--", b"a text\n--==0==--", b"\n--==0==\nmore", b"\r\n--==0==--\r\n"):
        file.write_bytes(contents)
        folder.write("written", contents)
        folder.put(file, "put")
        assert [folder.read(name) for name in ("written", "put")] == 2 * [contents]


def test_a_step_of_which_a_server_kept_less_gets_no_seal(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"what was saved")
    seal(tmp_path)
    write, steps = RemoteFolder.write, RemoteSteps(RemoteFolder(url))
    keeps_less = lambda self, name, data: write(self, name, data[:-1] if name == "b" else data)  # noqa: E731
    monkeypatch.setattr(RemoteFolder, "write", keeps_less)
    with pytest.raises(RemoteError, match="3/b"):
        steps.bring(3, tmp_path, (tmp_path / SEAL).read_bytes(), lambda: None)
    assert steps.steps() == []


def damage_seal(steps: RemoteSteps, step: int) -> None:
    steps.folder.write(f"{step}/SHA256SUMS", (steps.seal(step) or b"")[:-9])


def damage_contents(steps: RemoteSteps, step: int) -> None:
    name = next(name for name in (steps.folder / str(step)).sizes() if "/d/" in name)
    contents = bytearray(steps.folder.read(f"{step}/{name}") or b"")
    contents[len(contents) // 2] ^= 1
    steps.folder.write(f"{step}/{name}", bytes(contents))


def damage_by_a_name_that_leads_out(steps: RemoteSteps, step: int) -> None:
    line = f"{'0' * 64}  ../../../outside\n".encode()
    steps.folder.write(f"{step}/SHA256SUMS", (steps.seal(step) or b"") + line)


@pytest.mark.parametrize("damage", [damage_seal, damage_contents, damage_by_a_name_that_leads_out])
def test_a_damaged_copy_is_told_and_the_one_before_is_taken(url: str, tmp_path: Path, damage):
    said: list[str] = []
    with Mirror(url, tmp_path / "here") as mirror:
        saved(tmp_path / "here", 1, 2, copies=mirror, settles=True)
    steps = steps_at(url)
    assert [steps.damage(step) for step in (1, 2)] == ["", ""]
    damage(steps, 2)
    assert steps.damage(2) and not steps.damage(1)
    assert_brings(url, tmp_path / "there", 1, said)
    assert any("step 2" in line for line in said)
    assert not list(tmp_path.rglob("outside"))


def test_a_copy_that_ends_in_its_midst_is_told_not_taken_and_tried_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, said, write = tmp_path / "here", [], RemoteFolder.write
    with Mirror(url, here, pause=0.01) as mirror:
        saved(here, 1, copies=mirror, settles=True)
        left = iter(range(len((steps_at(url).seal(1) or b"").splitlines())))  # all but its seal

        def failing(folder: RemoteFolder, name: str, contents: bytes) -> None:
            if next(left, None) is None:
                raise RemoteError("nobody answers")
            write(folder, name, contents)

        mirror.say = said.append
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "write", failing)
            saved(here, 2, copies=mirror)
            assert mirror.settle() == "nobody answers" and mirror.newest == 1
            assert_brings(url, tmp_path / "there", 1)
            assert len(said) == 1  # the training goes on meanwhile
        assert mirror.settle() == "" and mirror.newest == 2 and len(said) == 2


def test_a_step_that_is_being_copied_is_not_removed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put, begun, go_on = RemoteFolder.put, threading.Event(), threading.Event()

    def slow(folder: RemoteFolder, file: Path, name: str) -> None:
        begun.set()
        go_on.wait(300)
        put(folder, file, name)

    with Mirror(url, tmp_path) as mirror:
        assert mirror.settle() == ""
        monkeypatch.setattr(RemoteFolder, "put", slow)
        saved(tmp_path, 1, copies=mirror)
        assert begun.wait(300)
        saved(tmp_path, 2, 3, 4, copies=mirror, keep_last=1)
        assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 4]
        assert mirror.settle(lambda: 0.0) == "there was no time for it"
        go_on.set()
        assert mirror.settle() == ""
    assert steps_at(url).steps()[-1] == 4 and not steps_at(url).damage(4)


def test_the_rules_for_what_stays_hold_there_too(url: str, tmp_path: Path):
    rules = {"keep_last": 1, "keep_every": 4}
    with Mirror(url, tmp_path, **rules) as mirror:
        for step in range(1, 10):
            saved(tmp_path, step, copies=mirror, settles=step % 3 == 0, **rules)
    assert steps_at(url).steps() == [4, 8, 9]
    assert {name.partition("/")[0] for name in steps_at(url).folder.sizes()} == {"4", "8", "9"}
    forget(url)
    assert not steps_at(url).listing()


def test_who_cannot_be_reached_at_the_start_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="memoryy://x"):
        Mirror("memoryy://x", tmp_path)
    monkeypatch.setattr(RemoteSteps, "steps", lambda self: time.sleep(30))
    with pytest.raises(UserError) as refused:
        bring_newest(url, tmp_path, print, reach=0.2)
    assert url in str(refused.value) and refused.value.fix


def affinage(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *words])
    return int(ended.value.code or 0)


def test_the_verbs_about_checkpoints_take_a_url(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Mirror(url, tmp_path) as mirror:
        saved(tmp_path, 1, 2, copies=mirror, settles=True)
    steps_at(url).folder.write("3/params/d/0", b"a save that was cut off")
    above = url.rpartition("/")[0]  # where there is one training
    assert affinage("ls", above, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["step"], each["saved"], each["complete"]) for each in listed] == [
        (1, "today", True), (2, "today", True), (3, None, False),
    ]  # fmt: skip
    assert affinage("show", f"{url}@1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 1 and shown["arrays"]["params"]["numbers"] == 16
    assert shown["seal"] == CheckpointStore(tmp_path / "checkpoints").seal_hash(1)
    assert affinage("diff", f"{url}@1", url, "--arrays") == 0
    assert "differs by 1 at most" in capsys.readouterr().out
    assert affinage("verify", url) == 0
    damage_contents(steps_at(url), 1)
    assert affinage("verify", url) == 2 and affinage("verify", f"{url}@2") == 0
    assert affinage("show", f"{url}@1") == 2 and affinage("show", f"{url}@9") == 2
    assert affinage("ls", f"{above}/nothing") == 2


def test_names_that_lead_elsewhere_are_not_followed():
    outside = ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "a\\b", "a\0b", "a/./b", None, 3]
    assert not any(is_inside(name) for name in outside)
    assert is_inside("params/d/0a") and is_inside("..a/b..")

"""A training that is copied to a URL: what is there is whole or not taken, and a machine without it resumes from it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.remote import RemoteFolder, Uploader, download
from affinage.checkpoint.store import COMMIT, METADATA
from affinage.errors import UserError
from affinage.network import is_inside
from run_affinage import refused
from source_forms import write_lines

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"params": {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=HERE)}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/pretrain-0"


@pytest.fixture(params=["file", "local", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("s3", "gs"))])
def any_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place of each kind where nothing is yet."""
    if request.param in ("file", "local"):
        yield f"{request.param}://{tmp_path}/elsewhere/pretrain-0"
        return
    import object_stores

    with object_stores.bucket(request.param, monkeypatch) as url_of:
        yield url_of("pretrain-0")


def state(value: float) -> dict:
    return {"params": {"w": jnp.arange(16, dtype=jnp.float32).reshape(8, 2) + value}}


def saved(folder: Path, *steps: int, uploader: Uploader | None = None, settles: bool = False, **rules: Any) -> None:
    store = CheckpointStore(folder / "checkpoints", saved=uploader.saved if uploader else set, **rules)
    for step in steps:
        store.save(step, state(step), {"saved": "today"})
        store.wait()
        assert not settles or uploader is None or uploader.settle() == ""


def copied(url: str, folder: Path) -> Uploader:
    uploader = Uploader(url, folder)
    uploader.start()
    assert uploader.settle() == ""
    return uploader


def complete_at(url: str) -> list[int]:
    names = [name.split("/") for name in RemoteFolder(url).sizes()]
    return sorted(int(parts[1]) for parts in names if parts[0] == "checkpoints" and parts[2] == COMMIT)


def assert_brings(url: str, folder: Path, step: int) -> None:
    assert step in download(url, folder, print)
    restored = CheckpointStore(folder / "checkpoints").restore_newest(ABSTRACT)
    assert restored is not None and restored[0] == step
    np.testing.assert_array_equal(restored[1]["params"]["w"], state(step)["params"]["w"])


def test_a_machine_without_it_gets_the_newest_checkpoint_and_what_is_beside_it(any_url: str, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 1, 2)
    write_lines(here / "metrics.jsonl", [{}])
    (here / "frozen" / "0").mkdir(parents=True)
    (here / "frozen" / "0" / COMMIT).write_text("of something\n")
    (here / "request.json").write_text("of this machine\n")
    uploader = copied(any_url, here)
    saved(here, 3, uploader=uploader)
    lines = write_lines(here / "metrics.jsonl", [{}, {}]).read_text()
    assert uploader.settle() == "" and complete_at(any_url) == [2, 3]
    assert_brings(any_url, there, 3)
    assert (there / "metrics.jsonl").read_text() == lines
    assert (there / "frozen" / "0" / COMMIT).read_text() == "of something\n" and not (there / "request.json").exists()
    assert download(any_url, there, print) == []  # it has it
    saved(there, 4)
    assert download(any_url, there, print) == []  # what is newer here stays


def test_metrics_of_steps_that_a_rollback_has_left_out_do_not_come_back(url: str, tmp_path: Path):
    here, behind = tmp_path / "here", tmp_path / "behind"
    saved(here, 5, 10)
    before, after = ([{"step": step, "batch": step + left_out} for step in range(1, 14)] for left_out in (0, 3))
    write_lines(here / "metrics.jsonl", before)  # the machine was at step 13 when step 10 was copied
    copied(url, here)
    saved(here, 11)  # after a rollback to step 10, and before the next copy
    lines = write_lines(here / "metrics.jsonl", before[:10] + after[10:11]).read_text()
    assert download(url, here, print) == [] and (here / "metrics.jsonl").read_text() == lines
    saved(behind, 5)
    write_lines(behind / "metrics.jsonl", before[:5])
    assert download(url, behind, print) == [10] and len((behind / "metrics.jsonl").read_text().splitlines()) == 13


@pytest.mark.parametrize("missing", ["metrics.jsonl", COMMIT])
def test_what_a_kill_cuts_off_on_the_way_back_is_fetched_by_the_next_start(url: str, tmp_path, monkeypatch, missing):
    here, there, get = tmp_path / "here", tmp_path / "there", RemoteFolder.get
    saved(here, 1, 2)
    write_lines(here / "metrics.jsonl", [{}])
    copied(url, here)

    def killed(folder: RemoteFolder, name: str, file: Path) -> None:
        if name.endswith(missing):
            raise KeyboardInterrupt
        get(folder, name, file)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RemoteFolder, "get", killed)
        download(url, there, print)
    assert_brings(url, there, 2)
    assert (there / "metrics.jsonl").exists()


@pytest.mark.parametrize("any_url", ["gs"], indirect=True)
def test_steps_are_written_to_gs_and_restored_from_there_without_a_copy(any_url: str):
    store = CheckpointStore(f"{any_url}/checkpoints", keep_every=2)
    for step in (1, 2, 3, 4):
        store.save(step, state(step), {"at": step})
    store.wait()
    assert complete_at(any_url) == store.steps() == [2, 3, 4]
    remote = RemoteFolder(any_url)
    remote.remove([f"checkpoints/4/{COMMIT}"])
    name = next(name for name in remote.sizes() if name.startswith("checkpoints/3/") and "/d/" in name)
    remote.write(name, (remote.read(name) or b"")[::-1])
    again = CheckpointStore(store.folder)
    with pytest.warns(CheckpointWarning) as warned:
        restored = again.restore_newest(ABSTRACT)
    assert [str(each.message).split()[1] for each in warned] == ["4", "3"]
    assert restored is not None and restored[0] == 2 and restored[2] == {"at": 2}
    np.testing.assert_array_equal(restored[1]["params"]["w"], state(2)["params"]["w"])
    again.save(3, state(30), {})
    again.wait()
    assert complete_at(any_url) == [2, 3] and not again.verify(3)


@pytest.mark.filterwarnings("ignore:checkpoint 2")
@pytest.mark.parametrize("damaged", [COMMIT, METADATA, "a bit of the arrays"])
def test_the_step_before_a_damaged_copy_is_taken(url: str, tmp_path: Path, damaged: str):
    uploader, remote = Uploader(url, tmp_path / "here"), RemoteFolder(url)
    saved(tmp_path / "here", 1, 2, uploader=uploader, settles=True)
    if damaged in (COMMIT, METADATA):
        remote.remove([f"checkpoints/2/{damaged}"])
    else:
        name = next(name for name in remote.sizes() if name.startswith("checkpoints/2/") and "/d/" in name)
        contents = bytearray(remote.read(name) or b"")
        contents[len(contents) // 2] ^= 1
        remote.write(name, bytes(contents))
    assert_brings(url, tmp_path / "there", 1)


def test_a_copy_that_is_cut_off_is_not_taken_and_is_tried_again(url: str, tmp_path: Path, monkeypatch):
    here, lines, write = tmp_path / "here", [], RemoteFolder.write
    uploader = Uploader(url, here)
    saved(here, 1, uploader=uploader, settles=True)
    left = iter(range(len(RemoteFolder(url).sizes()) - 1))  # all but its mark

    def failing(folder: RemoteFolder, name: str, contents: bytes) -> None:
        if next(left, None) is None:
            raise UserError("nobody answers")
        write(folder, name, contents)

    uploader.say = lines.append
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write", failing)
        saved(here, 2, uploader=uploader)
        assert uploader.settle() == "nobody answers" and lines  # the training continues meanwhile
        assert_brings(url, tmp_path / "there", 1)
    assert uploader.settle() == "" and complete_at(url) == [1, 2]


def test_a_step_stays_until_it_is_copied_and_comes_with_the_metrics_up_to_it(url: str, tmp_path: Path, monkeypatch):
    put, metrics, copied = RemoteFolder.put, tmp_path / "metrics.jsonl", {}
    store = CheckpointStore(tmp_path / "checkpoints")
    saved(tmp_path, 1)
    metrics.write_text("1\n")
    uploader = Uploader(url, tmp_path)

    def committing(folder: RemoteFolder, file: Path, name: str) -> None:
        put(folder, file, name)
        if name == metrics.name and store.steps() == [1]:
            metrics.write_text("1\n2\n")
            saved(tmp_path, 2, uploader=uploader, keep_last=1)
            assert store.steps() == [1, 2]  # the first is about to be copied
            assert uploader.settle(lambda: 0.0) == "there was no time for it"
        if name.endswith(COMMIT):
            copied[name.split("/")[1]] = folder.read(metrics.name)

    monkeypatch.setattr(RemoteFolder, "put", committing)
    assert uploader.settle() == "" and copied == {"1": b"1\n", "2": b"1\n2\n"}


def test_what_vanishes_during_a_copy_is_passed_over_and_does_not_count(url: str, tmp_path: Path, monkeypatch):
    put, uploader = RemoteFolder.put, Uploader(url, tmp_path)
    saved(tmp_path, 1)
    (tmp_path / "metrics.part").touch()

    def vanishing(folder: RemoteFolder, file: Path, name: str) -> None:
        if name == "metrics.part":
            file.unlink()
        if name == f"checkpoints/1/{METADATA}":
            saved(tmp_path, 2, uploader=uploader)
            shutil.rmtree(tmp_path / "checkpoints" / "1")
        put(folder, file, name)

    monkeypatch.setattr(RemoteFolder, "put", vanishing)
    assert uploader.settle() == "" and complete_at(url) == [2]


def test_a_step_that_is_removed_to_be_copied_again_and_vanishes_takes_no_other_with_it(url, tmp_path, monkeypatch):
    put, here = RemoteFolder.put, tmp_path / "here"
    former = tmp_path / "former"
    saved(former, 1, 2, uploader=Uploader(url, former), settles=True)
    store = CheckpointStore(here / "checkpoints")
    store.save(2, state(20), {"saved": "now"})
    store.wait()

    def vanishing(folder: RemoteFolder, file: Path, name: str) -> None:
        shutil.rmtree(here / "checkpoints" / "2", ignore_errors=True)
        put(folder, file, name)

    monkeypatch.setattr(RemoteFolder, "put", vanishing)
    assert Uploader(url, here, keep_last=1).settle() == "" and complete_at(url) == [1]


def test_the_rules_for_what_stays_hold_there_too(url: str, tmp_path: Path):
    rules = {"keep_last": 1, "keep_every": 4}
    uploader = Uploader(url, tmp_path, **rules)
    for step in range(1, 10):
        saved(tmp_path, step, uploader=uploader, settles=step % 3 == 0, **rules)
    assert {name.split("/")[1] for name in RemoteFolder(url).sizes()} == {"4", "8", "9"} and len(complete_at(url)) == 3


def test_who_cannot_be_reached_at_the_start_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused(Uploader, "memoryy://x", tmp_path, match="memoryy://x")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", None)  # whatever a library raises
    refused(Uploader(url, tmp_path).start, match="memory://.*cannot write this: TypeError")


def test_names_that_lead_elsewhere_are_not_followed():
    outside = ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "a\\b", "a\0b", "a/./b"]
    assert not any(is_inside(name) for name in outside) and is_inside("params/d/0a") and is_inside("..a/b..")

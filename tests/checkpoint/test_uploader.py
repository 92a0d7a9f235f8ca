"""A training that is copied to a URL: what is there is whole or not taken, and a machine without it goes on from it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.metadata import COMMIT, METADATA
from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside
from affinage.checkpoint.uploader import RemoteSteps, Uploader, download_newest, forget
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


def saved(folder: Path, *steps: int, uploader: Uploader | None = None, settles: bool = False, **rules: Any) -> None:
    store = CheckpointStore(folder / "checkpoints", uploader=uploader, **rules)
    for step in steps:
        store.save(step, state(step), {"saved": "today"})
        store.wait()
        assert not settles or uploader is None or uploader.settle() == ""


def steps_at(url: str) -> RemoteSteps:
    return RemoteSteps(RemoteFolder(url) / "checkpoints")


def complete_at(url: str) -> list[int]:
    return [step for step, files in steps_at(url).listing().items() if COMMIT in files]


def assert_brings(url: str, folder: Path, step: int, said: list[str] | None = None) -> None:
    assert step in download_newest(url, folder, (said if said is not None else []).append)
    found = CheckpointStore(folder / "checkpoints").restore_newest(ABSTRACT)
    assert found is not None and found[0] == step
    np.testing.assert_array_equal(found[1]["params"]["w"], state(step)["params"]["w"])


def test_a_machine_without_it_gets_the_newest_checkpoint_and_what_is_beside_it(any_url: str, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 1, 2)
    (here / "metrics.jsonl").write_text("{}\n")
    (here / "frozen" / "0").mkdir(parents=True)
    (here / "frozen" / "0" / COMMIT).write_text("of something\n")
    (here / "alive").write_text("of this machine\n")
    with Uploader(any_url, here) as uploader:
        assert uploader.settle() == ""
        saved(here, 3, uploader=uploader)
        (here / "metrics.jsonl").write_text("{}\n{}\n")
        assert uploader.settle() == "" and uploader.newest == 3
    assert complete_at(any_url) == [2, 3]
    assert_brings(any_url, there, 3)
    assert (there / "metrics.jsonl").read_text() == "{}\n{}\n"
    assert (there / "frozen" / "0" / COMMIT).read_text() == "of something\n"
    assert not (there / "alive").exists()
    assert download_newest(any_url, there, print) == []  # it has it
    saved(there, 4)
    assert download_newest(any_url, there, print) == []  # what is newer here stays
    for step in (3, 4):
        (there / "checkpoints" / str(step) / METADATA).unlink()
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


def test_a_step_of_which_a_server_kept_less_is_not_complete(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = RemoteFolder.write
    keeps_less = lambda self, name, data: write(self, name, data[:-1] if name == METADATA else data)  # noqa: E731
    monkeypatch.setattr(RemoteFolder, "write", keeps_less)
    with Uploader(url, tmp_path) as uploader:
        saved(tmp_path, 1)
        assert METADATA in uploader.settle()
    assert complete_at(url) == []


def no_mark(steps: RemoteSteps, step: int) -> None:
    steps.folder.remove([f"{step}/{COMMIT}"])


def other_contents(steps: RemoteSteps, step: int) -> None:
    name = next(name for name in (steps.folder / str(step)).sizes() if "/d/" in name)
    contents = bytearray(steps.folder.read(f"{step}/{name}") or b"")
    contents[len(contents) // 2] ^= 1
    steps.folder.write(f"{step}/{name}", bytes(contents))


def a_missing_file(steps: RemoteSteps, step: int) -> None:
    steps.folder.remove([f"{step}/{METADATA}"])


@pytest.mark.filterwarnings("ignore:checkpoint 2")
@pytest.mark.parametrize("corrupt", [no_mark, other_contents, a_missing_file])
def test_the_step_before_a_corrupted_copy_is_taken(url: str, tmp_path: Path, corrupt):
    with Uploader(url, tmp_path / "here") as uploader:
        saved(tmp_path / "here", 1, 2, uploader=uploader, settles=True)
    corrupt(steps_at(url), 2)
    assert_brings(url, tmp_path / "there", 1)


def test_a_copy_that_ends_in_its_midst_is_told_not_taken_and_tried_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, said, write = tmp_path / "here", [], RemoteFolder.write
    with Uploader(url, here, retry=0.01) as uploader:
        saved(here, 1, uploader=uploader, settles=True)
        left = iter(range(len(steps_at(url).listing()[1]) - 1))  # all but its mark

        def failing(folder: RemoteFolder, name: str, contents: bytes) -> None:
            if next(left, None) is None:
                raise RemoteError("nobody answers")
            write(folder, name, contents)

        uploader.say = said.append
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "write", failing)
            saved(here, 2, uploader=uploader)
            assert uploader.settle() == "nobody answers" and uploader.newest == 1
            assert_brings(url, tmp_path / "there", 1)
            assert len(said) == 1  # the training continues meanwhile
        assert uploader.settle() == "" and uploader.newest == 2 and len(said) == 2


def test_a_step_that_is_being_copied_is_not_removed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put, begun, go_on = RemoteFolder.put, threading.Event(), threading.Event()

    def slow(folder: RemoteFolder, file: Path, name: str) -> None:
        begun.set()
        go_on.wait(300)
        put(folder, file, name)

    with Uploader(url, tmp_path) as uploader:
        assert uploader.settle() == ""
        monkeypatch.setattr(RemoteFolder, "put", slow)
        saved(tmp_path, 1, uploader=uploader)
        assert begun.wait(300)
        saved(tmp_path, 2, 3, 4, uploader=uploader, keep_last=1)
        assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 4]
        assert uploader.settle(lambda: 0.0) == "there was no time for it"
        go_on.set()
        assert uploader.settle() == ""
    assert complete_at(url)[-1] == 4 and not steps_at(url).download(4, tmp_path / "there")


def test_the_rules_for_what_stays_hold_there_too(url: str, tmp_path: Path):
    rules = {"keep_last": 1, "keep_every": 4}
    with Uploader(url, tmp_path, **rules) as uploader:
        for step in range(1, 10):
            saved(tmp_path, step, uploader=uploader, settles=step % 3 == 0, **rules)
    assert complete_at(url) == [4, 8, 9]
    assert {name.partition("/")[0] for name in steps_at(url).folder.sizes()} == {"4", "8", "9"}
    forget(url)
    assert not steps_at(url).listing()


def test_who_cannot_be_reached_at_the_start_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="memoryy://x"):
        Uploader("memoryy://x", tmp_path)
    fails = lambda self: (_ for _ in ()).throw(RemoteError("nobody answers"))  # noqa: E731
    monkeypatch.setattr(RemoteFolder, "sizes", fails)
    with pytest.raises(UserError, match="nobody answers") as refused:
        download_newest(url, tmp_path, print)
    assert refused.value.fix


def test_names_that_lead_elsewhere_are_not_followed():
    outside = ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "a\\b", "a\0b", "a/./b", None, 3]
    assert not any(is_inside(name) for name in outside)
    assert is_inside("params/d/0a") and is_inside("..a/b..")

"""What a checkpoint folder promises: whole steps only, the newest that can be read, on any mesh."""

import errno
import json
import os
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint import store as store_module
from affinage.checkpoint.steps import drop_remains
from affinage.cluster.processes import Processes
from affinage.errors import UserError
from affinage.parallel import make_mesh
from processes_in_memory import ProcessInMemory, in_memory
from waiting import until


def sharding(axis: str, size: int) -> NamedSharding:
    return NamedSharding(make_mesh({axis: size}, jax.devices()), PartitionSpec(axis))


ONE, EIGHT = sharding("fsdp", 1), sharding("fsdp", 8)


def state(value: float, where: NamedSharding) -> dict:
    w = jax.device_put(jnp.arange(16, dtype=jnp.float32).reshape(8, 2) + value, where)
    return {"step": jnp.int32(value), "params": {"w": w, "b": w.astype(jnp.bfloat16)}, "opt_state": (w * 2,)}


def abstract(where: NamedSharding) -> dict:
    def leaf(x: jax.Array) -> jax.ShapeDtypeStruct:
        placed = where if x.ndim else NamedSharding(where.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    return jax.tree.map(leaf, state(0, where))


def assert_same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=3)


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, state(step, EIGHT), {"at": step})
    store.wait()


def newest(store: CheckpointStore, **more: int) -> int:
    found = store.restore_newest(abstract(ONE), **more)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(("axis", "size"), [("fsdp", 1), ("tensor", 4)])
def test_a_state_comes_back_bit_for_bit_on_any_mesh(store: CheckpointStore, axis: str, size: int):
    saved(store, 1)
    where = sharding(axis, size)
    misfit = abstract(where) | {"params": {"w": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=where)}}
    with pytest.raises(UserError, match=r"params\.\w"):
        store.restore(1, misfit)
    step, got, meta = store.restore_newest(abstract(where))
    assert step == 1 and meta == {"at": 1}
    assert got["params"]["w"].sharding == where
    assert_same(got, state(1, where))


def test_parameters_come_back_alone_and_never_those_of_an_older_step(store: CheckpointStore):
    assert store.restore_newest(abstract(ONE)) is None
    with pytest.raises(UserError, match="no checkpoint"):
        store.restore_params(None, {})
    saved(store, 1, 2)
    assert_same(store.restore_params(None, abstract(EIGHT)["params"]), state(2, EIGHT)["params"])
    assert_same(store.restore_params(1, abstract(EIGHT)["params"]), state(1, EIGHT)["params"])
    part = next((store.folder / "2" / "params").rglob("d/*"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="step 2") as told:
        store.restore_params(None, abstract(ONE)["params"])
    assert "@1" in told.value.fix


def test_the_newest_and_every_nth_stay_and_a_step_that_is_there_is_not_written_again(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    saved(store, *range(1, 10))
    assert store.steps() == [4, 8, 9]
    assert sorted(os.listdir(tmp_path)) == ["4", "8", "9"]
    store.save(9, state(5, EIGHT), {})
    store.wait()
    assert store.meta(9) == {"at": 9}


def test_a_save_that_was_cut_off_does_not_count_and_is_replaced(store: CheckpointStore):
    saved(store, 1, 2)
    (store.folder / "2" / "commit_success.txt").unlink()
    (store.folder / "3").mkdir()
    (store.folder / "notes").mkdir()
    (store.folder / "4").symlink_to(store.folder / "1")
    assert store.steps() == [1]
    with pytest.warns(CheckpointWarning) as told:
        assert newest(store) == 1
    assert [str(each.message).split()[1] for each in told] == ["4", "3", "2"]
    saved(store, 2, 3)
    assert store.steps() == [1, 2, 3]
    assert_same(store.restore(3, abstract(ONE)), state(3, ONE))


def test_what_a_kill_has_cut_off_goes_when_a_newer_step_is_there(store: CheckpointStore, tmp_path: Path):
    saved(store, 2)
    for name in ("1", ".4.part", "9", "elsewhere"):
        (store.folder / name).mkdir()
        (store.folder / name / "some").write_text("bytes")
    (store.folder / "3").symlink_to(tmp_path)
    saved(store, 5)
    assert sorted(path.name for path in store.folder.iterdir()) == ["2", "3", "5", "9", "elsewhere"]
    drop_remains(store.folder)
    assert sorted(path.name for path in store.folder.iterdir()) == ["2", "3", "5", "elsewhere"]
    assert store.steps() == [2, 5]


def test_a_damaged_newest_step_is_passed_over_by_name_replaced_and_never_one_to_keep(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2)
    saved(store, 1, 2)
    for data in (tmp_path / "2" / "params").rglob("d/*"):
        os.truncate(data, data.stat().st_size // 2)
    with pytest.warns(CheckpointWarning, match="checkpoint 2"):
        assert newest(store) == 1
    saved(store, 3)
    assert store.steps() == [1, 3]
    shutil.rmtree(tmp_path / "3" / "params")
    with pytest.warns(CheckpointWarning, match="checkpoint 3"):
        assert newest(store) == 1
    saved(store, 3)
    assert newest(store) == 3
    for step in store.steps():
        shutil.rmtree(tmp_path / str(step) / "params")
    with pytest.warns(CheckpointWarning), pytest.raises(UserError):  # starting from nothing would hide it
        newest(store)


def test_the_newest_up_to_a_step_comes_back_or_the_first_after_it(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=9)
    saved(store, 2, 4, 6)
    assert [newest(store, at_most=at_most) for at_most in (1, 2, 5, 6, 9)] == [2, 2, 4, 6, 6]
    shutil.rmtree(store.folder / "4" / "params")
    with pytest.warns(CheckpointWarning):
        assert newest(store, at_most=5) == 2
    store.forget_after(2)
    assert [step for step, _ in store.entries()] == [2]


@pytest.mark.parametrize("held", [True, False], ids=["held", "copied, as on an accelerator"])
def test_arrays_may_be_donated_while_they_are_saved(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, held: bool
):
    if not held:
        monkeypatch.setattr(store_module, "can_be_held", lambda state: False)
        monkeypatch.setattr(store_module, "hold", lambda state: None)
    change = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    everywhere = NamedSharding(EIGHT.mesh, PartitionSpec())  # of which every device saves a part
    current = state(1, EIGHT) | {"large": jax.device_put(np.arange(2**19, dtype=np.float32), everywhere)}
    like = {"large": jax.ShapeDtypeStruct((2**19,), "float32", sharding=everywhere)}
    store.prepare(current)
    store.save(1, current, {})
    for _ in range(20):
        current = change(current)
    jax.block_until_ready(current)
    store.wait()
    assert_same(store.restore(1, abstract(EIGHT)), state(1, EIGHT))
    np.testing.assert_array_equal(store.restore(1, like)["large"], np.arange(2**19, dtype=np.float32))


def test_a_save_that_failed_is_told_before_the_next_one(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()

    def seal_without_room(target: Path, key: bytes | None) -> None:
        assert go_on.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(store_module, "seal", seal_without_room)
    store.save(1, state(1, EIGHT), {})
    assert store.in_flight() < store.in_flight()  # not known yet, and nothing is waited for
    go_on.set()
    with pytest.raises(OSError, match="No space left"):
        until(lambda: store.in_flight() < 0)
    assert store.in_flight() == 0.0
    store.wait()  # once is enough


def test_a_full_disk_is_an_error_of_the_disk_and_what_was_saved_before_stays_whole(store: CheckpointStore):
    large = {"params": {"w": jnp.ones((1000, 1000))}}
    store.save(1, large, {})
    store.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # as a quota ends a file
    try:
        with pytest.raises(OSError) as full:
            store.save(2, large, {})
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.value.errno == errno.EFBIG
    assert CheckpointStore(store.folder).steps() == [1] and not store.damage(1)


def _fails(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Have a file that is opened, or read, fail with an error of the disk."""
    opened, read = open, Path.read_bytes

    def fail(at: Any) -> None:
        if isinstance(at, str | Path) and Path(at) == path:
            raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("builtins.open", lambda file, *more, **named: (fail(file), opened(file, *more, **named))[1])
    monkeypatch.setattr(Path, "read_bytes", lambda self: (fail(self), read(self))[1])


@pytest.mark.parametrize("file", ["SHA256SUMS", "params/_METADATA"])
def test_a_network_that_fails_is_no_damage_and_a_file_that_cannot_be_read_is(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, file: str
):
    saved(store, 1, 2)
    for ask in (newest, lambda store: store.restore(2, abstract(ONE))):
        with monkeypatch.context() as patch:
            _fails(patch, store.folder / "2" / file, errno.ESTALE)
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                ask(store)
    assert newest(store) == 2
    _fails(monkeypatch, store.folder / "2" / file, errno.EIO)
    with pytest.warns(CheckpointWarning, match="checkpoint 2"):
        assert newest(store) == 1


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    store = CheckpointStore(tmp_path_factory.mktemp("sound"))
    saved(store, 1, 2)
    return store


def a_file(step: Path, ends: str = "") -> Path:
    """A file of the arrays, or one whose path ends so."""
    return next(path for path in sorted(step.rglob("*")) if path.is_file() and (ends or "/d/") in f"{path}/")


def flip(step: Path) -> None:
    contents = bytearray(a_file(step).read_bytes())
    contents[len(contents) // 2] ^= 16
    a_file(step).write_bytes(contents)


def from_the_older_step(step: Path) -> None:
    shutil.rmtree(step / "params")
    shutil.copytree(step.parent / "1" / "params", step / "params")


def link_to_the_older_step(step: Path) -> None:
    shutil.rmtree(step / "params")
    (step / "params").symlink_to(step.parent / "1" / "params")


def marks_around_nothing(step: Path) -> None:
    for path in step.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "a bit of the arrays": flip,
    "the end of a file": lambda step: os.truncate(a_file(step), 5),
    "a file of zeros": lambda step: a_file(step, "_METADATA").write_bytes(bytes(99)),
    "a file more": lambda step: (step / "params" / "more").write_text("more"),
    "a file less": lambda step: a_file(step).unlink(),
    "a tree of the older step": from_the_older_step,
    "a link to the older step": link_to_the_older_step,
    "marks of a finished save around nothing": marks_around_nothing,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_no_damage_is_loaded(sound: CheckpointStore, tmp_path: Path, kind: str):
    store = CheckpointStore(shutil.copytree(sound.folder, tmp_path / "steps"))
    DAMAGE[kind](store.folder / "2")
    assert 2 not in store.steps() or store.damage(2)
    with pytest.warns(CheckpointWarning, match="checkpoint 2 "):
        step, got, meta = store.restore_newest(abstract(ONE))
    assert step == 1 and meta == {"at": 1}
    assert_same(got, state(1, ONE))
    with pytest.raises(UserError, match="step 2 "):
        store.restore(2, abstract(ONE))


def test_a_copy_elsewhere_is_the_same_checkpoint_with_hidden_files_too(sound: CheckpointStore, tmp_path: Path):
    shutil.copytree(sound.folder, tmp_path / "copy")
    (tmp_path / "copy" / "2" / ".DS_Store").write_text("")
    store = CheckpointStore(tmp_path / "copy")
    assert not store.damage(2)
    assert store.seal_hash(2) == sound.seal_hash(2) != store.seal_hash(1)
    for path in (store.folder / "2" / "step").rglob("d/*"):
        path.write_bytes(b"")
    assert store.damage(2)  # which does not matter for what is asked for
    assert_same(store.restore_params(2, abstract(ONE)["params"]), state(2, ONE)["params"])


def beside(answers: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch) -> ProcessInMemory:
    """Process 1 of two, of which the first has given these answers in its own time."""
    first, second = in_memory(2)
    for name, values in answers.items():
        for number, value in enumerate(values, 1):
            first.service.values[f"affinage/{name}/{number}"] = json.dumps(value)
    monkeypatch.setattr(first.service, "wait_at_barrier", lambda name, milliseconds: None)
    monkeypatch.setattr(Processes, "current", second)
    return second


def test_processes_resume_from_one_step_though_another_one_cannot_read_the_newest(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    saved(store, 1, 2)
    names = {"checkpoints": [[1, 2]], "what is called like one": [[1, 2]], "damage": ["", ""]}
    process = beside({f"broadcast/{name}": values for name, values in names.items()}, monkeypatch)
    for turn in (1, 2):
        process.service.values[f"affinage/gather/whether it was read/{turn}/0"] = str(int(turn == 2))
    with process.all_at_work():
        assert newest(store) == 1


def test_processes_save_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = beside({"broadcast/a save": [[False, "/elsewhere"]]}, monkeypatch)
    with process.all_at_work(), pytest.raises(UserError, match="/elsewhere") as refused:
        CheckpointStore(tmp_path).save(1, state(1, ONE), {})
    assert refused.value.fix

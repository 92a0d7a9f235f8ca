"""What a checkpoint folder promises: whole steps only, the newest that can be read, on any mesh."""

import dataclasses
import errno
import json
import os
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore, CheckpointWarning, memory
from affinage.checkpoint import store as store_module
from affinage.checkpoint.steps import drop_remains
from affinage.errors import UserError
from affinage.hardware.hosts import Hosts
from affinage.parallel import make_mesh
from hosts_in_memory import Coordinator, HostInMemory


def sharding(axis: str, size: int) -> NamedSharding:
    return NamedSharding(make_mesh({axis: size}, jax.devices()), PartitionSpec(axis))


def state(value: float, where: NamedSharding) -> dict:
    w = jax.device_put(jnp.arange(16, dtype=jnp.float32).reshape(8, 2) + value, where)
    return {"step": jnp.int32(value), "params": {"w": w, "b": w.astype(jnp.bfloat16)}, "opt_state": (w * 2,)}


def abstract(where: NamedSharding) -> dict:
    def leaf(x: jax.Array) -> jax.ShapeDtypeStruct:
        placed = where if x.ndim else NamedSharding(where.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    return jax.tree.map(leaf, state(0, where))


def assert_same(got: dict, expected: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=3)


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, state(step, sharding("fsdp", 8)), {"at": step})
    store.wait()


@pytest.mark.parametrize(("axis", "size"), [("fsdp", 8), ("fsdp", 1), ("tensor", 4)])
def test_a_state_comes_back_bit_for_bit_on_any_mesh(store: CheckpointStore, axis: str, size: int):
    saved(store, 1)
    where = sharding(axis, size)
    step, got, meta = store.restore_newest(abstract(where))
    assert step == 1 and meta == {"at": 1}
    assert got["params"]["w"].sharding == where
    assert_same(got, state(1, where))


def test_parameters_come_back_alone(store: CheckpointStore):
    saved(store, 1, 2)
    where = sharding("fsdp", 2)
    assert_same(store.restore_params(None, abstract(where)["params"]), state(2, where)["params"])
    assert_same(store.restore_params(1, abstract(where)["params"]), state(1, where)["params"])


def test_parameters_are_not_those_of_an_older_step_where_the_newest_is_damaged(store: CheckpointStore):
    saved(store, 1, 2)
    part = next((store.folder / "2" / "params").rglob("d/*"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="step 2 is damaged") as told:
        store.restore_params(None, abstract(sharding("fsdp", 1))["params"])
    assert "@1" in told.value.fix


def test_the_newest_and_every_nth_stay(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    saved(store, *range(1, 10))
    assert store.steps() == [4, 8, 9]
    assert sorted(os.listdir(tmp_path)) == ["4", "8", "9"]


def test_a_step_that_is_there_is_not_written_again(store: CheckpointStore):
    saved(store, 1)
    store.save(1, state(5, sharding("fsdp", 8)), {})
    store.wait()
    assert store.meta(1) == {"at": 1}


def test_nothing_saved_is_nothing_to_restore(store: CheckpointStore):
    assert store.restore_newest(abstract(sharding("fsdp", 1))) is None
    with pytest.raises(UserError, match="no checkpoint"):
        store.restore_params(None, {})


def test_a_save_that_was_cut_off_does_not_count_and_is_replaced(store: CheckpointStore):
    saved(store, 1, 2)
    (store.folder / "2" / "commit_success.txt").unlink()
    (store.folder / "3").mkdir()
    (store.folder / "notes").mkdir()
    (store.folder / "4").symlink_to(store.folder / "1")
    assert store.steps() == [1]
    with pytest.warns(CheckpointWarning) as told:
        store.restore_newest(abstract(sharding("fsdp", 1)))
    link, cut_off = (str(each.message) for each in told[:2])
    assert "4 cannot be read: it is a symbolic link" in link and "3 cannot be read: it is not complete" in cut_off
    saved(store, 2, 3)
    assert store.steps() == [1, 2, 3]
    assert_same(store.restore(3, abstract(sharding("fsdp", 1))), state(3, sharding("fsdp", 1)))


def _truncate_data(step: Path) -> None:
    for data in (step / "params").rglob("d/*"):
        os.truncate(data, data.stat().st_size // 2)


def _remove_data(step: Path) -> None:
    shutil.rmtree(step / "params")


def _empty_with_a_stale_commit_mark(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()
    (step / "commit_success.txt").write_text("")


@pytest.mark.parametrize("damage", [_truncate_data, _remove_data, _empty_with_a_stale_commit_mark])
def test_a_damaged_newest_step_is_passed_over_with_a_warning(store: CheckpointStore, damage):
    saved(store, 1, 2)
    damage(store.folder / "2")
    with pytest.warns(CheckpointWarning, match="checkpoint 2 cannot be read"):
        step, got, _ = store.restore_newest(abstract(sharding("fsdp", 1)))
    assert step == 1
    assert_same(got, state(1, sharding("fsdp", 1)))


def test_a_damaged_step_is_replaced_and_never_counts_as_one_to_keep(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2)
    saved(store, 1, 2)
    _truncate_data(tmp_path / "2")
    with pytest.warns(CheckpointWarning):
        store.restore_newest(abstract(sharding("fsdp", 1)))
    saved(store, 3)
    assert store.steps() == [1, 3]
    saved(store, 4, 5)
    _truncate_data(tmp_path / "5")
    with pytest.warns(CheckpointWarning):
        store.restore_newest(abstract(sharding("fsdp", 1)))
    saved(store, 5)
    assert store.restore_newest(abstract(sharding("fsdp", 1)))[0] == 5


def test_starting_from_nothing_never_hides_that_all_are_damaged(store: CheckpointStore):
    saved(store, 1)
    _remove_data(store.folder / "1")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(UserError, match=r"none of the checkpoints \[1\] can be restored"),
    ):
        store.restore_newest(abstract(sharding("fsdp", 1)))


def save_and_donate(store: CheckpointStore, where: NamedSharding) -> None:
    change = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    current = state(1, where)
    store.save(1, current, {})
    for _ in range(20):
        current = change(current)
    jax.block_until_ready(current)


def test_arrays_may_be_donated_while_they_are_saved(store: CheckpointStore):
    where = sharding("fsdp", 8)
    save_and_donate(store, where)
    store.wait()
    assert_same(store.restore(1, abstract(where)), state(1, where))


def test_a_save_returns_before_orbax_has_begun_and_keeps_the_state_of_then(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    where = sharding("fsdp", 8)
    let_it_begin, begin = threading.Event(), CheckpointStore._begin

    def late(self: CheckpointStore, *arguments: Any) -> Any:
        assert let_it_begin.wait(60)
        return begin(self, *arguments)

    monkeypatch.setattr(CheckpointStore, "_begin", late)
    save_and_donate(store, where)
    let_it_begin.set()
    store.wait()
    assert_same(store.restore(1, abstract(where)), state(1, where))


def test_a_save_that_failed_is_told_before_the_next_one(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()

    def seal_without_room(target: Path, key: bytes | None) -> None:
        assert go_on.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(store_module, "seal", seal_without_room)
    store.save(1, state(1, sharding("fsdp", 8)), {})
    assert store.in_flight() < store.in_flight()  # not known yet, and nothing is waited for
    go_on.set()
    with pytest.raises(OSError, match="No space left"):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            store.in_flight()
    assert store.in_flight() == 0.0
    store.wait()  # once is enough


def test_where_arrays_must_be_copied_the_first_save_compiles_nothing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_module, "can_be_held", lambda state: False)  # as on an accelerator
    monkeypatch.setattr(store_module, "hold", lambda state: None)
    compiled, compile_one = [], compiler.compile_or_get_cached

    def counted(*given: Any, **named: Any) -> Any:
        compiled.append(1)
        return compile_one(*given, **named)

    everywhere = NamedSharding(make_mesh({"data": 8}, jax.devices()), PartitionSpec())
    large = {"params": {"w": jax.device_put(np.arange(2**21, dtype=np.float32), everywhere)}, "step": jnp.int32(1)}
    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    store.prepare(large)
    assert compiled
    compiled.clear()
    store.save(1, large, {})
    store.wait()
    assert not compiled
    like = {"params": {"w": jax.ShapeDtypeStruct((2**21,), "float32", sharding=everywhere)}}
    assert_same(store.restore(1, like)["params"], large["params"])


@pytest.mark.parametrize("kept", [False, True])
def test_memory_is_given_back_during_a_save_only_where_the_heap_keeps_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, kept: bool
):
    given, during = [], []
    monkeypatch.setattr(memory, "_GIVE_EVERY", 0.01)
    monkeypatch.setattr(memory, "freed_memory_is_kept", lambda: kept)
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: given.append(1))

    def slow_seal(target: Path, key: bytes | None) -> None:
        late = time.monotonic() + (60 if kept else 0.3)
        while not given and time.monotonic() < late:
            time.sleep(0.01)
        during.append(len(given))
        real_seal(target)

    real_seal = store_module.seal
    monkeypatch.setattr(store_module, "seal", slow_seal)
    saved(store, 1)
    assert (during[0] > 0) == kept and len(given) > during[0]


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


def test_the_newest_up_to_a_step_comes_back_or_the_first_after_it(tmp_path: Path):
    store, where = CheckpointStore(tmp_path, keep_last=9), abstract(sharding("fsdp", 1))
    saved(store, 2, 4, 6)

    def found(at_most: int) -> int:
        newest = store.restore_newest(where, at_most=at_most)
        assert newest is not None
        return newest[0]

    assert [found(at_most) for at_most in (1, 2, 5, 6, 9)] == [2, 2, 4, 6, 6]
    _remove_data(store.folder / "4")
    with pytest.warns(CheckpointWarning):
        assert found(5) == 2
    store.forget_after(2)
    assert [step for step, _ in store.entries()] == [2]


@dataclasses.dataclass(eq=False)
class Listening(HostInMemory):
    """Notes for how long it would wait."""

    waits: dict[str, float | None] = dataclasses.field(default_factory=dict)

    def hear(self, key: str, seconds: float | None, *, said: str) -> str:
        self.waits[key.split("/")[2]] = seconds
        return super().hear(key, seconds, said=said)


def test_hosts_wait_longer_for_a_larger_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there = json.dumps([True, str(tmp_path)])
    told = {"damage": '"a bit"', "a save": there, "checkpoints": "[]", "what is called like one": "[]"}
    words = {f"affinage/share/{name}/1": value for name, value in told.items()}
    host = Listening(1, 2, coordinator=Coordinator(words))
    monkeypatch.setattr(Hosts, "current", host)
    store, large = CheckpointStore(tmp_path), {"params": jax.ShapeDtypeStruct((18_000_000_000,), "float32")}
    with host.all_at_work():
        with pytest.raises(UserError, match="a bit"):
            store.restore(1, large)
        store.save(1, large, {})
        assert store.restore_newest(large) is None
    assert set(host.waits) == {*told} and set(host.waits.values()) == {600 + 72e9 / 10e6}


def _fails(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Have a file that is opened, or read, fail with an error of the disk."""
    opened, read = open, Path.read_bytes

    def fail(at: Any) -> None:
        if isinstance(at, str | Path) and Path(at) == path:
            raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("builtins.open", lambda file, *more, **named: (fail(file), opened(file, *more, **named))[1])
    monkeypatch.setattr(Path, "read_bytes", lambda self: (fail(self), read(self))[1])


FILES = ["SHA256SUMS", "params/_METADATA", "_CHECKPOINT_METADATA"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT])
def test_a_network_that_fails_is_not_taken_for_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int, file: str
):
    saved(store, 1, 2)
    with monkeypatch.context() as patch:
        _fails(patch, store.folder / "2" / file, number)
        with pytest.raises(OSError, match=os.strerror(number)):
            store.restore_newest(abstract(sharding("fsdp", 1)))
    assert store.restore_newest(abstract(sharding("fsdp", 1)))[0] == 2


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_cannot_be_read_is_damage(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, file: str):
    saved(store, 1, 2)
    _fails(monkeypatch, store.folder / "2" / file, errno.EIO)
    with pytest.warns(CheckpointWarning, match="checkpoint 2 cannot be read: .*[Ii]nput/output error"):
        assert store.restore_newest(abstract(sharding("fsdp", 1)))[0] == 1


def _of_tensorstore() -> Exception:
    error = Exception("Encountered error while reading an array")
    error.__cause__ = ValueError(f"NOT_FOUND: Error reading file [source locations='x' os_error_code='{errno.EIO}']")
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [(_of_tensorstore(), OSError), (OSError(errno.ESTALE, "stale"), OSError), (MemoryError(), MemoryError)],
)
def test_what_is_no_matter_of_a_checkpoint_is_no_mistake_of_the_user(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]
):
    def load(*_: object) -> None:
        raise error

    saved(store, 1)
    monkeypatch.setattr(store, "_load", load)
    with pytest.raises(told):
        store.restore(1, abstract(sharding("fsdp", 1)))


@pytest.mark.parametrize("who", [0, 1])
def test_hosts_go_on_from_one_step_though_one_cannot_read_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: int
):
    store = CheckpointStore(tmp_path)
    saved(store, 1, 2)
    shared = {"checkpoints/1": "[1, 2]", "what is called like one/1": "[1, 2]", "damage/1": '""', "damage/2": '""'}
    words = {f"affinage/share/{name}": value for name, value in shared.items()}
    words |= {f"affinage/least/whether it was read/{turn}/0": str(int(turn == 2 or who == 1)) for turn in (1, 2)}
    host = HostInMemory(1, 2, coordinator=Coordinator(words))
    load = store._load

    def load_but_one(step: int, wanted: Any) -> Any:
        if who == 1 and step == 2:
            raise ValueError("no")
        return load(step, wanted)

    monkeypatch.setattr(Hosts, "current", host)
    monkeypatch.setattr(store, "_load", load_but_one)
    with host.all_at_work(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = store.restore_newest(abstract(sharding("fsdp", 1)))
    assert found is not None and found[0] == 1
    assert [str(each.message) for each in said] == ["checkpoint 2 cannot be read: no"] * who
    assert [words[f"affinage/least/whether it was read/{turn}/1"] for turn in (1, 2)] == [str(int(who == 0)), "1"]


def test_hosts_save_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = {"affinage/share/a save/1": json.dumps([False, "/elsewhere"])}
    host = HostInMemory(1, 2, coordinator=Coordinator(words))
    monkeypatch.setattr(Hosts, "current", host)
    with host.all_at_work(), pytest.raises(UserError, match=r"host 1 would save elsewhere than .*/elsewhere"):
        CheckpointStore(tmp_path).save(1, state(1, sharding("fsdp", 1)), {})

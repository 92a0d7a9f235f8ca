"""What a checkpoint folder promises: complete steps only, the newest that is intact, on any mesh."""

import errno
import gc
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.store import COMMIT, METADATA, checksums
from affinage.cluster.processes import Processes
from affinage.errors import UserError
from affinage.parallel.sharding import make_mesh
from affinage.stopping import skip_exit_handlers
from run_affinage import refused
from waiting import until


def sharding(axis: str, size: int) -> NamedSharding:
    return NamedSharding(make_mesh({axis: size}, jax.devices()), PartitionSpec(axis))


ONE, EIGHT = sharding("fsdp", 1), sharding("fsdp", 8)


def state(value: float, where: NamedSharding) -> dict:
    w = jax.device_put(jnp.arange(16, dtype=jnp.float32).reshape(8, 2) + value, where)
    step = jax.device_put(np.int32(value), NamedSharding(where.mesh, PartitionSpec()))
    return {"step": step, "params": {"w": w, "b": w.astype(jnp.bfloat16)}, "opt_state": (w * 2,)}


def like(tree: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def abstract(where: NamedSharding) -> dict:
    return like(state(0, where))


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
    refused(store.restore, 1, misfit, match=r"params\.\w")
    with pytest.warns(CheckpointWarning):
        refused(CheckpointStore(store.folder).restore_newest, misfit, match="Undo changes")
    step, got, meta = store.restore_newest(abstract(where))
    assert step == 1 and meta == {"at": 1} and got["params"]["w"].sharding == where
    assert_same(got, state(1, where))


def test_parameters_come_back_alone_in_any_dtype_and_never_those_of_an_older_step(store: CheckpointStore):
    refused(store.restore, None, {}, match="no checkpoint")
    saved(store, 1, 2)
    params = {"params": abstract(EIGHT)["params"]}
    assert_same(store.restore(None, params), {"params": state(2, EIGHT)["params"]})
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=ONE), params)
    w = state(1, ONE)["params"]["w"].astype(jnp.bfloat16)
    assert_same(store.restore(1, half), {"params": {"w": w, "b": w}})
    flip(store.folder / "2" / "params")
    assert "@STEP" in refused(store.restore, None, params, match="checkpoints/2: ").fix


def test_the_newest_and_every_nth_stay_and_a_step_that_is_there_is_not_written_again(tmp_path: Path):
    store, other = (CheckpointStore(tmp_path / name, keep_last=2, keep_every=4) for name in ("steps", "other"))
    saved(other, 1)
    store.folder.mkdir()
    (store.folder / "1").symlink_to(other.folder / "1")  # which is removed without what it leads to
    saved(store, *range(2, 10))
    assert sorted(os.listdir(store.folder)) == ["4", "8", "9"] and not other.verify(1)
    store.save(9, state(5, EIGHT), {})
    store.wait()
    assert store.metadata(9).facts == {"at": 9}


def test_older_steps_go_once_the_disk_has_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_disk = set()

    def fsync(descriptor: int) -> None:
        on_disk.add(path := Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if path.is_dir():
            raise OSError(errno.EINVAL, "as on some networks")

    def in_use() -> set[int]:
        assert on_disk >= {tmp_path.parent, tmp_path, *(tmp_path / str(max(store.steps()))).rglob("*")}
        return set()

    monkeypatch.setattr(os, "fsync", fsync)
    store = CheckpointStore(tmp_path, keep_last=1, saved=in_use)
    saved(store, 1, 2)
    assert store.steps() == [2]


def test_a_save_that_was_cut_off_does_not_count_and_is_replaced_or_removed(store: CheckpointStore):
    saved(store, 1, 2)
    (store.folder / "2" / COMMIT).unlink()
    for name in ("3", "notes"):
        (store.folder / name).mkdir()
    assert store.steps() == [1]
    with pytest.warns(CheckpointWarning) as warned:
        assert newest(store) == 1
    assert [str(each.message).split()[1] for each in warned] == ["3", "2"]
    saved(store, 3)
    assert sorted(os.listdir(store.folder)) == ["1", "3", "notes"]


def test_a_corrupted_step_is_passed_over_by_name_replaced_and_never_one_to_keep(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2)
    saved(store, 1, 2)
    flip(tmp_path / "2")
    with pytest.warns(CheckpointWarning, match="checkpoint 2"):
        assert newest(store) == 1
    saved(store, 3)
    assert store.steps() == [1, 3]
    shutil.rmtree(tmp_path / "3" / "params")
    with pytest.warns(CheckpointWarning, match="checkpoint 3"):
        assert newest(store, before=4) == 1
    saved(store, 3)
    assert [newest(store, before=before) for before in (2, 3, 4, 9)] == [1, 1, 3, 3]
    assert store.restore_newest(abstract(ONE), before=1) is None
    for step in store.steps():
        shutil.rmtree(tmp_path / str(step) / "params")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(UserError, match="are incomplete"),
    ):  # to start anew would hide it
        newest(store)


def test_arrays_may_be_donated_while_they_are_saved(store: CheckpointStore):
    change = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    everywhere = NamedSharding(EIGHT.mesh, PartitionSpec())  # of which every device saves a part
    current = state(1, EIGHT) | {"large": jax.device_put(np.arange(2**19, dtype=np.float32), everywhere)}
    wanted = like(current)
    facts: dict[str, list[int]] = {"at": []}
    store.save(1, current, facts)
    for step in range(20):
        facts["at"].append(step)
        current = change(current)
    jax.block_until_ready(current)
    store.wait()
    assert_same(store.restore(1, wanted), state(1, EIGHT) | {"large": np.arange(2**19, dtype=np.float32)})


def test_a_full_disk_is_an_error_of_the_disk_also_of_a_save_in_flight(store: CheckpointStore):
    large = {"params": {"w": jnp.ones((1000, 1000))}}
    store.save(1, large, {})
    store.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # as a quota ends a file
    try:
        with pytest.raises(OSError) as full:
            store.save(2, large, {})
            until(lambda: store.wait(0) is not None)  # raises
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.value.errno == errno.EFBIG and skip_exit_handlers.is_set(), "no thread of Orbax is waited for"
    store.wait()  # it was raised once
    assert CheckpointStore(store.folder).steps() == [1] and not store.verify(1)


@pytest.mark.parametrize(("number", "is_corruption"), [(errno.ESTALE, False), (errno.EIO, True)])
def test_a_network_that_fails_is_no_corruption_and_a_file_that_cannot_be_read_is(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int, is_corruption: bool
):
    saved(store, 1, 2)
    opened = Path.open

    def fails(path: Path, *given: Any, **named: Any) -> Any:
        if path == store.folder / "2" / METADATA:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *given, **named)

    monkeypatch.setattr(Path, "open", fails)
    passed_over = pytest.warns(CheckpointWarning, match="checkpoint 2")
    with passed_over if is_corruption else pytest.raises(OSError, match=os.strerror(number)):
        assert newest(store) == 1


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    store = CheckpointStore(tmp_path_factory.mktemp("intact"))
    saved(store, 1, 2)
    return store


def arrays(step: Path) -> Path:
    """A file of arrays."""
    return next(path for path in sorted(step.rglob("*")) if path.is_file() and path.parent.name == "d")


def flip(step: Path) -> None:
    contents = bytearray(arrays(step).read_bytes())
    contents[len(contents) // 2] ^= 16
    arrays(step).write_bytes(contents)


def instead(tree: Path, copy: Callable[[Path, Path], object]) -> None:
    shutil.rmtree(tree)
    copy(tree.parents[1] / "1" / tree.name, tree)


def metadata(change: Any) -> Any:
    def act(step: Path) -> None:
        found = json.loads((step / METADATA).read_text())
        changed = change(found)
        (step / METADATA).write_text(changed if isinstance(changed, str) else json.dumps(found))

    return act


CORRUPTION = {
    "a bit of the arrays": flip,
    "a file of the arrays that is cut": lambda step: os.truncate(arrays(step), arrays(step).stat().st_size - 7),
    "a missing file of the arrays": lambda step: arrays(step).unlink(),
    "an empty file": lambda step: metadata(lambda found: "")(step),
    "a missing tree": lambda step: shutil.rmtree(step / "params"),
    "a tree of the older step": lambda step: instead(step / "params", shutil.copytree),
    "a link to the older step": lambda step: instead(step / "params", os.symlink),
    "all of the older step": lambda step: (shutil.rmtree(step), shutil.copytree(step.with_name("1"), step)),
    "another fact": metadata(lambda found: found["custom_metadata"]["affinage"]["facts"].update(at=3)),
    "no facts": metadata(lambda found: found.update(custom_metadata={})),
    "100,000 levels": metadata(lambda found: json.dumps(found).replace('{"at": 2}', "[" * 100_000 + "]" * 100_000)),
}


@pytest.mark.parametrize("kind", CORRUPTION)
def test_no_corruption_is_restored(intact: CheckpointStore, tmp_path: Path, kind: str):
    store = CheckpointStore(shutil.copytree(intact.folder, tmp_path / "steps"))
    CORRUPTION[kind](tmp_path / "steps" / "2")
    assert store.verify(2)
    with pytest.warns(CheckpointWarning, match="checkpoint 2 "):
        step, got, meta = store.restore_newest(abstract(ONE))
    assert step == 1 and meta == {"at": 1}
    assert_same(got, state(1, ONE))
    refused(store.restore, 2, abstract(ONE), match="steps/2: ")


def test_many_arrays_that_cannot_be_read_are_one_message_and_nothing_of_asyncio(tmp_path: Path, caplog):
    many = {"params": {str(index): jax.device_put(jnp.ones((40, 40)), ONE) for index in range(8)}}
    store = CheckpointStore(tmp_path)
    store.save(1, many, {})
    store.wait()
    for file in tmp_path.rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    for _ in range(5):  # once in a while a single task fails before the others begin
        refused(store.restore, 1, like(many), match="1: ")
        gc.collect()  # errors that nobody has looked at are logged with their tasks' ends
    assert not caplog.records


def test_no_code_that_a_checkpoint_names_is_run(intact: CheckpointStore, tmp_path: Path, monkeypatch):
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nTrap = int\n")
    monkeypatch.syspath_prepend(tmp_path)
    store = CheckpointStore(shutil.copytree(intact.folder, tmp_path / "steps"))
    named = dict.fromkeys(("params", "step", "opt_state"), "trap.Trap")
    metadata(lambda found: found.update(item_handlers=named))(tmp_path / "steps" / "2")
    with pytest.warns(CheckpointWarning) if store.verify(2) else pytest.MonkeyPatch.context():
        newest(store)
    assert not (tmp_path / "sprung").exists()


def test_processes_resume_from_one_step_though_another_one_cannot_read_the_newest(store: CheckpointStore, monkeypatch):
    saved(store, 1, 2)
    second = Processes(1, 2)
    monkeypatch.setattr(Processes, "current", second)
    monkeypatch.setattr(second, "broadcast", lambda name, value, **_: [[1, ""], [2, ""]])  # what the first process says
    monkeypatch.setattr(second, "all_min", lambda name, value, **_: min(value, name != "an array of 2"))
    with second.all_at_work():
        assert newest(store) == 1


# ---- checksums of arrays


DTYPES = ["float32", "bfloat16", "int32", "int8", "bool", "float8_e4m3fn"]


def checksum(array: np.ndarray | jax.Array) -> str:
    return checksums({"tree": {"x": jnp.asarray(array)}})["tree.x"][2]


@given(dtype=st.sampled_from(DTYPES), shape=st.sampled_from([(1,), (16,), (8, 6), (2, 3, 4)]), data=st.data())
def test_any_one_changed_element_changes_the_checksum(dtype: str, shape: tuple[int, ...], data: st.DataObject):
    array = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype))
    changed = array.copy()
    bits = changed.view(np.uint8).reshape(-1)
    at = data.draw(st.integers(0, bits.size - 1))
    bits[at] ^= 1 if dtype == "bool" else 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(array) == checksum(array.copy())


def test_the_checksum_is_the_same_on_any_mesh():
    array, mesh = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), jax.make_mesh((2, 4), ("a", "b"))
    for spec in ((), ("a",), ("b", "a"), (("a", "b"),)):
        assert checksum(jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))) == checksum(array)

"""Damaged checkpoints: found, told, and passed over for the one before, whatever the damage."""

import random
import shutil
import warnings
from pathlib import Path

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.errors import UserError


def state(value: float) -> dict:
    return {"step": jnp.int32(value), "params": {"w": jnp.arange(600, dtype=jnp.float32) + value}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    store = CheckpointStore(folder, keep_last=2)
    for step in (1, 2):
        store.save(step, state(step), {"at": step})
    store.wait()
    return folder


def damaged(sound: Path, tmp_path: Path, kind: str, seed: int) -> CheckpointStore:
    folder = tmp_path / "steps"
    faults.place(sound, folder)
    faults.FAULTS[kind](folder, random.Random(seed))
    return CheckpointStore(folder)


@pytest.mark.parametrize("times", [3, pytest.param(25, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", faults.FAULTS)
def test_no_damage_is_loaded(sound: Path, tmp_path: Path, kind: str, times: int):
    for seed in range(times):
        store = damaged(sound, tmp_path, kind, seed)
        assert 2 not in store.steps() or store.damage(2), (kind, seed)
    # The whole way, once.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CheckpointWarning)
        step, got, meta = store.restore_newest({"step": None, "params": None})
    assert step == 1 and meta == {"at": 1}
    said = [str(each.message) for each in told if each.category is CheckpointWarning]
    assert len(said) == 1 and "checkpoint 2 " in said[0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state(1)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_step_that_is_asked_for_by_name_is_refused_too(sound: Path, tmp_path: Path):
    store = damaged(sound, tmp_path, "flip_weights", 0)
    with pytest.raises(UserError, match="step 2 is damaged"):
        store.restore(2, {"step": None, "params": None})


def test_a_copy_elsewhere_is_the_same_checkpoint_and_hidden_files_do_not_matter(sound: Path, tmp_path: Path):
    shutil.copytree(sound, tmp_path / "copy")
    (tmp_path / "copy" / "2" / ".DS_Store").write_text("")
    store = CheckpointStore(tmp_path / "copy")
    assert not store.damage(2)
    assert store.seal_hash(2) == CheckpointStore(sound).seal_hash(2) != store.seal_hash(1)


def test_damage_of_what_is_not_asked_for_does_not_matter(sound: Path, tmp_path: Path):
    shutil.copytree(sound, tmp_path / "copy")
    store = CheckpointStore(tmp_path / "copy")
    for path in (store.folder / "2" / "step").rglob("d/*"):
        path.write_bytes(b"")
    assert store.damage(2)
    np.testing.assert_array_equal(store.restore_params(2, None)["w"], state(2)["params"]["w"])

"""Saved on four devices, gone on from on others: the state bit for bit, the same batches, the same curve."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.training import train
from affinage.training.state import TrainState

SAVED, STEPS = 4, 8
SETTINGS = {"checkpoint": {"every_steps": SAVED, "keep_last": 99}, "eval_every": STEPS}


def job(folder: Path, mesh: dict[str, int]):
    return tiny.job(folder, STEPS, graph=tiny.graph(dropout=0.1, layers=1), mesh=mesh, **SETTINGS)


def losses(folder: Path) -> np.ndarray:
    return np.array([line["loss"] for line in tiny.lines(folder) if line["step"] > SAVED])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    train(job(folder, {"data": 2, "fsdp": 2}))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"data": 1}, {"fsdp": 2, "tensor": 4}])
def test_a_run_goes_on_where_there_are_other_devices(undisturbed: Path, tmp_path: Path, mesh: dict[str, int]):
    shutil.copytree(undisturbed / "checkpoints" / str(SAVED), tmp_path / "checkpoints" / str(SAVED))
    here = job(tmp_path, mesh)
    program, _ = tiny.compiled(here)

    store = CheckpointStore(tmp_path / "checkpoints")
    state = TrainState(**store.restore(SAVED, program.abstract.named()))
    assert all(leaf.sharding == like.sharding for leaf, like in zip(*map(jax.tree.leaves, (state, program.abstract))))
    assert tiny.bits(state.named()) == tiny.saved_bits(undisturbed, SAVED, *state.named())
    for name, array in program.put(here.feed.batch(SAVED)).items():
        assert np.asarray(array).tobytes() == here.feed.batch(SAVED)[name].tobytes()

    assert train(here)["resumed_at"] == [SAVED]
    np.testing.assert_allclose(losses(tmp_path), losses(undisturbed), rtol=1e-5)

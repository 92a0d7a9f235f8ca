"""Saved on eight devices, gone on from on others: the state bit for bit, the same batches, the same curve."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.parallel import make_mesh
from affinage.training import TrainJob, train
from affinage.training.program import Program
from affinage.training.state import TrainState

SAVED, STEPS = 4, 24
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


def job(folder: Path, mesh: dict[str, int]) -> TrainJob:
    settings = tiny.settings(STEPS, checkpoint={"every_steps": SAVED, "keep_last": 99}, validate_every=STEPS)
    return TrainJob(
        graph=tiny.graph(dropout=0.1, layers=1),
        settings=settings,
        mesh=mesh,
        seed=1,
        feed=tiny.RandomFeed(),
        folder=folder,
    )


def losses(folder: Path) -> np.ndarray:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if line["step"] > SAVED])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    train(job(folder, EIGHT))
    return folder


@pytest.mark.parametrize("mesh", [{"data": 1}, {"fsdp": 2}, {"tensor": 4}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_a_run_goes_on_where_there_are_other_devices(undisturbed: Path, tmp_path: Path, mesh: dict[str, int]):
    shutil.copytree(undisturbed / "checkpoints" / str(SAVED), tmp_path / "checkpoints" / str(SAVED))
    here = job(tmp_path, mesh)
    program = Program(here, make_mesh(mesh, jax.devices()), here.feed.batch(0))

    store = CheckpointStore(tmp_path / "checkpoints")
    state = TrainState(**store.restore(SAVED, program.abstract.named()))
    assert all(leaf.sharding == like.sharding for leaf, like in zip(*map(jax.tree.leaves, (state, program.abstract))))
    written = CheckpointStore(undisturbed / "checkpoints").restore(SAVED, dict.fromkeys(state.named()))
    for a, b in zip(jax.tree.leaves(state.named()), jax.tree.leaves(written), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    for step in (SAVED, SAVED + 1):
        for name, array in program.put(here.feed.batch(step)).items():
            assert np.asarray(array).tobytes() == here.feed.batch(step)[name].tobytes()

    assert train(here)["resumed_at"] == [SAVED]
    np.testing.assert_allclose(losses(tmp_path), losses(undisturbed), rtol=1e-5)

"""A model whose last checkpoint is not what was written is refused, and none from before takes its place unsaid."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore
from affinage.errors import UserError
from affinage.parallel import make_mesh
from affinage.stages.initial import MODEL, trained_params
from affinage.stages.store import MANIFEST

HERE = NamedSharding(make_mesh({"data": 1}, jax.devices()[:1]), PartitionSpec())
ABSTRACT = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=HERE)}


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """One of two steps, finished."""
    (tmp_path / MODEL).write_text("{}")
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        store.save(step, {"params": {"w": jnp.full(4, float(step))}}, {})
    store.wait()
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 2}))
    (tmp_path / MANIFEST).write_text("{}")
    return tmp_path


def weights(training: Path, step: int | None = None) -> float:
    return float(trained_params(training, None, step, ABSTRACT)["w"][0])  # type: ignore[arg-type]


def test_the_last_step_is_the_model(training: Path):
    assert weights(training) == 2
    assert weights(training, 1) == 1


def test_a_finished_training_without_its_last_step_is_no_model(training: Path):
    shutil.rmtree(training / "checkpoints" / "2")
    with pytest.raises(UserError, match="step 2 is damaged") as told:
        weights(training)
    assert "@1" in told.value.fix
    assert weights(training, 1) == 1


def test_one_that_goes_on_is_what_it_has_saved_last(training: Path):
    (training / MANIFEST).unlink()
    (training / "checkpoints" / "2" / "commit_success.txt").unlink()
    assert weights(training) == 1

"""The moving average of a training, and the mean of its last checkpoints, are models by name."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore
from affinage.errors import UserError
from affinage.parallel import make_mesh
from affinage.pipeline.models import MODEL, resolve, results_folder
from affinage.pipeline.opening import trained_params

HERE = NamedSharding(make_mesh({"data": 1}, jax.devices()), PartitionSpec())
ABSTRACT = {"w": jax.ShapeDtypeStruct((2,), "bfloat16", sharding=HERE)}


@pytest.fixture
def training(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "pretrain"
    store = CheckpointStore(folder / "checkpoints", keep_last=3)
    for step in (1, 2, 3, 4):
        params = {"w": jnp.full(2, step, jnp.bfloat16)}
        store.save(step, {"params": params, "ema_params": {"w": jnp.full(2, step / 8)}}, {})
    store.wait()
    (folder / MODEL).write_text("{}")
    return folder


def opened(name: str, runs: Path) -> Any:
    target = resolve(name, runs)
    return trained_params(target.path, None, target.step, ABSTRACT)["w"]


@pytest.mark.parametrize(
    ("name", "expected"), [("@ema", 0.5), ("@mean:1", 4.0), ("@mean:3", 3.0), ("@2", 2.0), ("", 4.0)]
)
def test_a_name_stands_for_the_average(training: Path, name: str, expected: float):
    found = opened(f"run/pretrain{name}", training.parents[1])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


def test_its_results_are_kept_apart_from_those_of_the_checkpoint(training: Path):
    runs = training.parents[1]
    names = [f"run/pretrain{name}" for name in ("@4", "@ema", "@mean:1", "@mean:2")]
    assert len({results_folder(resolve(name, runs), runs) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["@mean:4", "@mean:0", "@average", "@ema"])
def test_what_is_not_there_is_refused_with_a_fix(training: Path, name: str):
    store = CheckpointStore(training / "checkpoints")
    store.save(9, {"params": {"w": jnp.ones(2)}}, {})  # without an average
    store.wait()
    with pytest.raises(UserError) as refused:
        opened(f"run/pretrain{name}", training.parents[1])
    assert refused.value.fix

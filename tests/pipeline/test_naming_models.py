"""What a user may call a model, what is told if there is none, and which of its checkpoints it is."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint import CheckpointStore
from affinage.parallel.sharding import make_mesh
from affinage.pipeline.models import MODEL, is_chat, locate, made_from, resolve, results_folder
from affinage.pipeline.opening import open_model, trained_params
from affinage.pipeline.store import MANIFEST
from run_affinage import refused


@pytest.fixture
def runs(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, and a run `base` of its pretraining only, below the working directory."""
    monkeypatch.chdir(own_runs.parent)
    (own_runs / "base").mkdir()
    (own_runs / "base/pretrain").symlink_to((own_runs / "tiny/pretrain").resolve())
    (own_runs / "base/recipe.json").write_bytes((own_runs / "tiny/recipe.json").read_bytes())
    return own_runs


def test_names(runs: Path):
    for spec, stage, step in (
        ("tiny", "dpo", None), ("runs/tiny", "dpo", None), ("runs/tiny/pretrain", "pretrain", None),
        ("tiny/sft@4", "sft", 4), ("base", "pretrain", None), ("base@15", "pretrain", 15),
    ):  # fmt: skip
        model = locate(resolve(spec, runs), runs)
        folder = model.path
        assert (folder.name.split("-")[0], model.step) == (stage, step) and folder.parent == runs / "store", spec
        assert is_chat(folder) == (stage != "pretrain")
        for step_before in ("train-tokenizer", "synthesize"):
            assert made_from(folder, step_before) == (runs / "tiny" / step_before).resolve()
        assert made_from(folder, "export") is None


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        *[("three", "tiny"), ("tiny@last", "tiny"), ("runs", "runs"), ("folder", "folder")],
        *[
            ("runs/begun", "affinage run"),
            ("begun/sft", "affinage run begun --until sft"),
            ("tiny/sfft", "has no `sfft`"),
        ],
        ("runs/begun/sft", "affinage run runs/begun --until sft"),
    ],
)
def test_without_such_a_model_those_that_are_there_are_named(runs: Path, spec: str, named: str):
    for name in ("runs/begun/recipe.json", "folder/x.txt"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("{}")
    error = refused(lambda: locate(resolve(spec, Path("runs")), Path("runs")))
    assert named in str(error) and error.fix


def test_a_run_and_a_folder_of_one_name(runs: Path):
    Path("tiny").mkdir()
    assert locate(resolve("tiny", runs), runs).path.name.startswith("dpo-"), "a folder without a model is not meant"
    Path("tiny/config.json").write_text("{}")
    for name in ("tiny", "./tiny"):
        assert locate(resolve(name, runs), runs).path == Path("tiny").resolve()
    refused(lambda: locate(resolve("tiny@3", runs), runs), match="no checkpoints")
    assert locate(resolve("runs/tiny", runs), runs).path.name.startswith("dpo-")


def test_a_finished_training_without_its_last_step_is_no_model(runs: Path):
    def scale(spec: str) -> np.ndarray:
        return np.asarray(open_model(spec, runs).params["norm"]["scale"])

    sft, earlier = (runs / "tiny/sft").resolve(), scale("tiny/sft@4")
    assert not np.array_equal(scale("tiny/sft"), earlier)
    (sft / "checkpoints/5/commit_success.txt").unlink()
    assert "MODEL@STEP" in refused(scale, "tiny/sft", match="checkpoints/5").fix
    np.testing.assert_array_equal(scale("tiny/sft@4"), earlier)
    (sft / MANIFEST).unlink()  # one that goes on is what it has saved last
    np.testing.assert_array_equal(scale("tiny/sft"), earlier)


# ---- the moving average of a training, and the mean of its last checkpoints


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
    assert refused(opened, f"run/pretrain{name}", training.parents[1]).fix

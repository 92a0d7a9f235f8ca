"""What a user may call a model, what is told if there is none, and which of its checkpoints it is."""

from pathlib import Path

import numpy as np
import pytest

from affinage.errors import UserError
from affinage.pipeline.models import is_chat, locate, made_from, resolve
from affinage.pipeline.opening import open_model
from affinage.pipeline.store import MANIFEST


@pytest.fixture
def runs(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, and a run `base` of its pretraining only, below the working directory."""
    monkeypatch.chdir(own_runs.parent)
    (own_runs / "base").mkdir()
    (own_runs / "base/pretrain").symlink_to((own_runs / "tiny/pretrain").resolve())
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
    [("three", "tiny"), ("tiny@last", "tiny"), ("runs", "runs"), ("folder", "folder"), ("runs/begun", "affinage run")],
)
def test_without_such_a_model_those_that_are_there_are_named(runs: Path, spec: str, named: str):
    for name in ("runs/begun/recipe.json", "folder/x.txt"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("{}")
    with pytest.raises(UserError) as refused:
        locate(resolve(spec, Path("runs")), Path("runs"))
    assert named in str(refused.value) and refused.value.fix


def test_a_run_and_a_folder_of_one_name(runs: Path):
    Path("tiny").mkdir()
    assert locate(resolve("tiny", runs), runs).path.name.startswith("dpo-"), "a folder without a model is not meant"
    Path("tiny/config.json").write_text("{}")
    for name in ("tiny", "./tiny"):
        assert locate(resolve(name, runs), runs).path == Path("tiny").resolve()
    with pytest.raises(UserError, match="no checkpoints"):
        locate(resolve("tiny@3", runs), runs)
    assert locate(resolve("runs/tiny", runs), runs).path.name.startswith("dpo-")


def test_a_finished_training_without_its_last_step_is_no_model(runs: Path):
    def scale(spec: str) -> np.ndarray:
        return np.asarray(open_model(spec, runs).params["norm"]["scale"])

    sft, earlier = (runs / "tiny/sft").resolve(), scale("tiny/sft@4")
    assert not np.array_equal(scale("tiny/sft"), earlier)
    (sft / "checkpoints/5/commit_success.txt").unlink()
    with pytest.raises(UserError, match="checkpoint 5") as told:
        scale("tiny/sft")
    assert "@4" in told.value.fix
    np.testing.assert_array_equal(scale("tiny/sft@4"), earlier)
    (sft / MANIFEST).unlink()  # one that goes on is what it has saved last
    np.testing.assert_array_equal(scale("tiny/sft"), earlier)

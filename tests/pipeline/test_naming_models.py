"""What a user may call a model, what is told if there is none, and which of its checkpoints it is."""

from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.pipeline.models import is_chat, locate, made_from, resolve


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
        folder, found = locate(resolve(spec, runs), runs)
        assert (folder.name.split("-")[0], found) == (stage, step) and folder.parent == runs / "store", spec
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

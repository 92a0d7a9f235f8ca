"""A recipe that extends the run of another: what is trained anew, and what stays as it is."""

import json
from pathlib import Path

import pytest

from affinage.cli import main
from affinage.errors import UserError
from affinage.recipe.load import load_recipe
from affinage.stages.road import road_of

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extends") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        _train("--set", "pretrain.steps=10", "--set", "pretrain.schedule.name=constant")
    return folder


def _train(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, *words])
    assert ended.value.code == 0


def _longer(*words: str) -> list[str]:
    return ["name=longer", "pretrain.extends=runs/tiny", "pretrain.steps=14", "pretrain.schedule.name=constant", *words]


def test_an_extension_goes_on_and_the_run_it_extends_stays(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs.parent)
    old = (runs / "tiny" / "pretrain").resolve()
    manifest = (old / "manifest.json").read_bytes()
    _train(*[word for override in _longer() for word in ("--set", override)])
    assert (runs / "tiny" / "pretrain").resolve() == old and (old / "manifest.json").read_bytes() == manifest
    summary = json.loads((runs / "longer" / "pretrain" / "summary.json").read_text())
    assert summary["steps"] == 14 and summary["resumed_at"] == [10]
    lines = [json.loads(line) for line in (runs / "longer" / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 10, 14]
    assert (runs / "longer" / "rows").resolve() == (runs / "tiny" / "rows").resolve()


def test_code_of_ones_own_that_has_changed_is_refused_by_its_name(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(runs.parent)
    plugin = runs.parent / "mine.py"
    plugin.write_text("FACTOR = 1\n")
    words = [word for override in _longer(f"plugins=['{plugin}']") for word in ("--set", override)]
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, *words])
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and f"code.plugin {plugin}: (not there) -> " in told
    assert "pretrain.checkpoint.accept_changes=[code" in told
    _train(*words, "--set", "pretrain.checkpoint.accept_changes=[code]")


def test_the_key_of_an_extension_has_the_checkpoint_and_not_where_it_is(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs.parent)

    def sources(*words: str) -> dict:
        road = road_of(load_recipe(TINY, _longer(*words)))
        return next((stage.sources, stage.settings) for stage in road if stage.name == "pretrain")

    assert sources() == sources("pretrain.extends=runs/tiny/pretrain") == sources("pretrain.extends=runs/tiny@10")
    assert sources() != sources("pretrain.extends=runs/tiny/pretrain@5")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("name=tiny", "is this run itself"),
        ("pretrain.extends=runs/tiny@7", "there is no checkpoint `runs/tiny@7`, of steps 5, 10"),
        ("pretrain.extends=runs/nowhere", "and none at all"),
    ],
)
def test_what_cannot_be_extended_is_told_before_anything_runs(
    runs: Path, monkeypatch: pytest.MonkeyPatch, override: str, said: str
):
    monkeypatch.chdir(runs.parent)
    with pytest.raises(UserError, match=said) as refused:
        road_of(load_recipe(TINY, _longer(override)))
    assert "--set pretrain.extends" in str(refused.value)


def test_a_training_that_is_refused_leaves_the_run_as_it_was(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(runs.parent)

    def refused() -> set[str]:
        words = _longer("name=refused", "pretrain.optimizer.b1=0.8")
        with pytest.raises(SystemExit) as ended:
            main(["train", TINY, *[word for override in words for word in ("--set", override)]])
        assert ended.value.code == 2 and "optimizer.b1: 0.9 -> 0.8" in capsys.readouterr().err
        return {entry.name for entry in (runs / "store").iterdir()}

    before = {entry.name for entry in (runs / "store").iterdir()}
    assert refused() == before and not (runs / "refused" / "pretrain").is_symlink()
    _train("--set", "name=refused", "--set", "pretrain.steps=2", "--set", "pretrain.schedule.name=constant")
    made = (runs / "refused" / "pretrain").resolve()
    before = {entry.name for entry in (runs / "store").iterdir()}
    assert refused() == before and (runs / "refused" / "pretrain").resolve() == made

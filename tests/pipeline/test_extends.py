"""A recipe that extends the run of another: what is trained anew, and what stays as it is."""

import json
from pathlib import Path

import pytest

import tiny_run
from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.pipeline.build import build_steps
from run_affinage import run

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.fixture(scope="module")
def runs(tiny_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a training of ten steps at a constant rate, which an extension does not change."""
    folder = tiny_run.copied(tiny_runs, tmp_path_factory.mktemp("extends") / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        _train("name=short", "pretrain.steps=10", "pretrain.schedule.name=constant")
    return folder


def _train(*settings: str) -> None:
    run("train", TINY, settings=settings)


def _longer(*words: str) -> list[str]:
    own = ["name=longer", "pretrain.resume_from=runs/short", "pretrain.steps=14", "pretrain.schedule.name=constant"]
    return [*own, *words]


def test_an_extension_goes_on_and_the_run_it_extends_stays(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs.parent)
    old = (runs / "short" / "pretrain").resolve()
    manifest = (old / "manifest.json").read_bytes()
    _train(*_longer())
    assert (runs / "short" / "pretrain").resolve() == old and (old / "manifest.json").read_bytes() == manifest
    summary = json.loads((runs / "longer" / "pretrain" / "summary.json").read_text())
    assert summary["steps"] == 14 and summary["resumed_at"] == [10]
    lines = [json.loads(line) for line in (runs / "longer" / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 10, 14]
    assert (runs / "longer" / "tokenize").resolve() == (runs / "short" / "tokenize").resolve()


def test_the_key_of_an_extension_has_the_checkpoint_and_not_where_it_is(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs.parent)

    def sources(*words: str) -> dict:
        road = build_steps(load_recipe(TINY, _longer(*words)))
        return next((stage.sources, stage.config) for stage in road if stage.name == "pretrain")

    same = [sources(f"pretrain.resume_from=runs/short{place}") for place in ("/pretrain", "@10")]
    assert [sources()] * 2 == same and sources() != sources("pretrain.resume_from=runs/short/pretrain@5")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("name=short", "this run itself"),
        ("pretrain.resume_from=runs/short@7", "@5, @10"),
        ("pretrain.resume_from=runs/no", "runs/NAME/pretrain@STEP"),
    ],
    ids=["itself", "step", "run"],
)
def test_what_cannot_be_extended_is_refused_before_anything_runs(runs, monkeypatch, override: str, named: str):
    monkeypatch.chdir(runs.parent)
    with pytest.raises(UserError) as refused:
        build_steps(load_recipe(TINY, _longer(override)))
    assert named in str(refused.value) and "--set pretrain.resume_from" in refused.value.where and refused.value.fix

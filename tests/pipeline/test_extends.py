"""A recipe that extends the run of another: what is trained anew, and what stays as it is."""

import json
from pathlib import Path

import pytest

import tiny_run
from affinage.config.load import load_recipe
from affinage.pipeline.build import build_steps
from affinage.results import read_json_lines
from run_affinage import refused, run

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
CONSTANT = "pretrain.schedule.name=constant"  # a longer run has the same rates
LONGER = ["name=longer", "pretrain.resume_from=runs/short/pretrain", "pretrain.steps=14", CONSTANT]


def test_an_extension_continues_a_run_which_stays_as_it_is(
    tiny_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_run.copied(tiny_runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    run("train", TINY, settings=["name=short", "pretrain.steps=10", CONSTANT])
    old = Path("runs/short/pretrain").resolve()
    manifest = (old / "manifest.json").read_bytes()
    run("train", TINY, settings=LONGER)
    assert Path("runs/short/pretrain").resolve() == old and (old / "manifest.json").read_bytes() == manifest
    summary = json.loads(Path("runs/longer/pretrain/summary.json").read_text())
    assert summary["steps"] == 14 and summary["resumed_at"] == [10]
    lines = read_json_lines(Path("runs/longer/pretrain/metrics.jsonl"))
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 10, 14]
    assert Path("runs/longer/tokenize").resolve() == Path("runs/short/tokenize").resolve()

    def sources(*words: str) -> dict[str, str]:
        steps = build_steps(load_recipe(TINY, [*LONGER, *words]))
        return next(step.sources for step in steps if step.name == "pretrain")

    # The key has the checkpoint, and not where it is.
    Path("copy").symlink_to("runs/short")
    assert sources() == sources("pretrain.resume_from=copy/pretrain@10")
    assert sources() != sources("pretrain.resume_from=runs/short/pretrain@5")
    for override, named in (
        ("name=short", "this run itself"),
        ("pretrain.resume_from=runs/short/pretrain@7", "@5, @10"),
        ("pretrain.resume_from=runs/no", "runs/NAME/pretrain"),
    ):
        mistake = refused(sources, override, match=named)
        assert mistake.where == "--set pretrain.resume_from" and mistake.fix

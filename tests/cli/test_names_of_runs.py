"""A word that is both a run and a recipe that comes along is the run, as it was made."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from affinage.cli.options import is_recipe
from affinage.pipeline.models import open_model

RUN = Path("runs/quickstart")


@pytest.fixture(autouse=True)
def named_as_a_recipe(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_runs / "tiny").rename(own_runs / "quickstart")
    monkeypatch.chdir(own_runs.parent)


def test_a_recipe_is_meant_by_a_file_or_where_no_run_is_called_so(tmp_path: Path, capsys):
    assert is_recipe("quickstart.yaml", Path("runs")) and is_recipe("quickstart", tmp_path / "other")
    assert not capsys.readouterr().err
    assert not is_recipe("quickstart", Path("runs"))
    assert "runs/quickstart" in capsys.readouterr().err


def test_export_writes_the_model_of_the_run_and_runs_nothing(affinage):
    stages = sorted(Path("runs/store").iterdir())
    assert affinage("export", "quickstart/pretrain", "--to", "out")[0] == 0
    weights = open_model("quickstart/pretrain", Path("runs")).params["norm"]["scale"]
    np.testing.assert_array_equal(load_file("out/model.safetensors")["model.norm.weight"], weights)
    assert sorted(Path("runs/store").iterdir()) == stages


@pytest.mark.full
def test_what_the_run_exported_itself_is_verified_where_it_is(affinage):
    status, out, said = affinage("export", "quickstart", "--verify")
    assert status == 0 and "runs/quickstart/export/model" in out, said
    assert "transformers computes the same: logits of" in out


def test_what_the_run_exported_itself_is_not_written_again(affinage):
    assert "runs/quickstart/export/model" in affinage("export", "quickstart")[1]
    for more in (["--dtype", "bfloat16"], ["--set", "export.dtype=bfloat16"]):
        assert affinage("export", "quickstart", *more)[0] == 2, "it is not what the run wrote"
    (RUN / "export").unlink()
    status, _, said = affinage("export", "quickstart")
    assert status == 2 and "--to" in said


def test_report_is_of_the_run_as_it_is(affinage):
    before = json.loads((RUN / "recipe.json").read_text())
    (RUN / "report.html").unlink()
    assert affinage("report", "quickstart")[0] == 0
    assert (RUN / "report.html").is_file() and json.loads((RUN / "recipe.json").read_text()) == before
    assert affinage("report", "quickstart", "--set", "report.language=fr")[0] == 2

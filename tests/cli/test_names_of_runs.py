"""A word that is both a run and a recipe that comes along is the run, as it was made."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from affinage.cli.options import is_recipe
from affinage.cli.program import main
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from affinage.recipe.load import load_recipe
from affinage.stages.imports import import_model
from affinage.stages.models import open_model
from affinage.stages.store import Request, Store, link, write_json
from tiny_models import tiny_llama

TINY = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
FACTS = CardFacts(licence="apache-2.0")
RUN = Path("runs/quickstart")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    export(tiny_llama(), folder / "hub", facts=FACTS)
    import_model(folder / "hub", folder / "model", "tiny")
    return folder / "model"


def put(stage: str, seed: int, **inputs: str) -> tuple[Store, Request]:
    store, request = Store(Path("runs/store")), Request(stage, {"seed": seed}, inputs, {}, {})
    link(RUN / stage, store.begin(request, anew=True))
    return store, request


@pytest.fixture
def trained(imported, tmp_path, monkeypatch):
    """The key of the pretraining in a run that is called as a recipe that comes along."""
    monkeypatch.chdir(tmp_path)
    store, request = put("pretrain", 1)
    shutil.copytree(imported, store.path(request), dirs_exist_ok=True)
    settings = load_recipe(TINY, ["name=quickstart", "evaluate.tasks=[no/such.yaml]"]).recipe
    write_json(RUN / "recipe.json", settings.model_dump(mode="json"))
    return request.key


def affinage(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def test_a_recipe_is_meant_by_a_file_or_where_no_run_is_called_so(trained, tmp_path, capsys):
    assert is_recipe("quickstart.yaml", Path("runs")) and is_recipe("quickstart", tmp_path / "other")
    assert not capsys.readouterr().err
    assert not is_recipe("quickstart", Path("runs"))
    assert "`quickstart` is runs/quickstart, as it was made" in capsys.readouterr().err


def test_export_writes_the_model_of_the_run_and_runs_nothing(trained, capsys):
    linked = os.readlink(RUN / "pretrain")
    assert affinage("export", "quickstart") == 2 and "where to?" in capsys.readouterr().err
    assert affinage("export", "quickstart", "--to", "out") == 0
    np.testing.assert_array_equal(
        load_file("out/model.safetensors")["model.norm.weight"], tiny_llama().params["norm"]["scale"]
    )
    assert os.readlink(RUN / "pretrain") == linked and len(list(Path("runs/store").iterdir())) == 1


def test_what_the_run_exported_itself_is_verified_where_it_is(trained, capsys):
    store, request = put("export", 1, pretrain=trained)
    export(open_model("quickstart", Path("runs")), store.path(request) / "model", facts=FACTS)
    store.finish(request, {}, started=0, clock=0)
    assert affinage("export", "quickstart", "--verify") == 0
    said = capsys.readouterr().out
    assert "The model is in runs/quickstart/export/model." in said
    assert "transformers computes the same: logits of" in said and "tokens in 3 texts at most" in said
    for more in (["--dtype", "bfloat16"], ["--set", "export.dtype=bfloat16"]):
        assert affinage("export", "quickstart", *more) == 2, "it is not what the run wrote"
    put("export", 2, pretrain="of another model")
    assert affinage("export", "quickstart", "--verify") == 2


def test_eval_takes_the_tasks_that_the_run_has(trained, capsys):
    assert affinage("eval", "quickstart") == 2
    assert "no/such.yaml" in capsys.readouterr().err


def test_report_is_of_the_run_as_it_is(trained):
    before = json.loads((RUN / "recipe.json").read_text())
    assert affinage("report", "quickstart") == 0
    assert (RUN / "report.html").is_file() and json.loads((RUN / "recipe.json").read_text()) == before
    assert affinage("report", "quickstart", "--set", "report.language=fr") == 2

"""`recipes`, `new`, `explain` and `schema`, as a user types them."""

import json

import pytest
from typer.testing import CliRunner

from affinage.cli.program import app
from affinage.errors import UserError
from affinage.recipe.load import load_recipe


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


def test_the_recipes_that_come_along_are_listed_with_what_they_are():
    assert "quickstart" in run("recipes")
    listed = {recipe["name"]: recipe for recipe in json.loads(run("recipes", "--json"))}
    assert all(recipe["description"] and recipe["head"] for recipe in listed.values())


def test_a_new_recipe_runs_as_the_one_it_begins_with_and_overwrites_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("new", "mine", "--like", "novels")
    mine, novels = load_recipe("mine.yaml").recipe, load_recipe("novels").recipe
    assert mine == novels.model_copy(update={"name": "mine", "description": ""})
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["properties"]
    with pytest.raises(UserError, match="is there already"):
        run("new", "mine")
    with pytest.raises(UserError, match="cannot be called"):
        run("new", "../mine")
    with pytest.raises(UserError, match="no recipe named"):
        run("new", "other", "--like", "novel")
    assert not (tmp_path / "other.yaml").exists()


def test_a_run_is_shown_as_it_was_made(tmp_path, monkeypatch, affinage):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    made = load_recipe("quickstart", ["name=mine", "pretrain.steps=7", "mesh.data=2"]).recipe.model_dump(mode="json")
    (tmp_path / "runs" / "mine" / "recipe.json").write_text(json.dumps(made))

    for run in ("mine", "runs/mine"):
        status, out, _ = affinage("explain", run, "pretrain.steps")
        assert status == 0 and "steps: 7 " in out and "runs/mine/recipe.json:" in out
        assert affinage("graph", run)[1] == affinage("graph", "quickstart")[1]
        status, out, _ = affinage("plan", run, "--on", "v4-8", "--set", "mesh.data=4", "--json")
        assert status == 0 and json.loads(out)["recipe"] == "mine"
    status, _, err = affinage("plan", "mime")
    assert status == 2 and "there is no recipe and no run named `mime`" in err and "Did you mean `mine`?" in err
    assert "Runs in runs: mine. Recipes" in affinage("graph", "xyzzy")[2]


def test_explain_says_what_differs_where_it_is_from_and_what_it_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base: quickstart\nname: a\npretrain: {log_every: 7}\n")
    changed = run("explain", "a.yaml", "--changes")
    assert [line.split()[0] for line in changed.splitlines()] == ["name:", "pretrain:", "log_every:"]
    assert "a.yaml:3, was " in changed
    assert run("explain", "a.yaml", "pretrain.log_every").endswith(": steps\n")
    (row,) = json.loads(run("explain", "a.yaml", "pretrain.log_every", "--set", "pretrain.log_every=9", "--json"))
    assert row["value"] == 9 and row["origin"] == "--set pretrain.log_every"
    assert "is not set" in run("explain", "a.yaml", "pretrain.checkpoint.keep_every")
    with pytest.raises(UserError, match=r"`pretrain.logevery` is not a setting") as wrong:
        run("explain", "a.yaml", "pretrain.logevery")
    assert "pretrain.log_every" in wrong.value.fix


def test_the_schema_is_json():
    assert json.loads(run("schema"))["$schema"].startswith("https://json-schema.org/")

"""Verbs about recipes: `recipes`, `new`, `config show`, `graph`, and what the heads of packaged recipes promise."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from affinage.config.load import load_recipe, packaged_recipes
from affinage.config.yaml import parse
from affinage.durations import duration

RECIPES = packaged_recipes()
FACTS = ("Run", "Hardware", "Time", "Cost", "Expect")
PLANNED = re.compile(r"planned: (affinage plan \S+ --on \S+(?: --set \S+)*)")
SOURCES = ("measured", "planned", "published", "counted", "python benchmarks/", "none")  # where a number comes from


def facts(file: Path) -> dict[str, list[str]]:
    """The lines `Name: text` in the comment at the top of a recipe, each with the indented lines after it."""
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))
    found = re.findall(rf"^# ({'|'.join(FACTS)}): +(.*(?:\n#   .*)*)", head, re.MULTILINE)
    return {name: [line.lstrip("# ") for line in text.splitlines()] for name, text in found}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_dry_runs_and_its_head_has_its_command_hardware_time_and_cost(name: str, answer, tmp_path):
    recipe = load_recipe(name).recipe
    words = ["run", name, "--dry-run", "--runs", str(tmp_path / "runs")]  # of text that is here
    text = [("data", recipe.data and recipe.data.sources), ("sft", recipe.sft), ("dpo", recipe.dpo)]
    words += [word for key, there in text if there for word in ("--set", f"{key}.sources=[pocket-world]")]
    if recipe.evaluate:
        words += ["--set", "evaluate.tasks=[pocket-world]", "--set", "evaluate.data_dir=null"]
    assert any(row["runs"] for row in answer(*words))
    told = facts(RECIPES[name])
    assert set(told) == set(FACTS) and all("".join(lines).strip() for lines in told.values())
    assert all(any(source in " ".join(told[fact]) for source in SOURCES) for fact in ("Time", "Cost", "Expect"))
    commands = [shlex.split(line) for line in told["Run"]]
    assert any(name in words for words in commands)
    assert {words[0] for words in commands} <= {"affinage", "python"}


def text_of(name: str) -> str:
    return " ".join(" ".join(lines) for lines in facts(RECIPES[name]).values())


CLAIMS = [(name, command) for name in RECIPES for command in dict.fromkeys(PLANNED.findall(text_of(name)))]


@pytest.mark.parametrize(
    ("name", "command"),
    [pytest.param(*claim, marks=[] if claim[0] == "gpt2-124m" else pytest.mark.full) for claim in CLAIMS],
)
def test_what_is_said_to_be_planned_is_what_the_planner_says(name: str, command: str, answer):
    plan = answer(*shlex.split(command)[1:])
    assert duration(plan["seconds"]) in text_of(name)
    assert plan["cost"] is None or f"${plan['cost']:,.0f}" in text_of(name)


def test_values_in_effect_are_shown_with_where_they_come_from(tmp_path: Path, monkeypatch, affinage, answer):
    monkeypatch.chdir(tmp_path)
    text = "base: quickstart\nname: a\npretrain:\n  log_every: 7\nsft: null\ndpo: null\ndata: {dedup: null}\n"
    (tmp_path / "a.yaml").write_text(text)
    words = ("config", "show", "a.yaml", "--set", "pretrain.batch_size=3")
    rows = {row["key"]: (row["value"], row["origin"]) for row in answer(*words)}
    assert rows["pretrain.log_every"] == (7, "a.yaml:4")
    assert rows["pretrain.batch_size"] == (3, "--set pretrain.batch_size")
    assert rows["pretrain.optimizer.eps"][1] == "default" and "quickstart.yaml:" in rows["tokenizer.vocab_size"][1]
    # What a base had and the recipe takes away is not in effect.
    assert not any(key.startswith(("sft.", "dpo.")) for key in rows) and rows["data.dedup"] == (None, "a.yaml:7")
    for key, written in (("pretrain.log_every", ["7", "a.yaml:4"]), ("pretrain.mixture", ["null", "default"])):
        assert affinage("config", "show", "a.yaml", key)[1].split()[3:] == [key, *written]
    status, _, said = affinage("config", "show", "a.yaml", "pretrain.logevery")
    assert status == 2 and "pretrain.log_every" in said
    # What short forms stand for has the place where they are written.
    text = "base: quickstart\nname: b\nruntime: {trackers: [tensorboard, wandb]}\ndata: {sources: [my_text/]}\n"
    (tmp_path / "b.yaml").write_text(f"{text}pretrain: {{tokens: 2.0e+6,\n  mixture: {{en: 1}}}}\n")
    rows = {row["key"]: (row["value"], row["origin"]) for row in answer("config", "show", "b.yaml")}
    assert rows["runtime.trackers.tensorboard"] == rows["runtime.trackers.wandb"] == ({}, "b.yaml:3")
    assert rows["pretrain.mixture.0.weights.en"] == (1.0, "b.yaml:6") and rows["pretrain.tokens"] == (2e6, "b.yaml:5")
    assert rows["pretrain.steps"] == (1954, "b.yaml:5") and rows["data.sources.0.path"] == ("my_text/", "b.yaml:4")


def test_the_schema_takes_every_recipe_and_marks_mistakes(affinage):
    schema = json.loads(affinage("config", "schema")[1])
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert not [name for name, path in RECIPES.items() if [*validator.iter_errors(parse(path.read_text(), name)[0])]]
    assert schema["$defs"]["PretrainSettings"]["properties"]["eval_every"]["description"]
    wrong = "data: {filters: {min_characters: -1}}", "mesh: {rows: 2}", "pretrain: {stepz: 3}", "pretrain: {steps: no}"
    assert all(list(validator.iter_errors(parse(text, "text")[0])) for text in wrong)

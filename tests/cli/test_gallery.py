"""What the recipes that come along say of themselves is complete, and true where it can be computed."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from affinage.cli.program import app
from affinage.durations import duration
from affinage.recipe.gallery import FACTS, facts
from affinage.recipe.layers import packaged_recipes

RECIPES = packaged_recipes()
PLANNED = re.compile(r"planned: (affinage plan \S+ --on \S+(?: --set \S+)*)")


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", RECIPES)
def test_a_head_says_the_command_the_hardware_the_time_the_cost_and_what_to_expect(name: str):
    said = facts(RECIPES[name])
    assert set(said) == set(FACTS) and all("".join(lines).strip() for lines in said.values())
    assert any(name in shlex.split(command) for command in said["Run"])
    # A number comes from somewhere: it was measured, planned, published or follows from the shapes.
    for fact in ("Time", "Cost", "Expect"):
        text = " ".join(said[fact])
        sources = ("measured", "planned", "published", "counted", "python benchmarks/", "none")
        assert any(word in text for word in sources), f"{fact}: {text}"


@pytest.mark.parametrize("name", RECIPES)
def test_its_commands_are_of_verbs_and_recipes_that_there_are(name: str):
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    words = [shlex.split(line) for line in facts(RECIPES[name])["Run"]]
    assert {line[1] for line in words if line[0] == "affinage"} <= known
    assert {line[0] for line in words} <= {"affinage", "python"}


def test_what_is_said_to_be_planned_is_what_the_planner_says():
    found = {(name, command) for name, path in RECIPES.items() for command in PLANNED.findall(text_of(path))}
    assert len(found) > 15
    for name, command in sorted(found):
        plan = json.loads(run(*shlex.split(command)[1:], "--json"))
        text = text_of(RECIPES[name])
        assert duration(plan["seconds"]) in text, (name, duration(plan["seconds"]))
        if plan["cost"] is not None:
            assert f"${plan['cost']:,.0f}" in text, (name, f"${plan['cost']:,.0f}")


def text_of(path) -> str:
    return " ".join(" ".join(lines) for lines in facts(path).values())


def test_they_are_listed_with_hardware_time_and_cost():
    listed = {recipe["name"]: recipe for recipe in json.loads(run("recipes", "--json"))}
    assert set(listed) == set(RECIPES)
    quickstart = listed["quickstart"]
    assert quickstart["run"][0] == "affinage run quickstart"
    assert all(quickstart[fact] for fact in ("hardware", "time", "cost", "expect", "description", "head"))
    shown = " ".join(run("recipes").split())
    assert f"{quickstart['description']} {quickstart['hardware']}, {quickstart['time']}" in shown
    assert "TPU v4-32, 14 h 02 min, planned, $723, planned" in shown

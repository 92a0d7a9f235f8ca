"""Verbs about recipes: `recipes`, `new`, `config show`, `graph`, and what the heads of packaged recipes promise."""

import json
import re
import shlex
from pathlib import Path

import pytest

from affinage.cli.config import FACTS, facts
from affinage.config.load import load_recipe, packaged_recipes
from affinage.durations import duration

RECIPES = packaged_recipes()
PLANNED = re.compile(r"planned: (affinage plan \S+ --on \S+(?: --set \S+)*)")
SOURCES = ("measured", "planned", "published", "counted", "python benchmarks/", "none")  # where a number comes from


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_dry_runs_and_its_head_has_its_command_hardware_time_and_cost(name: str, affinage, tmp_path):
    recipe = load_recipe(name).recipe
    words = ["run", name, "--dry-run", "--json", "--runs", str(tmp_path / "runs")]
    text = [("data", recipe.data and recipe.data.sources), ("sft", recipe.sft), ("dpo", recipe.dpo)]
    words += [word for key, there in text if there for word in ("--set", f"{key}.sources=[pocket-world]")]
    if recipe.evaluate:
        words += ["--set", "evaluate.tasks=[pocket-world]", "--set", "evaluate.data_dir=null"]
    status, out, said = affinage(*words)  # of text that is here: theirs is downloaded, or a user's
    assert status == 0 and any(row["runs"] for row in json.loads(out)), said
    told = facts(RECIPES[name])
    assert set(told) == set(FACTS) and all("".join(lines).strip() for lines in told.values())
    assert all(any(source in " ".join(told[fact]) for source in SOURCES) for fact in ("Time", "Cost", "Expect"))
    commands = [shlex.split(line) for line in told["Run"]]
    assert any(name in words for words in commands)
    assert {words[0] for words in commands} <= {"affinage", "python"}


def text_of(name: str) -> str:
    return " ".join(" ".join(lines) for lines in facts(RECIPES[name]).values())


CLAIMS = [(name, command) for name in RECIPES for command in dict.fromkeys(PLANNED.findall(text_of(name)))]
SMALLEST = ("gpt2-124m",)


@pytest.mark.parametrize(
    ("name", "command"),
    [pytest.param(*claim, marks=[] if claim[0] in SMALLEST else pytest.mark.full) for claim in CLAIMS],
)
def test_what_is_said_to_be_planned_is_what_the_planner_says(name: str, command: str, affinage):
    status, out, said = affinage(*shlex.split(command)[1:], "--json")
    assert status == 0, said
    plan = json.loads(out)
    assert duration(plan["seconds"]) in text_of(name)
    assert plan["cost"] is None or f"${plan['cost']:,.0f}" in text_of(name)


def test_they_are_listed_with_hardware_time_and_cost(affinage):
    listed = {recipe["name"]: recipe for recipe in json.loads(affinage("recipes", "--json")[1])}
    assert set(listed) == set(RECIPES) and len(CLAIMS) > 15
    quickstart = listed["quickstart"]
    assert quickstart["run"][0] == "affinage run quickstart"
    assert all(quickstart[fact] for fact in ("hardware", "time", "cost", "expect", "description", "head"))
    shown = " ".join(affinage("recipes")[1].split())
    assert f"{quickstart['description']} {quickstart['hardware']}, {quickstart['time']}" in shown


def test_a_new_recipe_runs_as_the_one_it_begins_with_and_overwrites_nothing(tmp_path: Path, monkeypatch, affinage):
    monkeypatch.chdir(tmp_path)
    assert affinage("new", "mine", "--like", "novels")[0] == 0
    mine, novels = load_recipe("mine.yaml").recipe, load_recipe("novels").recipe
    assert mine == novels.model_copy(update={"name": "mine", "description": ""})
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["properties"]
    for words, held in ((["mine"], "mine"), (["../mine"], "../mine"), (["other", "--like", "novel"], "`novels`")):
        status, _, said = affinage("new", *words)
        assert status == 2 and held in said
    assert not (tmp_path / "other.yaml").exists()


def test_a_run_is_shown_as_it_was_made(tmp_path: Path, monkeypatch, affinage):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    made = load_recipe("quickstart", ["name=mine", "pretrain.steps=7", "mesh.data=2"]).recipe.model_dump(mode="json")
    (tmp_path / "runs" / "mine" / "recipe.json").write_text(json.dumps(made))
    status, out, _ = affinage("config", "show", "mine", "pretrain.steps")
    assert status == 0 and "steps: 7 " in out and "runs/mine/recipe.json:" in out
    assert affinage("graph", "mine")[1] == affinage("graph", "quickstart")[1]
    status, _, said = affinage("plan", "mime")
    assert status == 2 and "`mine`" in said


def test_explain_says_what_differs_where_it_is_from_and_what_it_means(tmp_path: Path, monkeypatch, affinage):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base: quickstart\nname: a\npretrain: {log_every: 7}\n")
    changed = affinage("config", "show", "a.yaml", "--changes")[1]
    assert [line.split()[0] for line in changed.splitlines()] == ["name:", "pretrain:", "log_every:"]
    assert "a.yaml:3, was " in changed
    assert affinage("config", "show", "a.yaml", "pretrain.log_every")[1].endswith(
        ": Steps between two lines of the log.\n"
    )
    words = ("config", "show", "a.yaml", "pretrain.log_every", "--set", "pretrain.log_every=9", "--json")
    (row,) = json.loads(affinage(*words)[1])
    assert row["value"] == 9 and row["origin"] == "--set pretrain.log_every"
    status, _, said = affinage("config", "show", "a.yaml", "pretrain.logevery")
    assert status == 2 and "pretrain.log_every" in said


def test_whose_text_is_ones_own_is_told_what_is_still_the_bases(tmp_path: Path, affinage):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("Une phrase assez longue pour être un document. " * 20)
    own = ["run", "quickstart", "--dry-run", "--set", f"data.sources=[{tmp_path / 'texts'}]"]
    status, _, said = affinage(*own)
    assert status == 0 and "dpo.monitor" not in said
    assert all(setting in said for setting in ("sft.sources", "dpo.sources", "evaluate.tasks", "sft.monitor.tasks"))
    nothing_more = [word for key in ("sft", "dpo", "evaluate") for word in ("--set", f"{key}=null")]
    assert affinage(*own, *nothing_more)[::2] == (0, "")


def test_it_prints_what_a_model_costs(affinage):
    shown = affinage("graph", "quickstart")[1]
    told = json.loads(affinage("graph", "quickstart", "--json")[1])
    total, memory, parameters = told["nodes"][-1], told["memory"], told["parameters"]
    assert total["parameters"] == parameters["total"] == parameters["active"] == 1_426_304 and told["batch"] == 8
    assert total["training_flops"] < total["training_flops_all_pairs"]
    for words in ("transformer_block", "1,426,304", f"embedding {parameters['embedding']:,}", "dots "):
        assert words in shown
    assert memory["decoding_cache_bytes"] > 0 and min(memory["activation_bytes"].values()) > 0


def test_of_a_model_of_images_nothing_is_said_of_tokens(affinage):
    recipe = str(Path(__file__).parents[2] / "examples" / "byol" / "byol-digits.yaml")
    shown = affinage("graph", recipe)[1]
    assert "batch: 256" in shown and "context" not in shown and "cache" not in shown
    told = json.loads(affinage("graph", recipe, "--json")[1])
    training = {row["name"]: row["training_flops"] / row["flops"] for row in told["nodes"] if row["flops"]}
    assert training["target"] == 1 and training["projector"] == 3 and told["context"] is None


def test_it_draws_the_learning_rates(affinage):
    words = ["graph", "gpt2-124m", "--schedule", "--set", "pretrain.steps=1000"]
    words += ["--set", "pretrain.schedule={name: cosine, peak_lr: 1.0e-3, min_lr: 1.0e-4, warmup_steps: 100}"]
    rates = json.loads(affinage(*words, "--json")[1])["pretrain"]
    by_step = {row["step"]: row["learning_rate"] for row in rates}
    # The last step of the warm-up and the last of all are among those that are shown.
    assert by_step[99] == pytest.approx(1e-3) and by_step[999] == pytest.approx(1e-4, rel=1e-2)
    drawn = affinage(*words)[1]
    bars = {int(line.split()[0].replace(",", "")): line.count("█") for line in drawn.splitlines()[3:]}
    assert bars.keys() == by_step.keys() and max(bars.values()) == bars[99] == 48
    assert all(bars[step] == round(48 * rate / 1e-3) for step, rate in by_step.items())

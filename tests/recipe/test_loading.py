"""Recipes: what is merged from where, which mistakes are named at which line, and what YAML words mean."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.errors import UserError
from affinage.recipe import marked_yaml
from affinage.recipe.layers import packaged_recipes
from affinage.recipe.load import load_recipe

GOOD = """\
name: small
model:
  inputs: [tokens]
  nodes:
    embed: {kind: embedding, in: tokens}
data:
  sources: [pocket-world, {path: novels/, language: fr}]
  deduplicate: {jaccard: 0.9}
pretrain:
  steps: 1_000
  batch: 8
  schedule:
    peak: 1e-3
    floor: 1e-4
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "r.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return Path(name)

    return write


def test_good_recipe_and_its_places(write):
    loaded = load_recipe(write(GOOD))
    assert loaded.recipe.pretrain.steps == 1000
    assert loaded.recipe.pretrain.schedule.peak == 1e-3
    assert loaded.recipe.data.sources[0].path == "pocket-world"
    assert loaded.locate(("pretrain", "schedule", "floor")) == "r.yaml:14"
    assert loaded.locate(("data", "sources", 1, "language")) == "r.yaml:7"
    assert loaded.locate(("pretrain", "optimizer", "b1")) == "r.yaml:9", "unwritten: the nearest thing around it"
    assert loaded.locate(("model", "nodes", "embed", "kind")) == "r.yaml:5"


MISTAKES = [
    ("batch: 8", "bacth: 8", "r.yaml:11", "`pretrain.bacth` is not a setting", "Did you mean `pretrain.batch`?"),
    ("floor: 1e-4", "flor: 1e-4", "r.yaml:12", "`pretrain.schedule.floor` is missing", "Add `floor:` with a number."),
    ("steps: 1_000", "steps: many", "r.yaml:10", "`pretrain.steps` is `many`, and must be a whole number", ""),
    ("steps: 1_000", "steps: 1.5", "r.yaml:10", "`pretrain.steps` is `1.5`, and must be a whole number", ""),
    ("steps: 1_000", "steps: 0", "r.yaml:10", "`pretrain.steps` is `0`, and must be at least 1", ""),
    ("peak: 1e-3", "peak: -1", "r.yaml:13", "`pretrain.schedule.peak` is `-1`, and must be more than 0", ""),
    ("jaccard: 0.9", "jaccard: true", "r.yaml:8", "`data.deduplicate.jaccard` is `true`, and must be a number", ""),
    ("steps: 1_000", "steps: true", "r.yaml:10", "`pretrain.steps` is `true`, and must be a whole number", ""),
    ("jaccard: 0.9", "jaccard: [1]", "r.yaml:8", "`data.deduplicate.jaccard` is a list, and must be a number", ""),
    (
        "language: fr",
        "langage: fr",
        "r.yaml:7",
        "`data.sources.1.langage` is not a setting",
        "`data.sources.1.language`",
    ),
    ("name: small", "name: a/b", "r.yaml:1", "`name` is `a/b`, and may hold letters", ""),
    ("name: small", "seed: 1", "r.yaml:1", "`name` is missing", "with a name"),
    ("batch: 8", "batch: 8\n  micro_batches: 3", "r.yaml:9", "batch 8 does not divide into 3 micro_batches", ""),
    ("batch: 8", "log_every: 8", "r.yaml:9", "give either `batch`", ""),
    ("name: small", "name: small\nmesh: {dta: 2}", "r.yaml:2", "`mesh.dta` is not a setting", "`mesh.data`"),
    ("name: small", "name: small\nmesh: {data: all}", "r.yaml:2", "must be a whole number, or one of: auto", ""),
    ("name: small", "name: small\nreport: {language: de}", "r.yaml:2", "must be one of: en, fr", ""),
    ("name: small", "name: small\nname: large", "r.yaml:2", "`name` is given twice, here and in line 1", "Keep one"),
    ("name: small", "name: small\nrows: 3", "r.yaml:2", "a mapping of settings", "For example: rows: {context: 2048}"),
    ("name: small", "name: small\ndpo: {lora: true}", "r.yaml:2", "`dpo.lora` is `true`", "lora: {rank: 16}"),
    ("  schedule:\n    peak: 1e-3\n    floor: 1e-4", "  schedule: x", "r.yaml:12", "`x`", "Settings here: name, peak"),
    ("name: small", "name: !!python/name:os.system x", "r.yaml:1", "is not allowed", ""),
    ("name: small", "name: &a [*a]", "r.yaml:1", "this alias contains itself", ""),
    ("  batch: 8", "\tbatch: 8", "r.yaml:11", "not valid YAML", "Indent with spaces"),
    ("batch: 8", "batch: [8", "r.yaml:12", "not valid YAML", "brackets"),
    ("name: small", "name: small\nbase: none.yaml", "r.yaml:2", "the base `none.yaml` does not exist", ""),
    ("name: small", "name: small\nbase: r.yaml", "r.yaml:2", "this recipe is its own base", ""),
    ("sources: [pocket-world, {path: novels/, language: fr}]", "sources: a", "r.yaml:7", "must be a list", ""),
    ("sources: [pocket-world, {path: novels/, language: fr}]", "sources: []", "r.yaml:7", "needs at least 1", ""),
]


@pytest.mark.parametrize(("good", "bad", "where", "what", "fix"), MISTAKES)
def test_each_mistake_names_its_place_and_its_cure(write, good, bad, where, what, fix):
    assert good in GOOD
    with pytest.raises(UserError) as caught:
        load_recipe(write(GOOD.replace(good, bad)))
    message = str(caught.value)
    assert f"{where}: " in message
    assert what in message
    assert fix in message


def test_all_mistakes_are_told_at_once_in_reading_order(write):
    bad = GOOD.replace("batch: 8", "batch: x").replace("jaccard: 0.9", "jacard: 1").replace("name: small", "name: 3.5")
    with pytest.raises(UserError) as caught:
        load_recipe(write(bad))
    lines = [line for line in str(caught.value).splitlines() if line.startswith("r.yaml:")]
    assert [line.split(":")[1] for line in lines] == ["1", "8", "11"]
    assert caught.value.what.startswith("the recipe has 3 mistakes")


def test_a_mistake_within_a_list_does_not_make_the_list_empty(write):
    with pytest.raises(UserError) as caught:
        load_recipe(write(GOOD), ["data.sources=[{path: jl, langage: en}]"])
    assert "langage" in caught.value.what and "mistakes" not in caught.value.what


def test_overrides_lie_over_the_file_and_are_named_in_errors(write):
    path = write(GOOD)
    loaded = load_recipe(path, ["pretrain.steps=7", "data.sources=[mine/, {path: x}]", "data.split.validation=0.5"])
    assert loaded.recipe.pretrain.steps == 7
    assert [source.path for source in loaded.recipe.data.sources] == ["mine/", "x"]
    assert loaded.recipe.data.split.validation == 0.5
    assert loaded.recipe.pretrain.batch == 8, "the rest of the section stays"
    assert loaded.locate(("pretrain", "steps")) == "--set pretrain.steps"
    assert loaded.locate(("data", "sources", 1, "path")) == "--set data.sources"
    inside = load_recipe(path, ["data.sources.1.language=en"])
    assert inside.recipe.data.sources[1].language == "en"
    assert inside.locate(("data", "sources", 1, "language")) == "--set data.sources.1.language"
    assert inside.locate(("data", "sources", 1, "path")) == "r.yaml:7"
    merged = load_recipe(path, ["pretrain={steps: 5, schedule: {peak: 2.0e-3}}"])
    assert (merged.recipe.pretrain.batch, merged.recipe.pretrain.schedule.floor) == (8, 1e-4), "mappings merge"
    assert merged.locate(("pretrain", "schedule", "peak")) == "--set pretrain"
    assert merged.locate(("pretrain", "schedule", "floor")) == "r.yaml:14"


def test_what_was_set_within_a_mapping_is_named_where_the_whole_is_wrong(write):
    path = write(GOOD)
    with pytest.raises(UserError) as refused:
        load_recipe(path, ["pretrain.micro_batches=3", "data.split.validation=0.5"])
    assert refused.value.where == "r.yaml:9, with --set pretrain.micro_batches=3"
    loaded = load_recipe(path, ["pretrain.steps=5", "model.nodes.other.kind=x", "rows.context=64"])
    assert loaded.locate(("pretrain", "batch")) == "r.yaml:11", "a value has a place of its own"
    assert loaded.locate(("rows",)) == "--set rows.context=64"
    given = "--set model.nodes.other.kind=x"
    assert loaded.locate(("model", "nodes", "embed")) == f"r.yaml:5, with {given}", "a node takes what others give"
    assert loaded.locate(("model", "nodes", "other")) == given
    assert loaded.locate(("data", "sources", 1)) == "r.yaml:7"
    within = load_recipe(path, ["data.sources.1.language=en"])
    assert within.locate(("data", "sources", 1)) == "r.yaml:7, with --set data.sources.1.language=en"


@pytest.mark.parametrize(
    ("misplaced", "meant"),
    [
        ("fsdp=8", "Did you mean `mesh.fsdp`?"),
        ("fdsp=8", "Did you mean `mesh.fsdp`?"),
        ("parallel.fsdp=8", "Did you mean `mesh.fsdp`?"),
        ("mesh.seed=1", "Did you mean `seed`?"),
        ("micro_batches=2", "Did you mean `pretrain.micro_batches`?\n"),  # the others are of sections left out
        ("pretrain.optimizer.peak=1", "Did you mean `pretrain.schedule.peak`?\n"),
        ("context=64", "Did you mean `rows.context`? Or `mesh.context`, `sft.context`?"),
        ("steps=7", "Did you mean `pretrain.steps`?\n"),  # and not `sweep`
        ("tokenizer.vocab=300", "Did you mean `tokenizer.vocabulary`?\n"),  # and not `parallel.sharding.vocab`
        ("tokenizer.vocb=300", "Did you mean `tokenizer.vocabulary`?\n"),
        ("data.lang=[en]", "Did you mean `data.languages`?\n"),
        ("xyzzy=1", "Settings here: name, description"),
    ],
)
def test_a_setting_in_the_wrong_place_is_told_by_its_whole_name(write, misplaced, meant):
    with pytest.raises(UserError) as caught:
        load_recipe(write(GOOD), [misplaced])
    assert meant in f"{caught.value}\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware.price=free", "`hardware.price` is `free`, and must be a number, or a mapping of keys to values"),
        ("hardware.price={v4: free}", "`hardware.price.v4` is `free`, and must be a number"),
        ("hardware.price={v4: -1}", "`hardware.price.v4` is `-1`, and must be at least 0.0"),
        ("evaluate.batch=many", "`evaluate.batch` is `many`, and must be a whole number, or one of: auto"),
    ],
)
def test_where_several_kinds_of_value_would_do_one_mistake_is_one(write, override, message):
    with pytest.raises(UserError) as caught:
        load_recipe(write(GOOD), [override])
    assert caught.value.what == message


def test_a_setting_on_the_wrong_level_of_the_file_is_told_by_its_whole_name(write):
    with pytest.raises(UserError, match=r"r\.yaml:2: `fsdp` is not a setting\n  Did you mean `mesh\.fsdp`\?"):
        load_recipe(write(GOOD.replace("name: small", "name: small\nfsdp: 8")))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "pretrain.stesp=7",
            "--set pretrain.stesp: `pretrain.stesp` is not a setting\n  Did you mean `pretrain.steps`?",
        ),
        ("pretrain.steps=[", "--set pretrain.steps:1: this is not valid YAML"),
        ("pretrain.steps", "--set pretrain.steps: this is not `key=value`"),
        ("data.sources.9=x", "`data.sources` is a list of 2, and `9` is none of its positions"),
        ("data.sources.0.language=x", "`data.sources.0` is `pocket-world` and has no `language`"),
        ("base=other", "`base` can only be given in the file"),
        ("pretrain.steps=x", "--set pretrain.steps: `pretrain.steps` is `x`"),
    ],
)
def test_wrong_overrides(write, override, message):
    with pytest.raises(UserError) as caught:
        load_recipe(write(GOOD), [override])
    assert message in str(caught.value)


def test_base_is_merged_and_null_takes_away(write):
    write(GOOD, "base.yaml")
    child = write(
        "base: base.yaml\nname: child\npretrain: {steps: 9}\n"
        "data: {sources: [a], deduplicate: null}\nmodel: {nodes: {embed: null, other: {kind: x}}}\nreport: null\n"
    )
    loaded = load_recipe(child)
    assert loaded.recipe.name == "child"
    assert (loaded.recipe.pretrain.steps, loaded.recipe.pretrain.batch) == (9, 8)
    assert len(loaded.recipe.data.sources) == 1, "lists are replaced"
    assert loaded.recipe.data.deduplicate is None, "null is a value where the setting has one"
    assert loaded.recipe.model["nodes"] == {"other": {"kind": "x"}}
    assert loaded.recipe.report.language == "en", "null is the default where it cannot be left out"
    assert loaded.locate(("pretrain", "batch")) == "base.yaml:11"
    assert loaded.locate(("pretrain", "steps")) == "r.yaml:3"
    assert load_recipe(child, ["pretrain=null"]).recipe.pretrain is None
    with pytest.raises(UserError, match=r"base\.yaml:11"):
        write(GOOD.replace("batch: 8", "batch: no"), "base.yaml")
        load_recipe(child)


def test_a_name_finds_a_recipe_that_comes_along_and_a_wrong_one_is_corrected(write):
    names = packaged_recipes()
    assert "quickstart" in names
    assert load_recipe("quickstart").recipe.name == "quickstart"
    with pytest.raises(UserError) as caught:
        load_recipe("quickstrat")
    assert "Did you mean `quickstart`?" in str(caught.value)
    write(GOOD)
    with pytest.raises(UserError) as caught:
        load_recipe("q.yaml")
    assert "Did you mean `r.yaml`?" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("true", True), ("~", None), ("", None), ("1e-3", 1e-3), ("1.5e3", 1500.0),
        ("010", 10), ("50_000", 50000), ("12:30", "12:30"), ("2026-01-02", "2026-01-02"), ("'1'", "1"), (".5", 0.5),
        ("-.inf", float("-inf")), ("[a, 1]", ["a", 1]), ("1.", 1.0), ("1-2", "1-2"), ("_1", "_1"),
    ],
)  # fmt: skip
def test_words_and_numbers(text, value):
    assert marked_yaml.parse(text, "t").value == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_as_python_prints_them_are_numbers(number):
    assert marked_yaml.parse(repr(number), "t").value == number


def test_the_settings_in_effect_are_a_recipe_too(write, tmp_path):
    loaded = load_recipe(write(GOOD), ["pretrain.steps=3"])
    (tmp_path / "recipe.json").write_text(loaded.recipe.model_dump_json())
    assert load_recipe("recipe.json").recipe == loaded.recipe


def test_the_command_that_runs_it_again(write, tmp_path):
    path = write(GOOD)
    assert load_recipe(path, ["data.sources=[a b]"]).command == "affinage run r.yaml --set 'data.sources=[a b]'"
    assert load_recipe(tmp_path / path).command == "affinage run r.yaml"


def test_a_path_is_relative_to_the_file_that_says_it(write, tmp_path):
    for folder in ("base", "here", "plugins"):
        (tmp_path / folder).mkdir()
    write(GOOD + "init: .\nplugins: [mine.py]\n", "base/recipe.yaml")
    (tmp_path / "base/mine.py").touch()
    derived = load_recipe(write("base: ../base/recipe.yaml\nname: derived\n", "here/r.yaml"))
    assert derived.beside(derived.recipe.init, ("init",)).resolve() == tmp_path / "base"
    assert derived.beside("mine.py", ("plugins", 0)).resolve() == tmp_path / "base/mine.py"
    own = load_recipe(write("base: ../base/recipe.yaml\ninit: .\n", "here/own.yaml"))
    assert own.beside(".", ("init",)).resolve() == tmp_path / "here"
    told = load_recipe("here/r.yaml", ["init=base"])
    assert told.beside("base", ("init",)).resolve() == tmp_path / "base", "not there beside the recipe: from here"

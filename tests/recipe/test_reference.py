"""What is said about settings is read from where they are, and says the same as the recipe itself."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

import affinage.model.kinds  # noqa: F401  the kinds register themselves
from affinage.model.kind import KINDS
from affinage.recipe.effective import as_text, effective
from affinage.recipe.layers import packaged_recipes
from affinage.recipe.load import load_recipe
from affinage.recipe.marked_yaml import parse
from affinage.recipe.recipe import Recipe
from affinage.recipe.reference import comments, sections
from affinage.recipe.schema import json_schema
from affinage.recipe.settings import Settings
from affinage.recipe.training import CheckpointSettings, PretrainSettings

RECIPES = sorted(packaged_recipes())


@pytest.mark.parametrize("name", RECIPES)
def test_the_values_in_effect_are_a_recipe_that_says_the_same(name: str, tmp_path):
    loaded = load_recipe(name)
    flat = tmp_path / "flat.yaml"
    flat.write_text(as_text(effective(loaded)))
    assert load_recipe(flat).recipe == loaded.recipe


def test_each_value_has_its_origin_and_what_the_base_says(tmp_path):
    (tmp_path / "a.yaml").write_text("base: quickstart\nname: a\npretrain:\n  steps: 77\n")
    found = {value.path: value for value in effective(load_recipe(tmp_path / "a.yaml", ["pretrain.batch=3"]))}
    steps, batch = found["pretrain", "steps"], found["pretrain", "batch"]
    base = load_recipe("quickstart").recipe.pretrain
    assert base is not None and steps.value == 77 and steps.base == base.steps and steps.differs
    assert steps.origin.endswith("a.yaml:4") and batch.origin == "--set pretrain.batch" and batch.base == base.batch
    eps = found["pretrain", "optimizer", "eps"]
    assert eps.origin == "default" and not eps.differs
    assert {path for path, value in found.items() if value.differs} == {("name",), steps.path, batch.path}


def test_what_a_base_had_and_the_recipe_takes_away_is_not_in_effect(tmp_path):
    (tmp_path / "a.yaml").write_text("base: quickstart\nname: a\nsft: null\ndpo: null\ndata: {deduplicate: null}\n")
    found = {value.path: value.value for value in effective(load_recipe(tmp_path / "a.yaml"))}
    assert not any(path[0] == "sft" for path in found) and found["data", "deduplicate"] is None


def test_comments_are_read_beside_and_above_a_field_and_from_the_class_it_is_inherited_from():
    assert comments(CheckpointSettings)["every_minutes"] == "also when the last save is so long ago"
    above = comments(CheckpointSettings)["accept_changes"]
    assert above.startswith("Facts, such as") and above.endswith("when it goes on.")
    assert comments(PretrainSettings)["validate_every"] == "steps"


def test_the_reference_has_every_key_that_a_recipe_can_hold():
    keys = {setting.key for section in sections(Recipe) for setting in section.settings}
    for name in RECIPES:
        loaded = load_recipe(name)
        for value in effective(loaded):
            if value.path[0] in ("model", "sweep"):
                continue
            dotted = ".".join("[]" if isinstance(part, int) else part for part in value.path).replace(".[]", "[]")
            assert any(dotted == key or dotted.startswith(f"{key}.") for key in keys), dotted


@pytest.mark.parametrize("model", [Recipe, *KINDS.values()], ids=lambda model: model.__name__)
def test_every_settings_class_says_what_it_is(model: type[Settings]):
    assert model.__doc__


def test_the_schema_takes_every_recipe_and_says_what_keys_mean():
    schema = json_schema(KINDS)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(json.loads(json.dumps(schema)))
    for name, path in packaged_recipes().items():
        assert not list(validator.iter_errors(parse(path.read_text(), name).value)), name
    assert schema["$defs"]["PretrainSettings"]["properties"]["validate_every"]["description"] == "steps"


@pytest.mark.parametrize(
    "text",
    [
        "pretrain: {stepz: 3}",
        "pretrain: {steps: none}",
        "data: {clean: {min_characters: -1}}",
        "model: {nodes: {a: {kind: embedding, in: tokens, wdth: 3}}}",
        "mesh: {rows: 2}",
    ],
)
def test_the_schema_marks_mistakes(text: str):
    validator = Draft202012Validator(json_schema(KINDS))
    assert list(validator.iter_errors(yaml.safe_load(text)))


@pytest.mark.parametrize("model", [Recipe, *KINDS.values()])
def test_every_setting_says_what_it_means(model: type[Settings]):
    """In words beside it, or by the class that its own settings stand in."""
    settings = [setting for section in sections(model) for setting in section.settings]
    explained = {section.key for section in sections(model) if section.meaning}
    for setting in settings:
        inside = any(key.startswith((f"{setting.key}.", f"{setting.key}[")) or key == setting.key for key in explained)
        assert setting.meaning or inside, setting.key

"""What is said about settings is read from where they are, and says the same as the recipe itself."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

import affinage.model.layers  # noqa: F401  the kinds register themselves
from affinage.cli.reference import as_text, effective, json_schema, sections, settings_by_key
from affinage.config.load import load_recipe, packaged_recipes
from affinage.config.recipe import Recipe
from affinage.config.settings import Settings
from affinage.config.yaml import parse
from affinage.model.layer import LAYERS

KEYS = set(settings_by_key())


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_the_values_in_effect_are_a_recipe_that_says_the_same_and_the_reference_has_their_keys(name: str, tmp_path):
    loaded = load_recipe(name)
    values = effective(loaded)
    (tmp_path / "flat.yaml").write_text(as_text(values))
    assert load_recipe(tmp_path / "flat.yaml").recipe == loaded.recipe
    for value in values:
        dotted = ".".join("[]" if isinstance(part, int) else part for part in value.path).replace(".[]", "[]")
        free = value.path[0] in ("model", "sweep")
        assert free or any(dotted == key or dotted.startswith(f"{key}.") for key in KEYS), dotted


def test_each_value_has_its_origin_and_what_the_base_says(tmp_path):
    text = "base: quickstart\nname: a\npretrain:\n  steps: 77\nsft: null\ndpo: null\ndata: {dedup: null}\n"
    (tmp_path / "a.yaml").write_text(text)
    found = {value.path: value for value in effective(load_recipe(tmp_path / "a.yaml", ["pretrain.batch_size=3"]))}
    steps, batch, eps = (found["pretrain", *path] for path in (("steps",), ("batch_size",), ("optimizer", "eps")))
    base = load_recipe("quickstart").recipe.pretrain
    assert steps.value == 77 and steps.base == base.steps and steps.differs and steps.origin.endswith("a.yaml:4")
    assert batch.origin == "--set pretrain.batch_size" and batch.base == base.batch_size
    assert eps.origin == "default" and not eps.differs
    assert {("name",), steps.path, batch.path} <= {path for path, value in found.items() if value.differs}
    # What a base had and the recipe takes away is not in effect.
    assert not any(path[0] in ("sft", "dpo") for path in found) and found["data", "dedup"].value is None


def test_a_recipe_has_at_most_270_settings():
    assert sum(len(section.settings) for section in sections(Recipe)) <= 270


@pytest.mark.parametrize("model", [Recipe, *LAYERS.values()], ids=lambda model: model.__name__)
def test_every_setting_and_its_class_say_what_they_mean(model: type[Settings]):
    """In words beside it, or by the class that its own settings stand in."""
    assert model.__doc__
    explained = {section.key for section in sections(model) if section.meaning}
    for setting in (setting for section in sections(model) for setting in section.settings):
        inside = any(key == setting.key or key.startswith((f"{setting.key}.", f"{setting.key}[")) for key in explained)
        assert setting.meaning or inside, setting.key


def test_the_schema_takes_every_recipe_says_what_keys_mean_and_marks_mistakes():
    schema = json_schema(LAYERS)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(json.loads(json.dumps(schema)))
    for name, path in packaged_recipes().items():
        assert not list(validator.iter_errors(parse(path.read_text(), name).value)), name
    assert schema["$defs"]["TrainSettings"]["properties"]["eval_every"]["description"]
    for text in (
        "pretrain: {stepz: 3}",
        "pretrain: {steps: none}",
        "data: {filters: {min_characters: -1}}",
        "model: {nodes: {a: {kind: embedding, in: tokens, wdth: 3}}}",
        "mesh: {rows: 2}",
    ):
        assert list(validator.iter_errors(yaml.safe_load(text))), text

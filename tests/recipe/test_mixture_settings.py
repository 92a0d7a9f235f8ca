"""The forms that a mixture may be written in, and what depends on it."""

import re
from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.recipe.load import load_recipe
from affinage.stages.road import road_of

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


def mixture(written: str) -> list[tuple[int, dict[str, float]]]:
    found = load_recipe(TINY, [f"pretrain.mixture={written}"]).recipe.pretrain.mixture
    return [(stage.from_step, stage.weights) for stage in found]


def test_one_mixture_or_several_stages():
    assert mixture("{en: 7, fr: 3}") == [(0, {"en": 7, "fr": 3})]
    staged = "[{weights: {en: 1}}, {from_step: 10, weights: {en: 1, fr: 0.5}}]"
    assert mixture(staged) == [(0, {"en": 1}), (10, {"en": 1, "fr": 0.5})]
    assert load_recipe(TINY).recipe.pretrain.mixture is None


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("{en: -1}", "at least 0"),
        ("{en: 0}", "at least one weight must be above zero"),
        ("[{from_step: 5, weights: {en: 1}}]", r"begin at steps \[5\]: the first must be 0"),
        ("[{weights: {en: 1}}, {weights: {fr: 1}}]", "each a later one"),
        ("[{form_step: 0, weights: {en: 1}}]", r"Did you mean `pretrain\.mixture\.0\.from_step`"),
    ],
)
def test_mistakes_are_told(written: str, complaint: str):
    with pytest.raises(UserError) as raised:
        mixture(written)
    assert re.search(complaint, str(raised.value))


def test_a_mixture_is_in_the_key_of_the_training_and_packing_in_that_of_the_rows():
    def settings(*overrides: str) -> dict[str, dict]:
        return {stage.name: stage.settings for stage in road_of(load_recipe(TINY, overrides))}

    plain = settings()
    for override, changed in [
        ("pretrain.mixture={en: 1}", {"pretrain"}),
        ("rows.packing=best-fit", {"rows"}),
        ("rows.url=file:///elsewhere", {"rows"}),
    ]:
        other = settings(override)
        assert {name for name in plain if plain[name] != other[name]} == changed

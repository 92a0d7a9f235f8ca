"""The models of the packaged recipes: as large as they are said to be, and known without being built."""

from math import prod
from pathlib import Path

import jax
import pytest

from affinage.config.load import load_recipe
from affinage.model import abstract_params, parse
from affinage.model.graph import parameters

RECIPES = Path(__file__).parents[2] / "recipes"
VOCABULARY = 3072  # what `vocab: auto` is in the quickstart


def gpt2(width, layers, context=1024, vocabulary=50257):
    attention, ffn, norms = 4 * width**2 + 4 * width, 8 * width**2 + 5 * width, 4 * width
    return vocabulary * width + context * width + layers * (attention + ffn + norms) + 2 * width


def llama(vocabulary, width, layers, ffn, *, kv_share=1, router=0):
    attention = 2 * width**2 + 2 * width**2 // kv_share
    return 2 * vocabulary * width + layers * (attention + 3 * width * ffn + router + 2 * width) + width


# By formula, and where somebody else has published the number, that number.
TOTALS = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "julian-100m": 142_659_200,
    "julian-250m": 337_310_720,
    "julian-600m": 599_906_560,
    "julian-2b": llama(50000, 2048, 26, 8192),
    "llama3-1b": 1_235_814_400,
    "llama3-70b": llama(128256, 8192, 80, 28672, kv_share=8),
    "fax-124m": gpt2(768, 12, 2048),
    "fax-350m": gpt2(1024, 24, 2048),
    "fax-5120": gpt2(5120, 40, 2048, 50432),
    "fax-10240": gpt2(10240, 70, 2048, 50432),
    "fax-16384": gpt2(16384, 100, 2048, 50432),
    "quickstart": llama(VOCABULARY, 128, 3, 384),
    "moe-small-dense": llama(VOCABULARY, 64, 3, 192),
    "moe-small": llama(VOCABULARY, 64, 3, 8 * 96, router=64 * 8),
}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_has_a_model_of_the_size_it_is_said_to_have(recipe):
    loaded = load_recipe(RECIPES / f"{recipe}.yaml")
    graph = parse(loaded.recipe.model, loaded.locate, vocabulary=VOCABULARY)
    count = parameters(graph)
    assert count.total == sum(prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(graph)))
    if recipe in TOTALS:
        assert count.total == TOTALS[recipe]
    text = (RECIPES / f"{recipe}.yaml").read_text()
    if "parameters" in text and recipe in TOTALS and not recipe.startswith(("moe", "quick")):
        assert f"{count.total:,}" in text

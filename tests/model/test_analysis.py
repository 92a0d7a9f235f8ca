"""The static analysis against what is really computed and stored."""

import json
import re
from math import prod
from pathlib import Path

import jax
import jax.extend.core
import pytest

import tiny_graphs
from affinage.config.load import load_recipe
from affinage.model import ApplyConfig, abstract_params, apply, parse
from affinage.model.forward import batch_shapes
from affinage.model.graph import analyze, parameters
from affinage.model.layers.embedding import Logits

GRAPHS = {
    "grouped queries": tiny_graphs.llama(attention={"kv_heads": 2}),
    "gpt2": tiny_graphs.gpt2(),
    "experts": tiny_graphs.moe(),
    "experts with a capacity": tiny_graphs.moe(capacity_factor=1.25, activation="gelu", scan=False),
    "squared": tiny_graphs.llama(attention={"head_dim": 12}, ffn={"kind": "relu2", "width": 40}),
}
DEAR = "experts", "squared"
ROWS, CONTEXT = 3, 16


def product(equation) -> int:
    """Operations of a product, 2 m n k; of a ragged one the groups are together as long as the rows."""
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    result = equation.outvars[0].aval.shape
    if equation.primitive.name == "dot_general":
        return 2 * prod(result) * prod(left[axis] for axis in equation.params["dimension_numbers"][0][0])
    if len(result) == 3:  # [rows, m] and [rows, n] to [groups, m, n]: the rows are split over the groups
        return 2 * left[0] * prod(result[1:])
    (axis,) = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][1]
    return 2 * prod(result) * right[axis]


def products(jaxpr) -> int:
    """Operations of all products in a program, inner programs included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            total += product(equation)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            total += times * products(inner)
    return total


def program(graph, until=None, *, gradient=False):
    """The products up to a node's value, or of the loss with its gradient."""

    def value(params, batch):
        everything = jax.checkpoint_policies.everything_saveable  # else plain attention's scores are computed again
        call = ApplyConfig(platform="tpu", remat=everything, key=jax.random.key(0), until=until)
        found = apply(graph, params, batch, call).values[until or graph.loss]
        return found.array() if isinstance(found, Logits) else found if until else found.sum

    function = jax.grad(value) if gradient else value
    return products(jax.make_jaxpr(function)(abstract_params(graph), batch_shapes(graph, ROWS, CONTEXT)).jaxpr)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in DEAR else n for n in GRAPHS])
def test_operations_of_every_node_and_of_a_training_step_are_those_of_its_products(name):
    # A vocabulary that accelerators need not fill up: what is filled up is no operation of the model.
    graph = parse(json.loads(json.dumps(GRAPHS[name]).replace('"vocab": 97', '"vocab": 128')))
    analysis, block = analyze(graph, ROWS, CONTEXT), graph["blocks"]
    attention = block.layer.attention
    hidden = CONTEXT * CONTEXT - attention.pairs(CONTEXT)  # pairs of tokens that plain attention computes for nothing
    unseen = {"blocks": block.layers * 4 * ROWS * attention.heads * attention.head_width(32) * hidden}
    for node in graph.nodes:
        needed = graph.needed_for(node.name)
        expected = sum(row["flops"] + unseen.get(row["name"], 0) for row in analysis if row["name"] in needed)
        assert program(graph, node.name) == expected, node.name
    assert program(graph, gradient=True) == sum(row["training_flops"] for row in analysis) + 3 * sum(unseen.values())


RECIPES = Path(__file__).parents[2] / "recipes"
VOCABULARY = 3072  # what `vocab: auto` is in the quickstart
# By formula: width, layers, and of a layer the width of all its feed-forward parts and the weights of its router.
SMALL = {"quickstart": (128, 3, 384, 0), "moe-small-dense": (64, 3, 192, 0), "moe-small": (64, 3, 8 * 96, 64 * 8)}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_has_a_model_of_the_size_it_is_said_to_have(recipe):
    """Of the GPT-2s and of Llama 3 it is the number that others have published."""
    loaded = load_recipe(RECIPES / f"{recipe}.yaml")
    graph = parse(loaded.recipe.model, loaded.locate, vocabulary=VOCABULARY)
    count = parameters(graph)
    assert count.total == sum(prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(graph)))
    said = re.findall(r"# Expect: ([\d,]+) parameters", (RECIPES / f"{recipe}.yaml").read_text())
    assert said == [f"{count.total:,}"] * len(said)
    assert said or not re.match(r"fax|gpt2|llama3|julian-\d+\w$", recipe)
    if recipe in SMALL:
        width, layers, ffn, router = SMALL[recipe]
        layer = 4 * width**2 + 3 * width * ffn + router + 2 * width
        assert count.total == 2 * VOCABULARY * width + layers * layer + width

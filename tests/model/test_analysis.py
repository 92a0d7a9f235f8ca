"""The static analysis against what is really computed and stored."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

import tiny_graphs
from affinage.model import Call, abstract_params, apply, init_cache, parse
from affinage.model.analysis import analyse, cache_bytes, mermaid, parameter_bytes, parameters, summary_table

GRAPHS = {
    "llama": tiny_graphs.llama(attention={"kv_heads": 2}),
    "gpt2": tiny_graphs.gpt2(),
    "experts": tiny_graphs.moe(shared_experts=1),
    "experts with a capacity": tiny_graphs.moe(capacity_factor=1.25, activation="gelu"),
    "squared": tiny_graphs.llama(attention={"head_dim": 12}, ffn={"kind": "relu2", "width": 40}),
}


def product(equation) -> int:
    """2 m n k of a product, or of all those of a ragged one, whose groups are together as long as the rows."""
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    result = equation.outvars[0].aval.shape
    if equation.primitive.name == "dot_general":
        contracted = equation.params["dimension_numbers"][0][0]
        return 2 * prod(result) * prod(left[axis] for axis in contracted)
    if len(result) == 3:  # [rows, m] and [rows, n] to [groups, m, n]: the rows are split over the groups
        return 2 * left[0] * prod(result[1:])
    (axis,) = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][1]
    return 2 * prod(result) * right[axis]


def products(jaxpr) -> int:
    """2 m n k of every matrix product in a program, inner programs included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            total += product(equation)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.core.jaxprs_in_params(equation.params):
            total += times * products(inner)
    return total


@pytest.mark.parametrize("name", GRAPHS)
def test_operations_are_those_of_the_program(name):
    graph, batch = parse(GRAPHS[name]), {"tokens": jax.ShapeDtypeStruct((3, 16), jnp.int32)}

    def loss(params, batch):
        return apply(graph, params, batch, Call(platform="tpu", key=jax.random.key(0))).values[graph.loss].sum

    analysis = analyse(graph, 3, 16)
    forward = jax.make_jaxpr(loss)(abstract_params(graph), batch).jaxpr
    both = jax.make_jaxpr(jax.grad(loss))(abstract_params(graph), batch).jaxpr
    assert products(forward) == sum(node.flops_all_pairs for node in analysis.nodes)
    assert products(both) == analysis.training_flops_all_pairs


def test_causal_attention_counts_the_pairs_it_sees():
    def attention_flops(**attention):
        graph = parse(tiny_graphs.llama(layers=1, attention=attention))
        node = analyse(graph, 1, 10).nodes[1]
        return node.flops, node.flops_all_pairs

    causal, all_pairs = attention_flops()
    windowed, _ = attention_flops(window=3)
    per_pair = 2 * 2 * 32
    assert all_pairs - causal == per_pair * (100 - 55)
    assert causal - windowed == per_pair * (55 - (1 + 2 + 8 * 3))


@pytest.mark.parametrize("name", GRAPHS)
def test_bytes_and_parameters_are_those_of_the_arrays(name):
    graph = parse(GRAPHS[name])
    leaves = jax.tree.leaves(abstract_params(graph, jnp.bfloat16))
    assert parameters(graph).total == sum(leaf.size for leaf in leaves)
    assert parameter_bytes(graph, jnp.bfloat16) == sum(2 * leaf.size for leaf in leaves)
    cache = jax.tree.leaves(init_cache(graph, 2, 8, jnp.bfloat16))
    assert cache_bytes(graph, 2, 8, jnp.bfloat16) == sum(array.nbytes for array in cache)


def test_embeddings_are_counted_apart():
    untied, tied = (parameters(parse(tiny_graphs.llama(tied=tied))) for tied in (False, True))
    assert untied.embedding == tied.embedding == 97 * 32
    assert untied.non_embedding - tied.non_embedding == 97 * 32


def test_the_table_ends_with_the_total_and_the_picture_has_every_arrow():
    graph = parse(tiny_graphs.gpt2())
    table = summary_table(graph, 1, 8)
    assert [row["name"] for row in table] == [*(node.name for node in graph.nodes), "total"]
    assert table[-1]["parameters"] == parameters(graph).total
    assert table[-1]["training_flops"] == 3 * table[-1]["flops"] == analyse(graph, 1, 8).training_flops
    picture = mermaid(graph)
    assert "    norm --> logits\n" in picture
    assert "    embed -. weights .-> logits\n" in picture

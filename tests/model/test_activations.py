"""Bytes kept for the backward pass, against what differentiating the whole graph hands over."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import tiny_graphs
from affinage.model import Call, abstract_params, apply, parse
from affinage.model.activations import activations
from affinage.model.parameter import parameters_in

ROWS, CONTEXT = 2, 16


def handed_over(graph, remat=None):
    """Bytes from the forward to the backward pass of the whole graph, weights as they were given left out."""
    rows = jax.ShapeDtypeStruct((ROWS, CONTEXT), jnp.int32)
    batch = {"tokens": rows, "segment_ids": rows, "positions": rows}
    batch["loss_mask"] = jax.ShapeDtypeStruct((ROWS, CONTEXT), jnp.float32)
    call = Call(compute_dtype=jnp.bfloat16, platform="tpu", key=jax.random.key(0), remat=remat)

    def backward(params, batch):
        return jax.vjp(lambda p: apply(graph, p, batch, call).values[graph.loss].sum, params)[1]

    params = abstract_params(graph)
    jaxpr = jax.make_jaxpr(backward)(params, batch).jaxpr
    given = {*jaxpr.invars[: len(jax.tree.leaves(params))], *jaxpr.constvars}
    return sum(size(v.aval) for v in {v for v in jaxpr.outvars if isinstance(v, jax.extend.core.Var)} - given)


def size(aval):
    return 0 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.size * aval.dtype.itemsize


def kept(graph, policy):
    return sum(node.kept for node in activations(graph, ROWS, CONTEXT, policy))


MODELS = {"llama": tiny_graphs.llama, "gpt2": tiny_graphs.gpt2, "experts": tiny_graphs.moe}


@pytest.mark.parametrize("name", MODELS)
def test_without_recomputation_it_is_what_differentiation_hands_over(name):
    model = MODELS[name](layers=1)
    del model["nodes"]["blocks"]["repeat"]
    graph = parse(model)
    assert kept(graph, "none") == pytest.approx(handed_over(graph), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_layers_keep_their_inputs(name):
    graph = parse(MODELS[name](layers=3))
    by_name = {node.name: node for node in activations(graph, ROWS, CONTEXT, "block")}
    inputs = 3 * ROWS * CONTEXT * 32 * 2
    assert inputs <= by_name["blocks"].kept < 1.5 * inputs
    unrolled = MODELS[name](layers=3)
    unrolled["nodes"]["blocks"]["scan"] = False
    weights = 4 * sum(p.size for p in parameters_in(graph.parameters["blocks"]))  # each layer's are cut from all
    expected = handed_over(parse(unrolled), jax.checkpoint) - weights
    assert kept(graph, "block") == pytest.approx(expected, rel=0.03)  # the sum of the layers' losses is no node's


def test_more_recomputation_keeps_less():
    graph = parse(tiny_graphs.llama(layers=8))
    none, block, full = (activations(graph, ROWS, CONTEXT, policy)[1] for policy in ("none", "block", "full"))
    assert none.kept > 5 * block.kept > 5 * full.kept == 5 * ROWS * CONTEXT * 32 * 2
    assert none.recomputed == 0 < block.recomputed < full.recomputed

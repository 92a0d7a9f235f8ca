"""Bytes kept for the backward pass, to the byte what differentiating the whole graph hands over."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import tiny_graphs
from affinage.model import Call, abstract_averages, abstract_params, apply, parse
from affinage.model.activations import POLICIES, activations

ROWS, CONTEXT = 2, 16
CUTTING = ("split", "squeeze", "slice")  # a layer's weights from those of all layers


def batch_of(graph):
    batch = {"rows": jax.ShapeDtypeStruct((ROWS,), jnp.int32)}
    for name, shape in graph.inputs:
        dims = shape.bind({"B": ROWS, "S": CONTEXT})
        batch[name] = jax.ShapeDtypeStruct(dims, jnp.int32 if name == "tokens" else jnp.float32)
    if "tokens" in batch:
        batch |= {"segment_ids": batch["tokens"], "positions": batch["tokens"]}
        batch["loss_mask"] = jax.ShapeDtypeStruct((ROWS, CONTEXT), jnp.float32)
    return batch


def handed_over(graph, remat=None):
    """Bytes from the forward to the backward pass of the whole graph, weights as they were given left out."""
    call = Call(compute_dtype=jnp.bfloat16, platform="tpu", key=jax.random.key(0), remat=remat)

    def backward(params, averages, batch):
        with_averages = Call(**{**vars(call), "averages": averages})
        return jax.vjp(lambda p: apply(graph, p, batch, with_averages).values[graph.loss].sum, params)[1]

    params, averages = abstract_params(graph), abstract_averages(graph)
    jaxpr = jax.make_jaxpr(backward)(params, averages, batch_of(graph)).jaxpr
    weights = {*jaxpr.invars[: len(jax.tree.leaves((params, averages)))], *jaxpr.constvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name in CUTTING and weights.issuperset(equation.invars):
            weights.update(equation.outvars)
    return sum(size(v.aval) for v in {v for v in jaxpr.outvars if isinstance(v, jax.extend.core.Var)} - weights)


def size(aval):
    return 0 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.size * aval.dtype.itemsize


def kept(graph, policy):
    return sum(node.kept for node in activations(graph, ROWS, CONTEXT, policy))


MODELS = {
    "llama": (tiny_graphs.llama, 0),
    "grouped queries": (lambda **kind: tiny_graphs.llama(attention={"heads": 4, "kv_heads": 2}, **kind), 0),
    "gpt2": (tiny_graphs.gpt2, 0),
    "experts": (tiny_graphs.moe, 12),  # three counts, by which apply divides and multiplies the nodes' losses
}
IMAGES = {"mlp": {"hidden": [24]}, "conv": {"net": "conv", "hidden": [4, 8]}}


@pytest.mark.parametrize("name", MODELS)
def test_without_recomputation_it_is_what_differentiation_hands_over(name):
    build, of_no_node = MODELS[name]
    model = build(layers=1)
    del model["nodes"]["blocks"]["repeat"]
    graph = parse(model)
    assert kept(graph, "none") + of_no_node == handed_over(graph)


def test_layers_in_a_row_keep_each_their_own():
    model = tiny_graphs.llama(layers=3)
    block = {key: value for key, value in model["nodes"].pop("blocks").items() if key != "repeat"}
    chain = {f"block_{i}": {**block, "in": f"block_{i - 1}" if i else "embed"} for i in range(3)}
    written_out = parse({**model, "nodes": {**model["nodes"], **chain, "norm": {"kind": "rms_norm", "in": "block_2"}}})
    repeated = {node.name: node.kept for node in activations(parse(tiny_graphs.llama()), ROWS, CONTEXT, "none")}
    apart = {node.name: node.kept for node in activations(written_out, ROWS, CONTEXT, "none")}
    # Written out, the three have their mask and their rotary tables each.
    assert repeated["blocks"] <= sum(apart[name] for name in chain) <= 1.01 * repeated["blocks"]
    assert sum(apart.values()) == pytest.approx(handed_over(written_out), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_layers_keep_their_inputs(name):
    build, of_no_node = MODELS[name]
    graph = parse(build(layers=3))
    by_name = {node.name: node for node in activations(graph, ROWS, CONTEXT, "block")}
    inputs = 3 * ROWS * CONTEXT * 32 * 2
    assert inputs <= by_name["blocks"].kept < 1.5 * inputs
    unrolled = build(layers=3)
    unrolled["nodes"]["blocks"]["scan"] = False
    assert kept(graph, "block") + of_no_node == handed_over(parse(unrolled), jax.checkpoint)


@pytest.mark.parametrize("encoder", IMAGES)
def test_a_branch_without_gradient_keeps_nothing(encoder):
    graph = parse(tiny_graphs.byol(**IMAGES[encoder]))
    by_name = {node.name: node.kept for node in activations(graph, ROWS, CONTEXT, "none")}
    assert by_name["views"] == by_name["target"] == by_name["constant"] == 0
    assert sum(by_name.values()) == handed_over(graph)
    assert all(kept(graph, policy) > 0 for policy in POLICIES)


def test_more_recomputation_keeps_less():
    graph = parse(tiny_graphs.llama(layers=8))
    none, block, full = (activations(graph, ROWS, CONTEXT, policy)[1] for policy in ("none", "block", "full"))
    assert none.kept > 5 * block.kept > 5 * full.kept == 5 * ROWS * CONTEXT * 32 * 2
    assert none.recomputed == 0 < block.recomputed < full.recomputed

"""Bytes kept for the backward pass, to the byte what differentiating the whole graph hands over."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies

import tiny_graphs
from affinage.model import Call, abstract_averages, abstract_params, apply, parse
from affinage.model.activations import POLICIES, activations
from affinage.recipe.parallel import RematSettings

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


def handed_over(graph, **remat):
    """Bytes from the forward to the backward pass of the whole graph, weights as they were given left out.

    First those on the device, then those in the host's memory; `remat` is of the `Call`.
    """
    call = Call(compute_dtype=jnp.bfloat16, platform="tpu", key=jax.random.key(0), **remat)

    def backward(params, averages, batch):
        with_averages = Call(**{**vars(call), "averages": averages})
        return jax.vjp(lambda p: apply(graph, p, batch, with_averages).values[graph.loss].sum, params)[1]

    params, averages = abstract_params(graph), abstract_averages(graph)
    jaxpr = jax.make_jaxpr(backward)(params, averages, batch_of(graph)).jaxpr
    weights = {*jaxpr.invars[: len(jax.tree.leaves((params, averages)))], *jaxpr.constvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name in CUTTING and weights.issuperset(equation.invars):
            weights.update(equation.outvars)
    avals = [v.aval for v in {v for v in jaxpr.outvars if isinstance(v, jax.extend.core.Var)} - weights]
    away = sum(size(aval) for aval in avals if aval.memory_space == jax.memory.Space.Host)
    return sum(map(size, avals)) - away, away


def size(aval):
    return 0 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.size * aval.dtype.itemsize


def kept(graph, remat):
    """On the device, in the host's memory."""
    nodes = activations(graph, ROWS, CONTEXT, remat)
    return sum(node.kept for node in nodes), sum(node.offloaded for node in nodes)


def saved(*names):
    return policies.save_only_these_names(*names)


def offloaded(saved, away):
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=away,
        offload_src="device",
        offload_dst="pinned_host",
    )


MODELS = {
    "llama": (tiny_graphs.llama, 0),
    "grouped queries": (lambda **kind: tiny_graphs.llama(attention={"heads": 4, "kv_heads": 2}, **kind), 0),
    "gpt2": (tiny_graphs.gpt2, 0),
    "dropout": (lambda **kind: tiny_graphs.gpt2(dropout=0.1, **kind), 0),
    "experts": (tiny_graphs.moe, 4),  # of no node: the count by which the loss weighs the mixture's losses
}
# A recipe's setting, and what JAX is told by hand.
REMATS = {
    "none": ("none", {}),
    "dots": ("dots", {"remat": policies.dots_with_no_batch_dims_saveable}),
    "block": ("block", {"remat": policies.nothing_saveable}),
    "full": ("full", {"remat": policies.nothing_saveable, "remat_nodes": True}),
    "kept": (RematSettings(keep=("attended", "ffn_up")), {"remat": saved("attended", "ffn_up")}),
    "away": (
        RematSettings(keep=("query",), offload=("block_input", "ffn_hidden")),
        {"remat": offloaded(["query"], ["block_input", "ffn_hidden"])},
    ),
}
IMAGES = {"mlp": {"hidden": [24]}, "conv": {"net": "conv", "hidden": [4, 8]}}


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize(
    ("name", "scan"),
    [("llama", True), ("llama", False), ("grouped queries", False), ("dropout", True), ("experts", False)],
)
def test_it_is_what_differentiation_hands_over(name, scan, remat):
    build, of_no_node = MODELS[name]
    model = build(layers=2)
    model["nodes"]["blocks"]["scan"] = scan
    graph, (setting, by_hand) = parse(model), REMATS[remat]
    device, host = kept(graph, setting)
    assert (device + of_no_node, host) == handed_over(graph, **by_hand)
    assert (host > 0) == (remat == "away")


def test_a_node_that_is_not_repeated_is_counted_alike():
    model = tiny_graphs.llama(layers=1)
    del model["nodes"]["blocks"]["repeat"]
    graph = parse(model)
    assert kept(graph, "none") == handed_over(graph)


def test_layers_in_a_row_keep_each_their_own():
    model = tiny_graphs.llama(layers=3)
    block = {key: value for key, value in model["nodes"].pop("blocks").items() if key != "repeat"}
    chain = {f"block_{i}": {**block, "in": f"block_{i - 1}" if i else "embed"} for i in range(3)}
    written_out = parse({**model, "nodes": {**model["nodes"], **chain, "norm": {"kind": "rms_norm", "in": "block_2"}}})
    repeated = {node.name: node.kept for node in activations(parse(tiny_graphs.llama()), ROWS, CONTEXT, "none")}
    apart = {node.name: node.kept for node in activations(written_out, ROWS, CONTEXT, "none")}
    # Written out, the three have their mask and their rotary tables each.
    assert repeated["blocks"] <= sum(apart[name] for name in chain) <= 1.02 * repeated["blocks"]


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_layers_keep_their_inputs(name):
    build, _ = MODELS[name]
    by_name = {node.name: node for node in activations(parse(build(layers=3)), ROWS, CONTEXT, "block")}
    inputs = 3 * ROWS * CONTEXT * 32 * 2
    assert inputs <= by_name["blocks"].kept < 1.5 * inputs


@pytest.mark.parametrize("encoder", IMAGES)
def test_a_branch_without_gradient_keeps_nothing(encoder):
    graph = parse(tiny_graphs.byol(**IMAGES[encoder]))
    for setting, by_hand in (REMATS["none"], REMATS["full"]):
        by_name = {node.name: node.kept for node in activations(graph, ROWS, CONTEXT, setting)}
        assert by_name["views"] == by_name["target"] == by_name["constant"] == 0
        assert 0 < sum(by_name.values()) == handed_over(graph, **by_hand)[0]


def test_more_recomputation_keeps_less():
    graph = parse(tiny_graphs.llama(layers=8))
    none, dots, block, full = (activations(graph, ROWS, CONTEXT, policy)[1] for policy in POLICIES)
    assert none.kept > 1.5 * dots.kept > 3 * block.kept > 5 * full.kept
    assert none.recomputed == 0 < dots.recomputed < block.recomputed < full.recomputed


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_computed_again_is_what_a_layer_would_have_kept(name):
    def blocks(layers, remat):
        model = MODELS[name][0](layers=layers)
        model["nodes"]["blocks"]["scan"] = False
        graph = parse(model)
        return next(node for node in activations(graph, ROWS, CONTEXT, remat) if node.name == "blocks")

    of_a_layer = blocks(4, "none").kept - blocks(3, "none").kept
    block, full = blocks(3, "block"), blocks(3, "full")
    # The backward pass holds a few conversions of its own beside what it would have been handed.
    assert of_a_layer - ROWS * CONTEXT * 32 * 2 - 256 <= block.recomputed < 1.2 * of_a_layer
    # Around its layers, the node then has the inputs of all but the first, and its mask.
    assert full.kept + full.recomputed == pytest.approx(block.kept + block.recomputed, abs=2 * ROWS * CONTEXT * 4)

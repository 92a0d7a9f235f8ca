"""Bytes kept for the backward pass, to the byte what differentiating the whole graph hands over."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies

import tiny_graphs
from affinage.config.parallel import RematSettings
from affinage.model import Call, abstract_averages, abstract_params, apply, parse
from affinage.model.activations import activations
from affinage.model.remat import with_remat

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
    """Bytes from the forward to the backward pass without the weights: those on the device, those on the host."""
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


AWAY = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["query"],
    names_which_can_be_offloaded=["block_input", "ffn_hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
MODELS = {
    "llama": tiny_graphs.llama(layers=2, scan=True),
    "dropout": tiny_graphs.gpt2(dropout=0.1),
    "experts": tiny_graphs.moe(scan=False),
}
# A recipe's setting, and what JAX is given for it.
REMATS = {
    "none": ("none", {}),
    "dots": ("dots", {"remat": with_remat(Call(), "dots").remat}),
    "full": ("full", {"remat": policies.nothing_saveable, "remat_nodes": True}),
    "kept": (
        RematSettings(keep=("attended", "ffn_up")),
        {"remat": policies.save_only_these_names("attended", "ffn_up")},
    ),
    "away": (RematSettings(keep=("query",), offload=("block_input", "ffn_hidden")), {"remat": AWAY}),
}
WITH = [*(("llama", remat) for remat in REMATS), ("dropout", "none"), ("experts", "away")]


@pytest.mark.parametrize(("name", "remat"), WITH)
def test_it_is_what_differentiation_hands_over(name, remat):
    graph, (setting, by_hand) = parse(MODELS[name]), REMATS[remat]
    device, host = kept(graph, setting)
    # Of no node is the count by which the loss weighs the losses of a mixture of experts.
    assert (device + 4 * (name == "experts"), host) == handed_over(graph, **by_hand)
    assert (host > 0) == (remat == "away")


def test_a_node_that_is_not_repeated_is_counted_alike():
    model = tiny_graphs.llama(layers=1)
    del model["nodes"]["blocks"]["repeat"]
    assert kept(parse(model), "none") == handed_over(parse(model))


@pytest.mark.parametrize("encoder", [{"hidden": [24]}, {"net": "conv", "hidden": [4, 8]}], ids=["mlp", "conv"])
def test_a_branch_without_gradient_keeps_nothing(encoder):
    graph = parse(tiny_graphs.byol(**encoder))
    by_name = {node.name: node.kept for node in activations(graph, ROWS, CONTEXT, "none")}
    assert by_name["views"] == by_name["target"] == by_name["constant"] == 0
    assert 0 < sum(by_name.values()) == handed_over(graph)[0]

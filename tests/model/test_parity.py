"""Logits and gradients against transformers' own implementations, with random weights, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tiny_graphs
from affinage.hub.families import family_of
from affinage.model import ApplyConfig, apply, parse
from tiny_models import fused_experts, in_transformers

TOLERANCE = 1e-4  # of the largest element


def relative(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


NEAR = {"kv_heads": 2, "window": 9}
PLAIN = {"load_balance_weight": 0.0, "z_loss_weight": 0.0}  # the cross-entropy alone, as theirs
LINEAR = {"theta": 100, "scaling": {"kind": "linear", "factor": 2.0}}
WIDE = {"kv_heads": 1, "bias": True, "head_dim": 12, "rope": LINEAR}
LLAMA3 = {"theta": 100, "scaling": {"kind": "llama3", "factor": 8.0, "original_context": 16}}
MODELS = {
    "llama with grouped queries, tied": tiny_graphs.llama(layers=2, attention={"kv_heads": 2}, tied=True),
    "llama with biases, wide heads, one kv head and stretched positions": tiny_graphs.llama(layers=1, attention=WIDE),
    "qwen2": tiny_graphs.llama(layers=1, attention={"kv_heads": 2, "bias": "qkv"}),
    "qwen3": tiny_graphs.llama(layers=1, attention={"kv_heads": 2, "qk_norm": True, "rope": {"theta": 1e6}}),
    "mistral": tiny_graphs.llama(layers=1, attention=NEAR),
    "llama 3 with a longer context": tiny_graphs.llama(layers=1, attention={"rope": LLAMA3}),
    "mixtral with a window and 3 of 5 experts": tiny_graphs.moe(layers=1, attention=NEAR, experts=5, top_k=3, **PLAIN),
    "gpt2": tiny_graphs.gpt2(layers=1),
}
RARER = "qwen2", "mistral"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in RARER else n for n in MODELS])
def test_logits_and_gradients_equal_those_of_transformers(name):
    graph = parse(MODELS[name])
    params = tiny_graphs.random_params(graph, seed=3)
    tokens = np.random.default_rng(0).integers(0, tiny_graphs.VOCABULARY, (2, 24))
    theirs = in_transformers(graph, params, context=64)
    output = theirs(torch.tensor(tokens), labels=torch.tensor(tokens))
    output.loss.backward()

    def loss(params):
        outputs = apply(graph, params, {"tokens": jnp.asarray(tokens, jnp.int32)}, ApplyConfig())
        return outputs.values[graph.loss].mean(), outputs.values[graph.logits].array()

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert relative(logits, output.logits.detach()) < TOLERANCE
    assert abs(float(value) - output.loss.item()) < TOLERANCE * output.loss.item()
    expected = {parameter: tensor.grad for parameter, tensor in theirs.named_parameters()}
    for parameter, gradient in fused_experts(family_of(graph).to_tensors(gradients, graph)).items():
        assert relative(gradient, expected[parameter]) < TOLERANCE, parameter

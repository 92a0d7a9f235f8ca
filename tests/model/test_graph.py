"""What a recipe may say of a model, a mistake with its line, and kinds of one's own."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field

import tiny_graphs
from affinage.config.training import LoraSettings
from affinage.model import Adapters, ApplyConfig, abstract_params, apply, logical_axes, parse
from affinage.model.forward import for_decoding
from affinage.model.layer import LAYERS, Layer, ParamSpec, register_layer
from run_affinage import refused


def changed(*changes):
    """The tiny Llama with values put at dotted paths below `nodes`."""
    model = copy.deepcopy(tiny_graphs.llama())
    for dotted, value in changes:
        *path, last = dotted.split(".")
        place = model["nodes"]
        for key in path:
            place = place[key]
        place[last] = value
    return model


UNEMBED = {"kind": "unembed", "in": "norm"}
MIXTURE = {"kind": "moe", "experts": 4, "top_k": 2, "width": 24}


@pytest.mark.parametrize(("changes", "where", "named"), [
    ([("blocks.repaet", 3)], "blocks/repaet", "Did you mean `model.nodes.blocks.repeat`?"),
    ([("blocks.attention.kv_head", 2)], "blocks/attention/kv_head", "`attention.kv_heads`"),
    ([("blocks.ffn.kind", "swiglo")], "blocks/ffn/kind", "swiglu"),
    ([("blocks.attention.kv_heads", 3)], "blocks/attention", "3 kv_heads"),
    ([("norm.in", "block")], "norm/in", "`blocks`"),
    ([("norm.in", ["blocks", "embed"])], "norm/in", "1 inputs (x)"),
    ([("loss.in", ["tokens", "logits"])], "loss", "[B, S] int"),
    ([("blocks.in", "norm")], "in", "norm -> blocks"),
    ([("blocks.in", "tokens")], "blocks", "[B, S, width]"),
    ([("spare", {"kind": "rms_norm", "in": "embed"})], "spare", "`spare`"),
    ([("tokens", {"kind": "rms_norm", "in": "embed"})], "tokens", "input"),
    ([("loss.kind", "rms_norm"), ("loss.in", "norm")], "nodes", "one loss"),
    ([("logits.tied", "embed"), ("logits.vocab", 3)], "logits", "97"),
    ([("embed.vocab", "auto")], "embed/vocab", "tokenizer"),
    ([("embed", {"kind": "rms_norm", "in": "tokens"}), ("logits", UNEMBED)], "logits", "no embedding node"),
    ([("blocks.ffn", MIXTURE | {"top_k": 5})], "ffn", "4 experts"),
    ([("blocks.ffn", MIXTURE | {"capacity": 1.0})], "ffn/capacity", "capacity_factor"),
    ([("blocks.ffn", MIXTURE | {"activation": "swiglo"})], "ffn/activation", "swiglu"),
], ids=str)  # fmt: skip
def test_a_mistake_is_told_with_its_line_and_what_to_do(changes, where, named):
    caught = refused(parse, changed(*changes), "/".join)  # in place of a recipe's line numbers
    assert caught.where.endswith(where) and named in str(caught)


@pytest.mark.parametrize("model", [tiny_graphs.llama(tied=True, scan=True), tiny_graphs.gpt2()], ids=["llama", "gpt2"])
def test_a_graph_is_the_same_written_out_and_in_any_order(model):
    graph = parse(model)
    backwards = {**graph.to_dict(), "nodes": dict(reversed(graph.to_dict()["nodes"].items()))}
    assert parse(backwards) == graph and hash(parse(backwards)) == hash(graph)
    assert [node.name for node in parse(backwards).nodes] == [node.name for node in graph.nodes]


def test_a_kind_of_ones_own_stands_in_a_graph_like_any_other():
    @register_layer("test_gate")
    class Gate(Layer):
        """Two inputs, mixed by a learned weight per channel."""

        takes = ("first", "second")
        start: float = Field(default=0.5, ge=0, le=1)

        def parameters(self, inputs):
            return {"mix": ParamSpec((inputs[0].width,), ("embed",), init="ones", decay=False), "norm": {}}

        def apply(self, params, inputs, context):
            assert params["norm"] == {}
            mix = self.start * params["mix"][None, None]
            return mix * inputs[0] + (1 - mix) * inputs[1]

    try:
        mixed = {"kind": "test_gate", "in": ["blocks", "embed"], "start": 0.25}
        model = changed(("mixed", mixed), ("norm.in", "mixed"), ("blocks.repeat", 1))
        graph = parse(model)
        assert parse(graph.to_dict()) == graph
        assert logical_axes(graph)["mixed"] == {"mix": ("embed",), "norm": {}}
        params, batch = tiny_graphs.random_params(graph), {"tokens": jnp.zeros((1, 3), jnp.int32)}
        params["mixed"]["mix"] = jnp.ones(32)
        values = jax.jit(lambda params: apply(graph, params, batch, ApplyConfig(until="mixed")).values)(params)
        alone, on_gpu = parse(changed(("blocks.repeat", None))), ApplyConfig(platform="gpu", capability=None)
        program = jax.make_jaxpr(lambda params: apply(alone, params, batch, on_gpu).values)(abstract_params(alone))
        assert "remat" in str(program)  # a layer by itself is like one of several
        np.testing.assert_allclose(values["mixed"], 0.25 * values["blocks"] + 0.75 * values["embed"], rtol=1e-6)
        apply(graph, for_decoding(graph, params, jnp.float32), batch, ApplyConfig(until="mixed"))
        adapters = Adapters(graph, LoraSettings())
        merged = adapters.merged(params, tiny_graphs.random_params(adapters))
        assert jax.tree.structure(merged) == jax.tree.structure(params)
        mixed["start"] = 2
        refused(parse, model, match="less than or equal to 1")
        with pytest.raises(ValueError, match="already registered"):
            register_layer("test_gate")(type("Another", (Layer,), {}))
    finally:
        del LAYERS["test_gate"]

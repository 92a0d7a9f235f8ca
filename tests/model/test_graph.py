"""What a recipe may say of a model, and what is said back about a mistake."""

import copy
import time
from typing import Any

import pytest

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Graph, parse
from affinage.model.analysis import parameters
from affinage.recipe.load import load_recipe


def lined(path):
    """Stands in for a recipe's line numbers."""
    return "recipe.yaml:" + "/".join(path)


def changed(*changes: tuple[str, Any]) -> Any:
    """The tiny Llama with values put at dotted paths below `nodes`."""
    model = copy.deepcopy(tiny_graphs.llama())
    for dotted, value in changes:
        *path, last = dotted.split(".")
        place = model["nodes"]
        for key in path:
            place = place[key]
        place[last] = value
    return model


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ([("blocks.kind", "transfomer_block")], "blocks/kind", "Did you mean `transformer_block`?"),
        ([("blocks.repaet", 3)], "blocks/repaet", "Did you mean `model.nodes.blocks.repeat`?"),
        (
            [("blocks.attention.kv_head", 2)],
            "blocks/attention/kv_head",
            "Did you mean `model.nodes.blocks.attention.kv_heads`?",
        ),
        ([("blocks.ffn.kind", "swiglo")], "blocks/ffn/kind", "Did you mean `swiglu`?"),
        ([("blocks.ffn.width", "wide")], "blocks/ffn/width", "a whole number"),
        ([("blocks.attention.kv_heads", 3)], "blocks/attention", "4 heads do not divide into 3 kv_heads"),
        ([("blocks.attention.heads", 5)], "blocks", "width 32 does not divide into 5 heads"),
        ([("blocks.repeat", 0)], "blocks/repeat", "positive whole number"),
        ([("norm.in", "block")], "norm/in", "Did you mean `blocks`?"),
        ([("norm.in", ["blocks", "embed"])], "norm/in", "rms_norm takes 1 inputs (x)"),
        ([("loss.in", ["logits"])], "loss/in", "takes 2 inputs (logits, tokens)"),
        ([("loss.in", ["tokens", "logits"])], "loss", "expected token ids [B, S] int as second input"),
        ([("blocks.in", "norm")], "in", "cycle: blocks -> norm -> blocks"),
        ([("embed.in", "embed")], "embed/in", "cycle: embed -> embed"),
        ([("blocks.in", "tokens")], "blocks", "expected an input [B, S, width], got [B, S] int"),
        ([("logits.repeat", 2)], "logits", "cannot repeat: it turns [B, S, 32] into [B, S, 97]"),
        ([("spare", {"kind": "rms_norm", "in": "embed"})], "spare", "node `spare` is dead"),
        ([("tokens", {"kind": "rms_norm", "in": "embed"})], "tokens", "has the name of an input"),
        ([("loss.kind", "rms_norm"), ("loss.in", "norm")], "nodes", "exactly one loss node"),
        ([("logits.tied", "blocks")], "logits", "`blocks` is not an embedding node"),
        ([("logits.tied", "embed"), ("logits.vocab", 3)], "logits", "vocab 3 differs from the 97"),
        ([("embed.vocab", "auto")], "embed/vocab", "tokenizer's vocabulary"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_what_to_do(changes, where, message):
    with pytest.raises(UserError) as caught:
        parse(changed(*changes), lined)
    assert caught.value.where.endswith(where)
    assert message in str(caught.value)


def test_the_line_is_the_one_in_the_file(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: gpt2-124m\nname: mine\nmodel:\n  nodes:\n    blocks:\n      ffn: {widht: 3}\n")
    loaded = load_recipe(recipe)
    with pytest.raises(UserError, match=r"Did you mean `model\.nodes\.blocks\.ffn\.width`") as caught:
        parse(loaded.recipe.model, loaded.locate)
    assert caught.value.where.endswith("mine.yaml:6")


def test_nodes_are_ordered_by_what_they_take_however_they_are_written():
    model = tiny_graphs.llama()
    backwards = {"inputs": ["tokens"], "nodes": dict(reversed(model["nodes"].items()))}
    assert [node.name for node in parse(backwards).nodes] == ["embed", "blocks", "norm", "logits", "loss"]


@pytest.mark.parametrize("model", [tiny_graphs.llama(), tiny_graphs.llama(tied=True, scan=True), tiny_graphs.gpt2()])
def test_a_graph_written_out_is_the_same_graph(model):
    graph = parse(model)
    again = parse(graph.to_dict())
    assert again == graph
    assert hash(again) == hash(graph)


def test_auto_vocabulary_is_the_one_in_use():
    graph = parse(changed(("embed.vocab", "auto"), ("logits.vocab", "auto")), vocabulary=300)
    assert (graph.vocabulary, graph.width) == (300, 32)


def recipe_graph(name: str, **logits: Any) -> Graph:
    loaded = load_recipe(name)
    model = copy.deepcopy(loaded.recipe.model)
    model["nodes"]["logits"] |= logits
    return parse(model, loaded.locate)


@pytest.mark.parametrize(
    ("name", "untied", "tied"),
    [
        ("julian-100m", 142_659_200, 110_659_200),
        ("julian-250m", 337_310_720, 286_110_720),
        ("julian-600m", 599_906_560, 535_906_560),
        ("gpt2-124m", 163_037_184, 124_439_808),
    ],
)
def test_published_configurations_have_the_published_number_of_parameters(name, untied, tied):
    assert parameters(recipe_graph(name, tied=False)).total == untied
    assert parameters(recipe_graph(name, tied=True)).total == tied


def test_a_graph_of_340b_parameters_is_analysed_at_once():
    model = changed(
        ("embed", {"kind": "embedding", "in": "tokens", "vocab": 256_000, "width": 18432}),
        ("blocks.repeat", 96),
        ("blocks.attention", {"heads": 96, "kv_heads": 8, "rope": {}}),
        ("blocks.ffn", {"kind": "relu2", "width": 73728}),
    )
    width = 18432
    layer = 2 * width * width + 2 * width * 8 * 192 + 2 * width * 73728 + 2 * width
    start = time.thread_time()  # of the processor, whatever else it does
    assert parameters(parse(model)).total == 2 * 256_000 * width + 96 * layer + width
    assert time.thread_time() - start < 2

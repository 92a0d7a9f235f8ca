"""What a recipe may say of a model, a mistake with its line, and kinds of one's own."""

import copy
from typing import Any

import pytest

import tiny_graphs
from affinage.errors import UserError
from affinage.model import parse


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
    ("changes", "where", "named"),
    [
        ([("blocks.repaet", 3)], "blocks/repaet", "Did you mean `model.nodes.blocks.repeat`?"),
        ([("blocks.attention.kv_head", 2)], "blocks/attention/kv_head", "model.nodes.blocks.attention.kv_heads"),
        ([("blocks.ffn.kind", "swiglo")], "blocks/ffn/kind", "swiglu"),
        ([("blocks.ffn.width", "wide")], "blocks/ffn/width", "integer"),
        ([("blocks.attention.kv_heads", 3)], "blocks/attention", "3 kv_heads"),
        ([("blocks.repeat", 0)], "blocks/repeat", "positive"),
        ([("norm.in", "block")], "norm/in", "`blocks`"),
        ([("norm.in", ["blocks", "embed"])], "norm/in", "1 inputs (x)"),
        ([("loss.in", ["tokens", "logits"])], "loss", "[B, S] int"),
        ([("blocks.in", "norm")], "in", "blocks -> norm -> blocks"),
        ([("blocks.in", "tokens")], "blocks", "[B, S, width]"),
        ([("spare", {"kind": "rms_norm", "in": "embed"})], "spare", "`spare`"),
        ([("tokens", {"kind": "rms_norm", "in": "embed"})], "tokens", "input"),
        ([("loss.kind", "rms_norm"), ("loss.in", "norm")], "nodes", "one loss"),
        ([("logits.tied", "embed"), ("logits.vocab", 3)], "logits", "97"),
        ([("embed.vocab", "auto")], "embed/vocab", "tokenizer"),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_its_line_and_what_to_do(changes, where, named):
    with pytest.raises(UserError) as caught:
        parse(changed(*changes), lined)
    assert caught.value.where.endswith(where)
    assert named in str(caught.value)

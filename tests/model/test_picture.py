"""The drawing of a graph is well-formed, has every node once, and draws no edge through a box."""

import re
from xml.etree import ElementTree

import pytest

import tiny_graphs
from affinage.model import parse
from affinage.model.picture import BOX, HEIGHT, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def _branched():
    model = tiny_graphs.llama(layers=18)
    nodes = model["nodes"]
    for name, source in (("left", "embed"), ("right", "left"), ("other", "embed")):
        nodes[name] = {"kind": "rms_norm", "in": source}
    nodes["blocks"]["in"] = "right"
    nodes["norm"]["in"] = "blocks"
    nodes["other"] |= {"in": "norm"}
    nodes["logits"]["in"] = "other"
    return model


@pytest.mark.parametrize("model", [tiny_graphs.llama(layers=18), tiny_graphs.gpt2(), _branched()])
def test_every_node_stands_there_once_and_edges_pass_by(model):
    graph = parse(model)
    root = ElementTree.fromstring(svg(graph))
    words = [element.text for element in root.iter(f"{NAMESPACE}text")]
    for name in ("tokens", *(node.name for node in graph.nodes)):
        assert words.count(name) == 1
    assert f"× {graph['blocks'].repeat}" in words
    boxes = [(float(r.get("x")), float(r.get("y"))) for r in root.iter(f"{NAMESPACE}rect")]
    arrows = [p.get("d") for p in root.iter(f"{NAMESPACE}path") if p.get("marker-end")]
    assert len(arrows) == sum(len(node.inputs) for node in graph.nodes)
    for arrow in arrows:
        for x, top in re.findall(r"(\d+) (\d+)V\d+", arrow):  # where an edge passes a layer
            assert not any(left <= float(x) <= left + BOX and abs(float(top) - y) < HEIGHT for left, y in boxes)


def test_shared_and_followed_weights_are_dotted():
    assert svg(parse(tiny_graphs.byol())).count('class="weights"') == 2
    drawn = svg(parse(tiny_graphs.gpt2()))
    assert drawn.count('class="weights"') == 1 and svg(parse(tiny_graphs.llama())).count('class="weights"') == 0

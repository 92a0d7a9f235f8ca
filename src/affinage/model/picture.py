"""A drawing of the graph as SVG: one row of boxes per layer, every edge downwards, none through a box.

After Sugiyama, Tagawa and Toda (1981): a node's layer is the longest path to it, an edge over several layers goes
through an empty place in each of them, and a few sweeps put every place at the mean of its neighbours.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape

from affinage.model.graph import Graph

BOX, HEIGHT = 200, 52  # pixels
LANE = 64  # width of the place where an edge passes a layer
GAP, ROW = 28, 100  # between places of a layer; between the tops of two layers
MARGIN = 24
SWEEPS = 9  # odd: the last one goes down, and so keeps chains straight

_STYLE = """\
text{font:13px system-ui,sans-serif;fill:#1f2430;text-anchor:middle}.kind{font-size:11px;fill:#5b6472}
rect{fill:#fff;stroke:#5b6472}.input{fill:#eef2f7}.repeat{fill:#f7f9fc}
path{fill:none;stroke:#5b6472;stroke-width:1.3}.weights{stroke-dasharray:3 4}.times{text-anchor:start;font-weight:600}
@media(prefers-color-scheme:dark){svg{background:#14181f}text{fill:#e6e9ef}.kind{fill:#a3adbb}rect{fill:#1d232d}
.input{fill:#26303d}.repeat{fill:#191e27}}"""


@dataclass
class _Place:
    """Where a box stands or, without a name, where an edge passes. `x` is its middle."""

    layer: int
    name: str = ""
    x: float = 0.0
    above: list["_Place"] = field(default_factory=list)
    below: list["_Place"] = field(default_factory=list)

    @property
    def width(self) -> int:
        return BOX if self.name else LANE


def svg(graph: Graph) -> str:
    """The drawing; a repeated node is a stack with the number of its layers.

    A dotted line leads from parameters to a node that shares them, or that follows them with a moving average.
    """
    boxes, edges = _places(graph)
    layers = _layers(boxes, edges)
    for sweep in range(SWEEPS):
        _arrange(layers if sweep % 2 == 0 else layers[::-1], down=sweep % 2 == 0)
    places = [place for layer in layers for place in layer]
    shift = MARGIN - min(place.x - place.width / 2 for place in places)
    for place in places:
        place.x += shift
    width = (
        max(place.x + place.width / 2 for place in places) + MARGIN + LANE
    )  # the number of layers stands at the right
    height = 2 * MARGIN + (len(layers) - 1) * ROW + HEIGHT
    parts = [_edge(edge) for edge in edges]
    parts += [_weights(boxes[node.kind.shares], boxes[node.name]) for node in graph.nodes if node.kind.shares]
    parts += [_weights(boxes[followed], boxes[name]) for name, trees in graph.averages.items() for followed in trees]
    parts += [_box(graph, place) for place in boxes.values()]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
    head += f'height="{height}" role="img">'
    arrow = '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    arrow += '<path d="M0 0L8 4L0 8z" style="fill:#5b6472;stroke:none"/></marker></defs>'
    return "\n".join([head, f"<title>The model as a graph</title><style>{_STYLE}</style>", arrow, *parts, "</svg>\n"])


def _places(graph: Graph) -> tuple[dict[str, _Place], list[list[_Place]]]:
    """Boxes by name, and of every edge the places it goes through, from a box to a box."""
    boxes = {name: _Place(0, name) for name, _ in graph.inputs}
    for node in graph.nodes:
        boxes[node.name] = _Place(1 + max(boxes[source].layer for source in node.inputs), node.name)
    edges = []
    for node in graph.nodes:
        for source in node.inputs:
            start, end = boxes[source], boxes[node.name]
            edges.append([start, *(_Place(layer) for layer in range(start.layer + 1, end.layer)), end])
    return boxes, edges


def _layers(boxes: dict[str, _Place], edges: list[list[_Place]]) -> list[list[_Place]]:
    layers: list[list[_Place]] = [[] for _ in range(1 + max(place.layer for place in boxes.values()))]
    for place in [*boxes.values(), *(place for edge in edges for place in edge[1:-1])]:
        layers[place.layer].append(place)
    for edge in edges:
        for upper, lower in pairwise(edge):
            upper.below.append(lower)
            lower.above.append(upper)
    return layers


def _arrange(layers: list[list[_Place]], *, down: bool) -> None:
    """Put every place at the mean of its neighbours in the layer before, then apart as far as they need."""
    for layer in layers:
        wanted = {}
        for place in layer:
            near = place.above if down else place.below
            wanted[id(place)] = sum(other.x for other in near) / len(near) if near else place.x
        layer.sort(key=lambda place: (wanted[id(place)], not place.name))
        right = float("-inf")
        for place in layer:
            place.x = max(wanted[id(place)], right + GAP + place.width / 2)
            right = place.x + place.width / 2
        excess = sum(place.x - wanted[id(place)] for place in layer) / len(layer)
        for place in layer:
            place.x -= excess


def _top(place: _Place) -> float:
    return MARGIN + place.layer * ROW


def _edge(edge: list[_Place]) -> str:
    start, end = edge[0], edge[-1]
    at_end = end.x + 24 * (end.above.index(edge[-2]) - (len(end.above) - 1) / 2)
    x, y = start.x, _top(start) + HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    for place in edge[1:]:
        next_x, next_y = (at_end if place is end else place.x), _top(place)
        middle = (y + next_y) / 2
        path += f"C{x:.0f} {middle:.0f} {next_x:.0f} {middle:.0f} {next_x:.0f} {next_y:.0f}"
        x, y = next_x, next_y + HEIGHT
        path += "" if place is end else f"V{y:.0f}"
    return f'<path d="{path}" marker-end="url(#a)"/>'


def _weights(start: _Place, end: _Place) -> str:
    """Between the sides of two boxes that face each other; of boxes one above the other, between their left sides."""
    y, end_y = _top(start) + HEIGHT / 2, _top(end) + HEIGHT / 2
    beside = abs(start.x - end.x) >= BOX
    side = BOX / 2 if beside and start.x < end.x else -BOX / 2
    x, end_x = start.x + side, end.x - side if beside else end.x + side
    bend = (x + end_x) / 2 if beside else min(x, end_x) - MARGIN
    curve = f"M{x:.0f} {y:.0f}C{bend:.0f} {y:.0f} {bend:.0f} {end_y:.0f} {end_x:.0f} {end_y:.0f}"
    return f'<path class="weights" d="{curve}"/>'


def _box(graph: Graph, place: _Place) -> str:
    x, y = place.x - BOX / 2, _top(place)
    node = next((node for node in graph.nodes if node.name == place.name), None)  # an input is none
    repeated = node is not None and node.repeat is not None
    look = "repeat" if repeated else "input" if node is None else "node"
    stack = [
        f'<rect class="{look}" x="{x + offset:.0f}" y="{y + offset:.0f}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
        for offset in ((6, 3, 0) if repeated else (0,))
    ]
    detail = f"{node.kind.kind_name} · {graph.shapes[place.name]}" if node else str(graph.shapes[place.name])
    words = f'<text x="{place.x:.0f}" y="{y + 22:.0f}">{escape(place.name)}</text>'
    words += f'<text class="kind" x="{place.x:.0f}" y="{y + 40:.0f}">{escape(detail)}</text>'
    if repeated and node:
        words += f'<text class="times" x="{x + BOX + 12:.0f}" y="{y + 30:.0f}">× {node.repeat}</text>'
    return "".join(stack) + words

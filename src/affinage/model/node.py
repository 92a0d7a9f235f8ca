"""A node of the graph."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from affinage.model.kind import NodeKind


@dataclass(frozen=True)
class Node:
    """A function of other nodes' values, `repeat` times in a row with parameters of its own each time."""

    name: str
    kind: NodeKind
    inputs: tuple[str, ...]
    repeat: int | None = None  # None: once, and its parameters have no layers axis
    scan: bool | Literal["auto"] = "auto"  # one compiled body for all repeats; auto: except on CPU

    @property
    def layers(self) -> int:
        """How many times the function is applied."""
        return self.repeat or 1

    def scans(self, platform: str) -> bool:
        """Whether the repeats are a scan when compiled for this platform. On CPUs a scan costs 15 to 25 %."""
        return platform != "cpu" if self.scan == "auto" else self.scan


def ancestors(nodes: Mapping[str, Node], name: str) -> Collection[str]:
    """Names of the node itself and of all nodes that it is computed from."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found and current in nodes:
            found.add(current)
            waiting.extend(nodes[current].inputs)
    return found

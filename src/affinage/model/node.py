"""A node of the graph."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from affinage.model.kind import NodeKind

_UNROLLED = 48  # layers, at most, that are compiled one by one for GPUs


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
        """Whether the repeats are a scan when compiled for this platform.

        On CPUs and GPUs a scan costs 10 to 25 %, as it copies what layers keep into arrays of all of them. GPUs scan
        very deep models only, whose compilation would take long.
        """
        if self.scan != "auto":
            return self.scan
        return platform == "tpu" or (platform == "gpu" and self.layers > _UNROLLED)


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

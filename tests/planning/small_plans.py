"""Plans of `small.yaml`, which all tests of planning share."""

import functools
from pathlib import Path
from typing import Any

from affinage.config.load import load_recipe
from affinage.config.recipe import Recipe
from affinage.hardware.chips import find_slice
from affinage.model import Graph
from affinage.parallel.sharding import AXES
from affinage.planning.estimate import links_of
from affinage.planning.plan import Plan, make_plan, planned_graph

SMALL = str(Path(__file__).with_name("small.yaml"))
TUNED = "{steps: 50, batch_size: 8, sources: [chats.jsonl], schedule: {peak_lr: 1.0e-4, min_lr: 0}, seq_len: 256}"


def planned(recipe: str, *overrides: str) -> tuple[Recipe, Graph]:
    """What is planned of a recipe: its settings and its model."""
    loaded = load_recipe(recipe, overrides)
    return loaded.recipe, planned_graph(loaded)


@functools.cache
def plan_of(recipe: str, name: str, *overrides: str) -> Plan:
    return make_plan(*planned(recipe, *overrides), find_slice(name))


def blocks_of(*overrides: str, name: str = "v4-8") -> Any:
    """The layers' part of the time of a step."""
    return next(node for node in plan_of(SMALL, name, *overrides).time.nodes if node.name == "blocks")


def links(name: str, **sizes: int) -> Any:
    """Those of every axis of a mesh."""
    return links_of(find_slice(name), dict.fromkeys(AXES, 1) | sizes)

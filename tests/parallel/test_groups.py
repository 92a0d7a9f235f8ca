"""Stages of unequal shape on unequal groups of devices are the same step as one program on one device."""

import sys
from pathlib import Path

import jax
import meshes
import numpy as np
import pytest

from affinage.errors import UserError
from affinage.model import Graph, parse
from affinage.parallel import make_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "unequal_stages"))

from unequal_stages import Group, GroupedTraining

UNEQUAL = (("early", {"data": 2}), ("loss", {"data": 1}))


def graph(*, tied: bool = False) -> Graph:
    """Two layers that differ, the first with dropout."""
    nodes = meshes.graph("dense", 1).to_dict()["nodes"]
    early = nodes["blocks"] | {"dropout": 0.1, "ffn": {"kind": "swiglu", "width": 48}}
    changed = {"early": early, "blocks": nodes["blocks"] | {"in": "early"}}
    changed["logits"] = nodes["logits"] | {"tied": "embed" if tied else False}
    return parse({"inputs": ["tokens"], "nodes": nodes | changed})


def grouped(model: Graph, *ends: tuple[str, dict[str, int]]) -> GroupedTraining:
    """Groups of as many devices as their meshes have, one after the other."""
    devices, groups = list(jax.devices()), []
    for until, sizes in ends:
        groups.append(Group(until, make_mesh(sizes, devices[: max(sizes.values())])))
        devices = devices[max(sizes.values()) :]
    trained = meshes.program(model, {"data": 1}, micro_batches=2, parallel={}).job.settings
    return GroupedTraining(model, trained, groups, seed=3)


@pytest.mark.full
def test_steps_equal_those_of_one_program_and_a_sick_one_is_left_out_by_every_stage():
    two = grouped(graph(), *UNEQUAL)
    states, expected = two.begin(), meshes.on_one_device(graph(), 2)
    for number in range(2):
        states, found = two.step(states, meshes.Feed().batch(number))
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values[number], rtol=1e-5, err_msg=f"{name} of step {number}")
    assert len({device for each in states for device in each.step.sharding.device_set}) == 3

    scale = states[1].params["norm"]["scale"].at[0].set(np.inf)
    states[1] = states[1]._replace(params={**states[1].params, "norm": {"scale": scale}})
    before = [jax.device_get(state.params) for state in states]
    after, metrics = two.step(states, meshes.Feed().batch(0))
    assert float(metrics["skipped"]) == 1
    for old, new in zip(before, after, strict=True):
        jax.tree.map(np.testing.assert_array_equal, old, jax.device_get(new.params))


@pytest.mark.parametrize(
    ("ends", "tied", "named"),
    [([("early", {"data": 2}), ("logits", {"data": 2})], False, "graph"), (UNEQUAL, True, "weights")],
    ids=["no loss", "tied"],
)
def test_what_is_no_cut_is_refused(ends: list, tied: bool, named: str):
    with pytest.raises(UserError, match=named):
        grouped(graph(tied=tied), *ends)

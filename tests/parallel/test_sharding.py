"""Meshes and the sharding table: what is split, what wins a collision, where a model is served, what is refused."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tiny_graphs
from affinage.model import abstract_params, apply, logical_axes, parse
from affinage.model.apply_config import ApplyConfig
from affinage.parallel.sharding import MeshLayout, make_mesh, serving_layout
from run_affinage import refused

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "unequal_stages"))

from unequal_stages import Group, GroupedTraining


def mesh(**sizes: int | str) -> jax.sharding.Mesh:
    return make_mesh(sizes, jax.devices())


def test_auto_takes_the_devices_that_are_left_and_one_host_may_leave_some():
    assert mesh(data="auto", tensor=2).shape["data"] == 4
    assert mesh(data=2).size == 2


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "ffn"), P("fsdp", "tensor")),
        (("ffn", "embed"), P("tensor", "fsdp")),
        (("batch", "sequence", "embed"), P(("data", "fsdp"))),  # the rows have fsdp first
        (("layers", "embed", "heads", "head_dim"), P(None, "fsdp", "tensor")),
        (("vocab", "ffn"), P("tensor")),  # tensor splits once
        ((None, "head_dim"), P()),
    ],
    ids=str,
)
def test_the_table(axes: tuple, expected: P):
    assert MeshLayout(mesh(data=2, fsdp=2, tensor=2)).spec(axes) == expected
    assert MeshLayout(mesh(pipeline=1)).spec(axes) == P(), "axes of size one are left out"


def test_a_size_that_does_not_divide_names_the_nearest_that_do():
    weights = {"w": jax.ShapeDtypeStruct((16, 6), jnp.float32)}
    error = refused(MeshLayout(mesh(tensor=4)).param_shardings, {"w": ("embed", "heads")}, weights)
    for named in ("heads = 6 of w", "tensor = 4", "4 or 8"):
        assert named in str(error)
    assert "16 or 32" in str(refused(MeshLayout(mesh(data=2, fsdp=4)).check_rows, 20, 2, match="batch 20"))
    MeshLayout(mesh(data=2, fsdp=4)).check_rows(32, 2)
    refused(MeshLayout(mesh()).check_rows, 3, 2, match="batch 3 does not divide over 2 micro-batches")


def test_a_model_of_stages_is_served_with_its_weights_split_instead():
    graph = meshes.graph("dense", 1)
    params, batch = tiny_graphs.random_params(graph), {"tokens": jnp.asarray(meshes.Feed().batch(0)["tokens"])}
    sizes = {"pipeline": 2, "context": 2, "tensor": 2}
    layout, shardings = serving_layout(sizes, jax.devices(), logical_axes(graph), abstract_params(graph), {})
    assert {axis: size for axis, size in layout.mesh.shape.items() if size > 1} == {"fsdp": 4, "tensor": 2}
    call = ApplyConfig(until=graph.logits)
    run = jax.jit(lambda params: apply(graph, params, batch, call).values[graph.logits].array())
    np.testing.assert_allclose(run(jax.device_put(params, shardings)), run(params), atol=1e-5)


@pytest.mark.full
def test_steps_of_stages_of_unequal_shape_equal_those_of_one_program_and_a_sick_one_is_left_out_by_every_stage():
    """Two layers that differ, the first with dropout, on two devices and on one."""
    nodes, devices = meshes.graph("dense", 1).to_dict()["nodes"], jax.devices()
    early = nodes["blocks"] | {"dropout": 0.1, "ffn": {"kind": "swiglu", "width": 48}}
    nodes |= {"early": early, "blocks": nodes["blocks"] | {"in": "early"}}
    model = parse({"inputs": ["tokens"], "nodes": nodes})
    ends = ("early", make_mesh({"data": 2}, devices[:2])), ("loss", make_mesh({"data": 1}, devices[2:3]))
    settings = meshes.program(model, {"data": 1}, micro_batches=2, parallel={}).job.settings
    two = GroupedTraining(model, settings, [Group(*end) for end in ends], seed=3)
    states, expected = two.begin(), meshes.on_one_device(model, 2)
    for number in range(2):
        states, found = two.step(states, meshes.Feed().batch(number))
        np.testing.assert_allclose([found["loss"], found["grad_norm"]], expected[number], rtol=1e-5)
    assert len({device for each in states for device in each.step.sharding.device_set}) == 3

    scale = states[1].params["norm"]["scale"].at[0].set(np.inf)
    states[1] = states[1]._replace(params={**states[1].params, "norm": {"scale": scale}})
    before = [jax.device_get(state.params) for state in states]
    after, metrics = two.step(states, meshes.Feed().batch(0))
    assert float(metrics["skipped"]) == 1
    for old, new in zip(before, after, strict=True):
        jax.tree.map(np.testing.assert_array_equal, old, jax.device_get(new.params))

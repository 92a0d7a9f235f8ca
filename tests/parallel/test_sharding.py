"""Meshes and the sharding table: what is split, what wins a collision, where a model is served, what is refused."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tiny_graphs
from affinage.errors import UserError
from affinage.model import abstract_params, apply, logical_axes
from affinage.model.apply_config import ApplyConfig
from affinage.parallel import MeshLayout, make_mesh, serving_layout


def mesh(**sizes: int | str) -> jax.sharding.Mesh:
    return make_mesh(sizes, jax.devices())


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_auto_takes_the_devices_that_are_left_and_one_host_may_leave_some():
    assert mesh(data="auto", tensor=2).shape["data"] == 4
    assert mesh(data=2).size == 2


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"data": 16}, "16 devices, .* 8"),
        ({"data": "auto", "tensor": 3}, "divide the 8"),
        ({"data": "auto", "fsdp": "auto"}, "one axis"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(sizes: dict, named: str):
    with pytest.raises(UserError, match=named) as refused:
        mesh(**sizes)
    assert refused.value.where


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
    with pytest.raises(UserError) as refused:
        MeshLayout(mesh(tensor=4)).param_shardings({"w": ("embed", "heads")}, {"w": shape(16, 6)})
    for named in ("heads = 6 of w", "tensor = 4", "4 or 8"):
        assert named in str(refused.value)
    with pytest.raises(UserError, match="batch 20") as refused:
        MeshLayout(mesh(data=2, fsdp=4)).check_rows(20, 2)
    assert "16 or 32" in str(refused.value)
    MeshLayout(mesh(data=2, fsdp=4)).check_rows(32, 2)
    with pytest.raises(UserError, match="batch 3 does not divide over 2 micro-batches"):
        MeshLayout(mesh()).check_rows(3, 2)


def test_a_model_of_stages_is_served_with_its_weights_split_instead():
    graph = meshes.graph("dense", 1)
    params, batch = tiny_graphs.random_params(graph), {"tokens": jnp.asarray(meshes.Feed().batch(0)["tokens"])}
    sizes = {"pipeline": 2, "context": 2, "tensor": 2}
    layout, shardings = serving_layout(sizes, jax.devices(), logical_axes(graph), abstract_params(graph), {})
    assert {axis: size for axis, size in layout.mesh.shape.items() if size > 1} == {"fsdp": 4, "tensor": 2}
    run = jax.jit(
        lambda params: apply(graph, params, batch, ApplyConfig(until=graph.logits)).values[graph.logits].array()
    )
    np.testing.assert_allclose(run(jax.device_put(params, shardings)), run(params), atol=1e-5)

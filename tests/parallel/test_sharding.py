"""Meshes and the sharding table: what is split, what wins a collision, where a model is served, what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from affinage.errors import UserError
from affinage.parallel import make_mesh, param_shardings
from affinage.parallel.sharding import check_rows_divide, partition_spec


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
        ({"rows": 2}, "'rows'"),
        ({"data": 0}, "size 0"),
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
    assert partition_spec(axes, mesh(data=2, fsdp=2, tensor=2)) == expected
    assert partition_spec(axes, mesh(pipeline=1)) == P(), "axes of size one are left out"


def test_a_size_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(UserError) as refused:
        param_shardings(mesh(tensor=4), {"w": ("embed", "heads")}, {"w": shape(16, 6)})
    for named in ("heads = 6 of w", "tensor = 4", "4 or 8"):
        assert named in str(refused.value)
    with pytest.raises(UserError, match="batch 20") as refused:
        check_rows_divide(20, 2, mesh(data=2, fsdp=4))
    assert "16 or 32" in str(refused.value)
    check_rows_divide(32, 2, mesh(data=2, fsdp=4))


@pytest.mark.full
def test_a_mesh_over_two_slices_of_tpus_is_cut_between_them():
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2).devices
    made = make_mesh({"pipeline": 2, "fsdp": 4}, devices)
    for part in range(2):
        stage = made.devices.take(part, axis=made.axis_names.index("pipeline"))
        assert {device.slice_index for device in stage.flat} == {part}

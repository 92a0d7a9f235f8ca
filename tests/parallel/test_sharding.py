"""The sharding table: what is split, what wins a collision, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from affinage.errors import UserError
from affinage.parallel import make_mesh, param_shardings
from affinage.parallel.sharding import check_rows_divide, partition_spec


def mesh(**sizes: int | str) -> jax.sharding.Mesh:
    return make_mesh(sizes, jax.devices())


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_auto_takes_the_devices_that_are_left():
    assert mesh(data="auto", tensor=2).shape["data"] == 4


def test_one_host_may_use_fewer_devices_than_it_has():
    assert mesh(data=2).size == 2


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"data": 16}, "makes 16 devices, but there are 8"),
        ({"data": "auto", "tensor": 3}, "does not divide the 8"),
        ({"data": "auto", "fsdp": "auto"}, "At most one axis may be auto"),
        ({"rows": 2}, "unknown mesh axis 'rows'"),
        ({"data": 0}, "size 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict, said: str):
    with pytest.raises(UserError) as refused:
        mesh(**sizes)
    assert said in str(refused.value)


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
)
def test_the_table(axes: tuple, expected: P):
    assert partition_spec(axes, mesh(data=2, fsdp=2, tensor=2)) == expected


def test_axes_of_size_one_are_left_out_of_specs():
    assert partition_spec(("batch", "sequence", "ffn"), mesh(data=8)) == P("data")


def test_a_size_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(UserError) as refused:
        param_shardings(mesh(tensor=4), {"w": ("embed", "heads")}, {"w": shape(16, 6)})
    message = str(refused.value)
    assert "heads = 6 of w does not divide over tensor = 4" in message
    assert "tensor = 2 works with heads = 6" in message  # 3 would leave a device over
    assert "heads = 4 or 8 works with tensor = 4" in message


def test_a_large_parameter_without_logical_axes_is_refused_where_weights_are_to_be_split():
    axes, shapes = {"a": ("embed", "ffn"), "b": (None, None)}, {"a": shape(64, 64), "b": shape(64, 16)}
    with pytest.raises(UserError, match=r"20\.0% of the parameters.*largest is b"):
        param_shardings(mesh(fsdp=8), axes, shapes)
    param_shardings(mesh(data=8), axes, shapes)  # nothing to split here


def test_small_parameters_may_be_whole():
    axes, shapes = {"a": ("embed", "ffn"), "b": ("head_dim",)}, {"a": shape(64, 64), "b": shape(64)}
    assert param_shardings(mesh(fsdp=8), axes, shapes)["b"].is_fully_replicated


def test_a_batch_that_does_not_divide_names_the_nearest():
    with pytest.raises(UserError) as refused:
        check_rows_divide(20, 2, mesh(data=2, fsdp=4))
    assert "16, 32" in str(refused.value)
    check_rows_divide(32, 2, mesh(data=2, fsdp=4))

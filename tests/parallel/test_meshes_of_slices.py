"""A mesh over several slices of TPUs puts the axes that talk much inside a slice."""

import pytest

from affinage.errors import UserError
from affinage.parallel import make_mesh

pytest.importorskip("libtpu")
from jax.experimental import topologies


@pytest.fixture(scope="module")
def two_slices():
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2).devices


@pytest.mark.parametrize(
    ("sizes", "cut"), [({"data": 2, "tensor": 4}, "data"), ({"pipeline": 2, "fsdp": 4}, "pipeline")]
)
def test_only_one_axis_leaves_a_slice(two_slices, sizes, cut):
    mesh = make_mesh(sizes, two_slices)
    axis = mesh.axis_names.index(cut)
    for part in range(2):
        assert {device.slice_index for device in mesh.devices.take(part, axis=axis).flat} == {part}


def test_a_mesh_that_would_cut_tensor_is_refused(two_slices):
    with pytest.raises(UserError, match="cut along the 2 slices"):
        make_mesh({"tensor": 8}, two_slices)

"""Slices by the clouds' names: chips, devices, wires, and how libtpu calls them."""

import pytest

from affinage.errors import UserError
from affinage.hardware.chips import GiB
from affinage.hardware.slices import find_slice

# name, chips, JAX devices, shape, hosts, libtpu's name. Google's own lists: cloud.google.com/tpu/docs.
KNOWN = [
    ("v4-32", 16, 16, (2, 2, 4), 4, "v4:2x2x4"),
    ("v4-512", 256, 256, (4, 8, 8), 64, "v4:4x8x8"),
    ("v4-8192", 4096, 4096, (16, 16, 16), 1024, "v4:16x16x16"),
    ("v5litepod-16", 16, 16, (4, 4), 4, "v5e:4x4"),
    ("v5e-8", 8, 8, (2, 4), 1, "v5e:2x4"),
    ("v5p-128", 64, 64, (4, 4, 4), 16, "v5:4x4x4"),
    ("v6e-64", 64, 64, (8, 8), 16, "v6e:8x8"),
    ("tpu7x-128", 64, 128, (4, 4, 4), 16, "tpu7x:4x4x4"),
    ("v3-8", 4, 8, (2, 2), 1, ""),
    ("h100x8", 8, 8, (1, 8), 1, ""),
    ("a100x16", 16, 16, (2, 8), 2, ""),
    ("l4", 1, 1, (1, 1), 1, ""),
]


@pytest.mark.parametrize(("name", "chips", "devices", "shape", "hosts", "topology"), KNOWN)
def test_a_name_means_these_chips(name, chips, devices, shape, hosts, topology):
    found = find_slice(name)
    assert (found.chips, found.devices, found.shape) == (chips, devices, shape)
    assert (found.hosts, found.topology) == (hosts, topology)


def test_rings_are_closed_from_whole_cubes_and_whole_pods_on():
    assert find_slice("v4-64").wrap == (False, False, False)
    assert find_slice("v4-128").wrap == (True, True, True)
    assert find_slice("v5e-128").wrap == (False, True)
    assert find_slice("v5e-256").wrap == (True, True)


def test_a_program_may_take_what_the_compiler_says():
    sizes = {name: find_slice(name).chip.memory_per_device / GiB for name in ("v5e-8", "v4-8", "v6e-8", "v5p-8")}
    assert sizes == {"v5e-8": 15.75, "v4-8": 30.75, "v6e-8": 31.25, "v5p-8": pytest.approx(95.74)}
    assert find_slice("cpu").chip.memory_per_device > GiB


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v4-31", ["v4-16", "v4-32"]),
        ("v4-33", ["v4-32", "v4-64"]),
        ("v5e-512", ["v5e-256"]),
        ("v9-8", ["Did you mean `v"]),
        ("h100x12", ["h100x16"]),
        ("v4-0", ["v4-8"]),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest_that_does(name, nearest):
    with pytest.raises(UserError) as refused:
        find_slice(name)
    assert all(each in refused.value.fix for each in nearest)

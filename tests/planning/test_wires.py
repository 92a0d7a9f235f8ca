"""Collectives' seconds, by hand."""

import pytest

from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.parallel.mesh import AXES
from affinage.planning.wires import HOP_SECONDS, wires

GB = 1e9


def of(name, **sizes):
    return wires(find_slice(name), dict.fromkeys(AXES, 1) | sizes)


def test_a_closed_ring_carries_half_in_each_direction():
    # v5e-256 is 16 x 16, closed; a link carries 50 GB/s each way. 15 of 16 parts arrive over two links.
    ring = of("v5e-256", data=16, fsdp=16)["fsdp"]
    assert ring.all_gather(16 * GB) == pytest.approx(15 / 100 + 8 * HOP_SECONDS)
    assert ring.reduce_scatter(16 * GB) == ring.all_gather(16 * GB)
    assert ring.all_reduce(16 * GB) == pytest.approx(2 * ring.all_gather(16 * GB))
    assert ring.all_to_all(16 * GB) == pytest.approx(15 / 4 / 100 + 8 * HOP_SECONDS)


def test_a_line_has_one_link_at_its_end():
    line = of("v5e-16", data=4, fsdp=4)["fsdp"]
    assert line.all_gather(4 * GB) == pytest.approx(3 / 50 + 3 * HOP_SECONDS)


def test_an_axis_over_three_dimensions_uses_the_links_of_all():
    # v4-128 is 4 x 4 x 4, closed: 3 rings of 50 GB/s in two directions.
    cube = of("v4-128", fsdp=64)["fsdp"]
    assert cube.all_gather(64 * GB) == pytest.approx(63 / 300 + 6 * HOP_SECONDS)


def test_a_part_of_a_ring_is_a_line():
    parts = of("v4-128", fsdp=32, tensor=2)
    assert parts["tensor"].all_gather(2 * GB) == pytest.approx(1 / 50 + HOP_SECONDS)
    # What is left: two whole rings and a line of two.
    assert parts["fsdp"].bandwidth == pytest.approx(5 * 50 * GB)


def test_boxes_of_gpus_talk_over_their_network_cards():
    inside = of("h100x8", fsdp=8)["fsdp"]
    assert inside.bandwidth == pytest.approx(450 * GB)
    across = of("h100x16", data=2, fsdp=8)
    assert across["fsdp"].bandwidth == pytest.approx(450 * GB)
    assert across["data"].bandwidth == pytest.approx(50 * GB)
    assert of("h100x16", fsdp=16)["fsdp"].bandwidth == pytest.approx(400 * GB)


def test_slices_talk_over_the_network_of_the_data_centre():
    # Two slices of 16 chips, 6.25 GB/s to the network each: an axis of one device a slice has one card's.
    inside, both = of("v4-32", fsdp=16), of("2xv4-32", data=2, fsdp=16)
    assert both["fsdp"] == inside["fsdp"]
    assert both["data"].all_reduce(2 * GB) == pytest.approx(2 * 1 / 6.25 + 2 * HOP_SECONDS)
    # Over the same axis the 16 devices of a slice sum first, and send a 16th each.
    assert of("2xv4-32", data=32)["data"].bandwidth == pytest.approx(16 * 6.25 * GB)
    assert of("2xv4-32", pipeline=2, fsdp=16)["pipeline"].permute(GB) == pytest.approx(1 / 6.25 + HOP_SECONDS)
    with pytest.raises(UserError, match="no axis of the mesh can be cut along the 2 slices"):
        of("2xv4-8", tensor=8)


def test_an_axis_of_one_device_costs_nothing():
    alone = of("v4-8", fsdp=4)["tensor"]
    assert alone.all_gather(GB) == alone.all_reduce(GB) == alone.all_to_all(GB) == alone.permute(GB) == 0

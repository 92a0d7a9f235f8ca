"""What a plan proposes where a training does not fit, taken over as it stands, fits."""

import re
from pathlib import Path

import pytest

from affinage.hardware.slices import find_slice
from affinage.planning.plan import make_plan, planned_graph
from affinage.planning.remedy import NOTHING
from affinage.recipe.load import load_recipe

SMALL = str(Path(__file__).with_name("small.yaml"))
WIDE = ("model.nodes.embed.width=2048", "model.nodes.blocks.attention.heads=16", "model.nodes.blocks.ffn.width=8192")


def plan_of(name, *overrides):
    loaded = load_recipe(SMALL, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice(name))


def proposed(made):
    """The warning, and its settings as overrides."""
    assert not made.fits
    return made.warnings[0], re.findall(r"--set ([\w.]+=\w+)", made.warnings[0])


@pytest.mark.parametrize(
    ("name", "overrides", "settings"),
    [
        ("v5e-4", ["pretrain.batch=4096"], ["pretrain.micro_batches"]),
        # Three would do, did all shrink with the rows; but gradients of several are summed up in float32.
        (
            "v5e-1",
            [*WIDE, "model.nodes.blocks.repeat=8", "mesh={fsdp: 1}", "pretrain.batch=24"],
            ["pretrain.micro_batches"],
        ),
        (
            "v5e-4",
            [*WIDE, "model.nodes.blocks.repeat=16", "mesh={fsdp: 1, data: 4}", "pretrain.batch=4"],
            ["mesh.data", "mesh.fsdp"],
        ),
        ("v5e-1", ["rows.context=131072", "mesh={fsdp: 1}", "pretrain.batch=1"], ["parallel.remat"]),
    ],
    ids=["rows", "sums of gradients", "weights", "one row"],
)
def test_what_is_proposed_fits(name, overrides, settings):
    warning, changes = proposed(plan_of(name, *overrides))
    assert [change.partition("=")[0] for change in changes] == settings, warning
    assert plan_of(name, *overrides, *changes).fits, warning


def test_nothing_is_proposed_where_weights_and_moments_are_too_large():
    made = plan_of("v5e-1", *WIDE, "model.nodes.blocks.repeat=64", "mesh={fsdp: 1}", "pretrain.batch=4")
    assert made.memory.state > made.capacity
    assert made.warnings[0].endswith(NOTHING)


def test_of_a_gpu_a_program_may_take_what_jax_takes(monkeypatch):
    filling = ("mesh={fsdp: 1}", "pretrain.attention=cudnn", "pretrain.batch=768")
    made = plan_of("h100", *filling)
    assert (
        made.capacity == 0.75 * made.where.chip.memory_bytes < made.memory.total < 0.92 * made.where.chip.memory_bytes
    )
    assert "XLA_CLIENT_MEM_FRACTION=0.92" in made.warnings[0]
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.92")
    assert plan_of("h100", *filling).fits

"""`remat: auto`: as little is computed again as the devices' memory allows, and the run says what."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from affinage.cli import main
from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.model import Call
from affinage.model.remat import with_remat
from affinage.planning.plan import make_plan, planned_graph
from affinage.planning.settle import _LADDER, ROOM, choose_remat, present
from affinage.recipe.load import load_recipe
from affinage.recipe.parallel import RematSettings

SMALL = str(Path(__file__).with_name("small.yaml"))


def plan_of(where, *overrides):
    loaded = load_recipe(SMALL, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), where)


def with_memory(where, gigabytes):
    return dataclasses.replace(where, chip=dataclasses.replace(where.chip, usable_bytes=int(gigabytes * 2**30)))


def test_the_first_that_fits_is_taken():
    where = find_slice("v4-8")
    needed = {}
    for remat in _LADDER:
        said = remat if isinstance(remat, str) else json.dumps(remat.model_dump(mode="json"))
        needed[said] = plan_of(where, f"parallel.remat={said}").memory.total / 2**30
    assert needed["none"] > needed["dots"] > needed["block"]
    for name in ("none", "dots", "block"):
        made = plan_of(with_memory(where, needed[name] / ROOM * 1.001), "parallel.remat=auto")
        assert made.split.parallel.remat == name == made.to_dict()["remat"]
        assert made.choice.fits and made.memory.total <= made.capacity
    nothing = plan_of(with_memory(where, 0.01), "parallel.remat=auto").choice
    assert not nothing.fits and nothing.needed == min(needed.values()) * 2**30
    assert "nothing fits" in str(nothing)


def test_what_waits_in_the_hosts_memory_is_not_on_the_device():
    block, away = (
        plan_of(find_slice("v4-8"), f"parallel.remat={remat}") for remat in ("block", "{offload: [block_input]}")
    )
    inputs = block.split.local_rows * block.split.context * block.split.graph.width * 2 * 8
    assert away.memory.host == inputs and block.memory.host == 0
    assert away.memory.total == pytest.approx(block.memory.total - inputs, rel=0.05)
    hidden = [{node.name: node.hidden for node in made.time.nodes}["blocks"] for made in (block, away)]
    assert hidden[0] < hidden[1]


def test_a_processor_has_nowhere_else_to_keep_anything():
    made = plan_of(find_slice("v4-8"), "model.nodes.blocks.repeat=1", "rows.context=32")
    chip = dataclasses.replace(made.where.chip, usable_bytes=1)
    assert not isinstance(choose_remat(made.split, made.settings, chip, "cpu").remat, RematSettings)


def test_products_that_were_kept_are_not_done_again():
    where = find_slice("v4-8")
    times = [plan_of(where, f"parallel.remat={name}").time.nodes for name in ("none", "dots", "block", "full")]
    none, dots, block, full = ({node.name: node.compute for node in nodes}["blocks"] for nodes in times)
    assert none == pytest.approx(dots, rel=1e-3) and dots < block < full
    # All of the forward pass but its last product, and in `full` all of it a second time.
    assert 3.5 < 3 * block / none < 4 and full - block == pytest.approx(none / 3, rel=1e-3)


def test_what_jax_was_given_of_a_gpu_is_what_there_is():
    given = 50 * 2**30
    gpu = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: {"bytes_limit": given}
    )
    assert present([gpu]).memory_per_device == given


def test_the_program_asks_for_a_choice():
    with pytest.raises(UserError, match="was not chosen"):
        with_remat(Call(), "auto")


def test_a_plan_says_what_was_chosen(capsys):
    with pytest.raises(SystemExit):
        main(["plan", SMALL, "--on", "v4-8", "--set", "parallel.remat=auto"])
    assert "remat: none (the least that fits: " in capsys.readouterr().out

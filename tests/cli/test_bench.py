"""`affinage bench` as its user sees it."""

import json
from pathlib import Path

import pytest

from affinage.cli import main
from affinage.errors import EXIT_USER_ERROR
from affinage.planning import layouts

SMALL = str(Path(__file__).parents[1] / "planning" / "small.yaml")
TINY = ["--set", "model.nodes.embed.width=32", "--set", "model.nodes.embed.vocab=64"]


def told(capsys, *words):
    with pytest.raises(SystemExit) as status:
        main(["bench", *words])
    return status.value.code, capsys.readouterr()


def test_the_measured_step_has_its_four_parts_and_a_bar_for_each(capsys):
    code, out = told(capsys, SMALL, "--part", "step", "--steps", "2", "--rows", "8", "--context", "32", "--json", *TINY)
    assert not code
    facts = json.loads(out.out)["step"]
    assert list(facts["seconds"]) == ["forward", "loss", "backward", "optimizer", "step"]
    assert facts["tokens_per_second"] == pytest.approx(8 * 32 / facts["seconds"]["step"]["mean"])
    # A recipe may give rows per device: those of the measured step are said all the same.
    per_device = ["--set", "pretrain.batch=null", "--set", "pretrain.batch_per_device=4"]
    words = [SMALL, "--part", "step", "--steps", "2", "--rows", "8", "--context", "32", *TINY, *per_device]
    code, out = told(capsys, *words)
    assert not code, out.err
    assert "8 rows of 32 tokens" in out.out
    assert sum("█" in line for line in out.out.splitlines()) == 4 and "as a run compiles it" in out.out


def test_an_unknown_part_is_refused(capsys):
    code, out = told(capsys, "--part", "steps")
    assert code == EXIT_USER_ERROR and "There are step, chips, trainings, layouts" in out.err


def test_idle_share_is_counted_by_playing_the_pipeline():
    for stages, parts in ((2, 4), (4, 8), (4, 1)):
        busy = {(tick, stage) for part in range(parts) for stage in range(stages) for tick in [part + stage]}
        ticks = 1 + max(tick for tick, _ in busy)
        assert layouts.idle_share(stages, parts) == pytest.approx(1 - len(busy) / (ticks * stages))


def test_layouts_are_measured_on_devices_of_their_own():
    settings = ["pretrain.batch=8", "rows.context=16", "model.nodes.embed.width=32", "model.nodes.embed.vocab=64"]
    (found,) = layouts.measured(SMALL, settings, [{"data": 4, "pipeline": 2}], 1)
    assert found.mesh == {"data": 4, "pipeline": 2}
    assert len(found.cpu_seconds) == 1 and found.cpu_seconds[0] > 0
    # Two rows on each of four devices are two micro-batches, not the eight that two stages would take.
    assert found.micro_batches == 2 and found.bubble == layouts.idle_share(2, 2)

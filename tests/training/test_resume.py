"""What a run goes on from, and what it refuses to go on from."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import yaml

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.facts import IDENTITY, refuse_changes
from affinage.errors import UserError
from affinage.parallel import make_mesh
from affinage.training import TrainJob, train
from affinage.training.metrics import curve
from affinage.training.program import Program
from affinage.training.summary import identity


def _job(folder: Path, **changes: object) -> TrainJob:
    values = {"graph": tiny.graph(layers=1), "settings": tiny.settings(10), "mesh": {"data": 1}, "seed": 1}
    return TrainJob(**{**values, "feed": tiny.RandomFeed(), "folder": folder, **changes})


def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(tmp_path: Path):
    train(_job(tmp_path))
    rows = curve(tmp_path)
    (tmp_path / "summary.json").unlink()
    for data in (tmp_path / "checkpoints" / "10").rglob("d/*"):
        os.truncate(data, 10)
    with pytest.warns(CheckpointWarning):
        summary = train(_job(tmp_path))
    assert summary["resumed_at"] == [5]
    assert curve(tmp_path) == rows
    assert CheckpointStore(tmp_path / "checkpoints").restore_newest({"params": None})[0] == 10  # mended


def test_a_finished_run_started_again_trains_no_step(tmp_path: Path):
    first, steps = train(_job(tmp_path)), []
    again = train(_job(tmp_path, on_step=(lambda step, state: steps.append(step),)))
    assert not steps
    assert again["final_loss"] == first["final_loss"]


def test_a_change_of_model_settings_or_data_is_refused_until_it_is_accepted_by_name(tmp_path: Path):
    train(_job(tmp_path, data={"rows": "one"}, code={"plugin a.py": "1"}))
    changed = {"data": {"rows": "other"}, "graph": tiny.graph(layers=2), "code": {"plugin a.py": "2"}}
    settings = {"optimizer": {"b1": 0.8}, "log_every": 2, "micro_batches": 2}  # the last two only say how
    with pytest.raises(UserError) as refused:
        train(_job(tmp_path, settings=tiny.settings(12, **settings), **changed))
    listed = [line.strip() for line in str(refused.value).splitlines()[1:-1]]
    assert listed == [
        "code.plugin a.py: 1 -> 2",
        "data.rows: one -> other",
        "model.nodes.blocks.repeat: 1 -> 2",
        "optimizer.b1: 0.9 -> 0.8",
        "steps: 10 -> 12",
    ]
    assert "accept_changes=[code, data.rows, model.nodes.blocks.repeat, optimizer.b1, steps]" in str(refused.value)
    accepted = {"every_steps": 5, "accept_changes": ["code", "data", "optimizer.b1", "steps"]}
    with pytest.warns(CheckpointWarning, match="another optimizer"):
        summary = train(
            _job(
                tmp_path,
                settings=tiny.settings(12, **settings, checkpoint=accepted),
                data=changed["data"],
                code=changed["code"],
            )
        )
    assert summary["resumed_at"] == [10] and summary["steps"] == 12


def test_what_a_clock_asks_for_is_saved(tmp_path: Path):
    for minutes, steps in ((1e-9, [1, 2, 3, 4]), (600, [4])):
        folder, rhythm = tmp_path / str(minutes), {"every_steps": 1000, "every_minutes": minutes, "keep_last": 99}
        train(_job(folder, settings=tiny.settings(4, checkpoint=rhythm)))
        assert CheckpointStore(folder / "checkpoints").steps() == steps


def test_fine_tuning_begins_with_the_weights_it_is_given(tmp_path: Path):
    train(_job(tmp_path / "base"))
    base = CheckpointStore(tmp_path / "base" / "checkpoints")
    seen = []
    job = _job(
        tmp_path / "tuned",
        settings=tiny.settings(1, schedule={"peak": 1e-12, "floor": 1e-13}),
        initial_params=lambda abstract: base.restore_params(None, abstract),
        on_step=(lambda step, state: seen.append(jax.device_get(state.params)),),
    )
    train(job)
    for a, b in zip(
        jax.tree.leaves(seen[0]), jax.tree.leaves(base.restore(10, {"params": None})["params"]), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_the_summary_says_what_the_run_was(tmp_path: Path):
    summary = train(_job(tmp_path, validation={"x": tiny.HeldOut()}))
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens"] == 10 * 8 * tiny.CONTEXT and summary["steps"] == 10
    assert summary["final_loss"] < summary["first_loss"]
    assert summary["mfu"] is None  # nobody knows the peak of a CPU
    accounts = dict(summary["seconds"])
    assert accounts.pop("total") == pytest.approx(sum(accounts.values()), abs=0.01)
    held_out, scores = tiny.HeldOut(), summary["validation"]["x"]
    targets = sum(_targets(batch) for batch in held_out)
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] * targets / np.log(2) / held_out.bytes, rel=1e-6)


def _targets(batch: dict[str, np.ndarray]) -> float:
    same = batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
    return float((batch["loss_mask"][:, 1:] * same).sum())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("data.rows", {"data": {"rows": "other"}}),
        ("model.nodes.blocks.ffn.width", {"graph": tiny.graph(width=96)}),
        ("optimizer.name", {"settings": tiny.settings(10, optimizer={"name": "lion"})}),
        ("batch", {"settings": tiny.settings(10, batch=16), "feed": tiny.RandomFeed(rows=16)}),
        ("seed", {"seed": 2}),
    ],
)
def test_each_thing_that_decides_over_numbers_is_refused_and_can_be_accepted(name: str, changes: dict):
    def facts(job: TrainJob) -> dict:
        return identity(Program(job, make_mesh(job.mesh, jax.devices()), job.feed.batch(0)))

    before = _job(Path("unused"), data={"rows": "one"})
    meta, now = {IDENTITY: facts(before)}, facts(dataclasses.replace(before, **changes))
    assert refuse_changes(meta, meta[IDENTITY], (), where="here", setting="accept_changes") == []
    with pytest.raises(UserError, match="this run is not the one that was saved") as refused:
        refuse_changes(meta, now, (), where="here", setting="accept_changes")
    assert f"\n    {name}: " in str(refused.value)
    hinted = yaml.safe_load(str(refused.value).rpartition("accept_changes=")[2].removesuffix("."))
    assert name in hinted
    refuse_changes(meta, now, hinted, where="here", setting="accept_changes")
    accepted = refuse_changes(meta, now, [name.partition(".")[0]], where="here", setting="accept_changes")
    assert name in {each.name for each in accepted}


def test_a_name_to_accept_that_is_no_plain_word_is_what_stands_before_it():
    saved = {IDENTITY: {"data": {"a, b": 1, "c: d": [1]}, "code": {"plugin /x/y.py": "1"}, "1 2": 3, "seed": 1}}
    with pytest.raises(UserError) as refused:
        refuse_changes(saved, {"seed": 1}, (), where="here", setting="accept_changes")
    hinted = yaml.safe_load(str(refused.value).rpartition("accept_changes=")[2].removesuffix("."))
    assert hinted == ["1 2", "code", "data"]
    refuse_changes(saved, {"seed": 1}, hinted, where="here", setting="accept_changes")

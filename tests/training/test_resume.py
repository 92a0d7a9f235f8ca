"""What a run goes on from, with the same bits in the end, and what it refuses to go on from."""

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import tiny
from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.store import IDENTITY, check_compatible
from affinage.config.training import SftSettings
from affinage.data.dataloader import DataLoader
from affinage.errors import Preempted
from affinage.parallel.sharding import make_mesh
from affinage.training import TrainJob, train
from affinage.training.checkpointing import Checkpointer, identity
from affinage.training.metrics import ACCOUNTS, GoodputTimer
from affinage.training.state import TrainState
from affinage.training.trainer import Trainer
from affinage.training.watchdog import Watchdog
from run_affinage import refused
from token_rows import write_tokens

STEPS = 6
LORA = {"lora": {"r": 4, "target_modules": ["query", "down"]}}
FULL = ("bfloat16", "layer by layer")
KINDS: dict[str, dict[str, Any]] = {
    "sft with adapters": {"settings": tiny.tuning(SftSettings, STEPS, own=LORA)},
    "average": {"ema": {"decay": 0.75}},
    "bfloat16": {"precision": {"params": "bfloat16"}, "optimizer": {"state_dtype": "bfloat16"}},
    "layer by layer": {"optimizer_in_backward": True},
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full if kind in FULL else ()) for kind in KINDS])
def test_stopped_and_started_again_it_ends_with_the_same_bits(tmp_path: Path, kind: str):
    how = {"checkpoint": {"every_steps": 2}, "graph": tiny.graph(dropout=0.1, layers=1)} | KINDS[kind]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny.job(whole, STEPS, **how))
    with pytest.raises(RuntimeError):
        train(tiny.job(cut, STEPS, tiny.fails_at(3), **how))
    with pytest.raises(Preempted):
        train(tiny.job(cut, STEPS, tiny.stops_at(5), **how))
    assert train(tiny.job(cut, STEPS, **how))["resumed_at"] == [2, 5]
    assert tiny.curve(cut) == tiny.curve(whole) and tiny.saved_bits(cut, STEPS) == tiny.saved_bits(whole, STEPS)


def test_a_finished_run_started_again_trains_no_step_and_one_that_is_changed_is_refused_until_accepted(tmp_path: Path):
    steps, facts = [], {"data": {"rows": "one"}, "code": {"plugin a.py": "1"}}
    first = train(tiny.job(tmp_path, **facts))
    again = train(tiny.job(tmp_path, 10, lambda step, _: steps.append(step), **facts))
    assert not steps and again["final_loss"] == first["final_loss"]

    changed: dict[str, Any] = {"data": {"rows": "other"}, "code": {"plugin a.py": "2"}}
    changed |= {"optimizer": {"b1": 0.8}, "log_every": 2, "gradient_accumulation_steps": 2}  # the last two only say how
    mistake = refused(lambda: train(tiny.job(tmp_path, 12, **changed)))
    names = ["code.plugin a.py", "data.rows", "optimizer.b1", "steps"]
    assert [line.strip().partition(": ")[0] for line in str(mistake).splitlines()[1:-1]] == names
    allowed = ["code", "data", "optimizer.b1", "steps"]
    with pytest.warns(CheckpointWarning, match="another optimizer"):
        summary = train(tiny.job(tmp_path, 12, checkpoint={"every_steps": 5, "allow_changes": allowed}, **changed))
    assert summary["resumed_at"] == [10] and summary["steps"] == 12
    how = {"batch_size": 16, "feed": tiny.RandomFeed(16), "checkpoint": {"allow_changes": [*allowed, "batch_size"]}}
    other = tiny.job(tmp_path, 12, **changed, **how)
    with pytest.warns(CheckpointWarning, match="batch_size: 8 -> 16; rows are found by counting"):
        Checkpointer(tiny.uncompiled(other), GoodputTimer(), Watchdog("train", tmp_path, other.runtime)).restore()


@pytest.mark.parametrize(("name", "changes"), [
    ("data.rows", {"data": {"rows": "other"}}),
    ("model.nodes.blocks.ffn.width", {"graph": tiny.graph(layers=1, width=96)}),
    ("optimizer.name", {"settings": tiny.settings(10, optimizer={"name": "sgd"})}),
    ("batch_size", {"settings": tiny.settings(10, batch_size=16), "feed": tiny.RandomFeed(rows=16)}),
    ("seed", {"seed": 2}),
])  # fmt: skip
def test_each_thing_that_decides_over_numbers_is_refused_and_can_be_accepted(name: str, changes: dict):
    def facts(job: TrainJob) -> dict:
        return identity(Trainer(job, make_mesh(job.mesh, jax.devices()), job.feed.batch(0)))

    before = tiny.job(Path("unused"), data={"rows": "one"})
    meta, now = {IDENTITY: facts(before)}, facts(dataclasses.replace(before, **changes))
    assert check_compatible(meta, meta[IDENTITY], (), where="here") == {}
    mistake = str(refused(check_compatible, meta, now, (), where="here"))
    hinted = yaml.safe_load(mistake.rpartition("allow_changes=")[2].removesuffix("."))
    assert f"\n    {name}: " in mistake and name in hinted
    check_compatible(meta, now, hinted, where="here")
    assert name in check_compatible(meta, now, [name.partition(".")[0]], where="here")


@pytest.mark.full
def test_what_a_clock_asks_for_is_saved(tmp_path: Path):
    for minutes, count in ((1e-9, 10), (600, 1)):
        folder, rhythm = tmp_path / str(minutes), {"every_steps": 1000, "every_minutes": minutes, "keep_last": 99}
        train(tiny.job(folder, checkpoint=rhythm))
        assert len(CheckpointStore(folder / "checkpoints").steps()) == count


def test_the_summary_says_what_the_run_was(tmp_path: Path):
    summary = train(tiny.job(tmp_path, validation={"x": tiny.HeldOut()}))
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens"] == 10 * 8 * tiny.CONTEXT and summary["steps"] == 10
    assert summary["final_loss"] < summary["first_loss"]
    assert summary["mfu"] is None  # nobody knows the peak of a CPU
    assert summary["seconds"]["total"] == pytest.approx(sum(summary["seconds"][name] for name in ACCOUNTS), abs=0.01)
    line = [line for line in tiny.lines(tmp_path) if "loss" in line][-1]
    assert {"loss_tokens", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "data_time"} <= line.keys()
    assert line["step_time"] > 0 and 0 < line["goodput"] < 1 and line["tokens"] == summary["tokens"]
    scores, targets = summary["validation"]["x"], 0.0
    for batch in tiny.HeldOut():
        same = batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
        targets += (batch["loss_mask"][:, 1:] * same).sum()
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] * targets / np.log(2) / tiny.HeldOut.bytes, rel=1e-6)


# ---- a run that extends another is the run that one would have made of the same pieces at once


BORDER, LONGER = 10, 16
SCHEDULE = {"name": "constant", "peak_lr": 1e-2, "min_lr": 0.0, "warmup_steps": 4}
MIXTURE = [{"from_step": 0, "weights": {"all": 1.0}}, {"from_step": BORDER, "weights": {"a": 3.0, "b": 1.0}}]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for name, seed in (("a", 1), ("b", 2)):
        tokens = np.random.default_rng(seed).integers(5, tiny.VOCABULARY, (50, tiny.CONTEXT)).astype(np.uint16)
        write_tokens(folder / name, tokens, source=name, language="")
    return folder


def extended(folder: Path, rows: Path, steps: int, mixture: list | None, **changes: Any) -> TrainJob:
    stages = None if mixture is None else [(stage["from_step"], stage["weights"]) for stage in mixture]
    changes |= {"schedule": SCHEDULE, "mixture": mixture, "eval_every": 5, "data": {"rows": "the same"}}
    changes |= {"graph": tiny.graph(dropout=0.1, layers=1), "validation": {"held out": tiny.HeldOut()}}
    return tiny.job(folder, steps, feed=DataLoader(rows, seed=3, batch=8, mixture=stages), **changes)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def first(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    train(extended(folder, rows, BORDER, None))
    return folder


@pytest.mark.full
def test_more_steps_and_new_weights_are_one_run_bit_for_bit(rows: Path, first: Path, tmp_path: Path):
    before = files_of(first)
    train(extended(tmp_path / "one", rows, LONGER, MIXTURE))
    allowed = {"every_steps": 5, "allow_changes": ["mixture"]}  # its first stage is what was trained on
    extension = extended(tmp_path / "more", rows, LONGER, MIXTURE, extends=(first, BORDER), checkpoint=allowed)

    with pytest.raises(RuntimeError):
        train(dataclasses.replace(extension, on_step=(tiny.fails_at(12),)))  # before anything was saved
    summary = train(extension)
    assert tiny.saved_bits(tmp_path / "more", LONGER) == tiny.saved_bits(tmp_path / "one", LONGER)
    assert tiny.curve(tmp_path / "more") == tiny.curve(tmp_path / "one")
    assert summary["steps"] == LONGER and summary["resumed_at"] == [BORDER] and files_of(first) == before


@pytest.mark.parametrize(("changes", "mixture", "named"), [
    ({"optimizer": {"b1": 0.8}}, None, "optimizer.b1"),
    ({}, [{"from_step": 0, "weights": {"a": 1.0}}], "mixture"),
    ({"optimizer": {"name": "sgd"}, "checkpoint": {"allow_changes": ["optimizer"]}}, None, "opt_state"),
    ({"health": {"spike_window": 16}, "checkpoint": {"allow_changes": ["health"]}}, None, "window.losses"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*is extended with another", "ignore:coroutine .* was never awaited")
def test_what_an_extension_may_not_change_is_refused_by_name(rows, first, tmp_path, changes, mixture, named: str):
    extension = extended(tmp_path, rows, LONGER, mixture, extends=(first, BORDER), **changes)
    watchdog = Watchdog("train", tmp_path, extension.runtime)
    refused(Checkpointer(tiny.uncompiled(extension), GoodputTimer(), watchdog).restore, match=named)


# ---- on other devices: the state bit for bit, the same batches, the same curve


SAVED, END = 4, 8


def job(folder: Path, mesh: dict[str, int]) -> TrainJob:
    rhythm = {"checkpoint": {"every_steps": SAVED, "keep_last": 99}, "eval_every": END}
    return tiny.job(folder, END, graph=tiny.graph(dropout=0.1, layers=1), mesh=mesh, **rhythm)


@pytest.mark.full
def test_a_run_goes_on_where_there_are_other_devices(tmp_path: Path):
    undisturbed = tmp_path / "four"
    train(job(undisturbed, {"data": 2, "fsdp": 2}))
    for mesh in ({"fsdp": 2}, {"data": 1}, {"fsdp": 2, "tensor": 4}):
        folder = tmp_path / "-".join(mesh)
        shutil.copytree(undisturbed / "checkpoints" / str(SAVED), folder / "checkpoints" / str(SAVED))
        here = job(folder, mesh)
        program, _ = tiny.compiled(here)
        state = TrainState(**CheckpointStore(folder / "checkpoints").restore(SAVED, program.abstract.named()))
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda x: x.sharding, program.abstract)
        assert tiny.bits(state.named()) == tiny.saved_bits(undisturbed, SAVED, *state.named())
        batch = here.feed.batch(SAVED)
        assert all(np.asarray(array).tobytes() == batch[name].tobytes() for name, array in program.put(batch).items())
        assert train(here)["resumed_at"] == [SAVED]
        runs = [tiny.lines(each)[-(END - SAVED) :] for each in (folder, undisturbed)]
        np.testing.assert_allclose(*([(line["step"], line["loss"]) for line in lines] for lines in runs), rtol=1e-5)


# ---- stopped in a monitor's look


BATCHES, LAST = 5, 4


class EndsAt:
    """Looks after every second step, in batches, and ends the training at the step `LAST`."""

    say: Callable[[str], None]

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.interrupted_at = interrupted_at
        self.batches: list[int] = []  # the step of each that was begun
        self.made: list[int] = []  # looks

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def look(self, step: int, state, stop) -> tuple[None, str]:
        for number in range(BATCHES):
            if stop():
                return None, ""
            self.batches.append(step)
            if number == 1 and step == self.interrupted_at:
                signal.raise_signal(signal.SIGTERM)
        self.made.append(step)
        return None, "it was enough" if step == LAST else ""


def trained(folder: Path, monitor: EndsAt, hook: Any = None) -> dict:
    rhythm = {"eval_every": 100, "checkpoint": {"every_steps": 100, "keep_last": 9}}
    return train(tiny.job(folder, 10, hook, monitor=monitor, validation={"held-out": tiny.HeldOut()}, **rhythm))


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.full), LAST])
def test_stopped_in_a_look_it_saves_at_that_step_and_ends_as_if_it_was_not(at: int, tmp_path: Path):
    whole, tmp_path, monitor = tmp_path / "whole", tmp_path / "stopped", EndsAt()
    ended = trained(whole, monitor)
    assert (ended["steps"], ended["ended"]) == (LAST, "monitor") and len(monitor.batches) == 3 * BATCHES
    monitor = EndsAt(interrupted_at=at)
    with pytest.raises(Preempted):
        trained(tmp_path, monitor)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [at]
    assert monitor.batches.count(at) == 2 and at not in monitor.made, "it was not given up"
    again, steps = EndsAt(), []
    ended = trained(tmp_path, again, lambda step, _: steps.append(step))
    assert again.made == list(range(at, LAST + 1, 2)) and steps == list(range(at + 1, LAST + 1))
    assert (ended["steps"], ended["ended"]) == (LAST, "monitor") and tiny.curve(tmp_path) == tiny.curve(whole)
    assert tiny.saved_bits(tmp_path, LAST, "params") == tiny.saved_bits(whole, LAST, "params")

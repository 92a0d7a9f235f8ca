"""Killed, stopped, or left alone: the same run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.errors import EXIT_PREEMPTED, UserError
from affinage.training import TrainJob, train

STEPS = 60

PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from affinage.hardware.devices import prepare
prepare()
import time
from pathlib import Path
import tiny
from affinage.errors import EXIT_PREEMPTED, Preempted
from affinage.training import TrainJob, train

class SlowFeed(tiny.RandomFeed):
    def iterate(self, start_step):
        for batch in super().iterate(start_step):
            time.sleep(0.01)
            yield batch

job = TrainJob(
    graph=tiny.graph(dropout=0.1, layers=1),
    settings=tiny.settings(int(sys.argv[3]), validate_every=7),
    mesh={"fsdp": 2},
    seed=1,
    feed=SlowFeed(),
    folder=Path(sys.argv[2]),
    validation={"held out": tiny.HeldOut()},
    on_step=(lambda step, state: print("step", step, flush=True),),
)
try:
    train(job)
except Preempted:
    sys.exit(EXIT_PREEMPTED)
"""


def start(folder: Path, cache: Path, steps: int = STEPS) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", PROCESS, str(here), str(folder), str(steps)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def final_params(folder: Path) -> dict[str, bytes]:
    store = CheckpointStore(folder / "checkpoints")
    leaves = jax.tree_util.tree_leaves_with_path(store.restore(STEPS, {"params": None})["params"])
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def curve(folder: Path) -> list[dict]:
    """The metrics without what the clock says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "mfu", "data_wait", "seconds")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(folder, cache)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return folder


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path, cache: Path, undisturbed: Path):
    draw, kills = random.Random(0), 0
    for step in (8, 0, 27, 0, 44):  # 0: in the start, the compilation, the restore
        process = start(tmp_path, cache)
        assert process.stdout is not None
        for line in process.stdout if step else ():
            if line.startswith("step") and int(line.split()[1]) >= step:
                break
        time.sleep(draw.uniform(0.0, 0.2 if step else 4.0))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
    process = start(tmp_path, cache)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert kills >= 3
    assert final_params(tmp_path) == final_params(undisturbed)
    assert curve(tmp_path) == curve(undisturbed)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["resumed_at"] and all(step % 5 == 0 for step in summary["resumed_at"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_saves_the_step_it_is_at_and_exits_75(
    tmp_path: Path, cache: Path, undisturbed: Path, number: signal.Signals
):
    process = start(tmp_path, cache)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "step 8":
            process.send_signal(number)
            break
    output, _ = process.communicate(timeout=300)
    assert process.returncode == EXIT_PREEMPTED, output
    last = [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]
    saved = CheckpointStore(tmp_path / "checkpoints").steps()[-1]
    assert saved == max([8, *last])
    assert not (tmp_path / "summary.json").exists()
    process = start(tmp_path, cache)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert final_params(tmp_path) == final_params(undisturbed)
    assert curve(tmp_path) == curve(undisturbed)


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
    train(_job(tmp_path, data={"rows": "one"}))
    changed = {"data": {"rows": "other"}, "graph": tiny.graph(layers=2)}
    settings = {"optimizer": {"b1": 0.8}, "log_every": 2, "micro_batches": 2}  # the last two only say how
    with pytest.raises(UserError) as refused:
        train(_job(tmp_path, settings=tiny.settings(12, **settings), **changed))
    listed = [line.strip() for line in str(refused.value).splitlines()[1:-1]]
    assert listed == [
        "data.rows: one -> other",
        "model.nodes.blocks.repeat: 1 -> 2",
        "optimizer.b1: 0.9 -> 0.8",
        "steps: 10 -> 12",
    ]
    accepted = {"every_steps": 5, "accept_changes": ["data", "optimizer.b1", "steps"]}
    with pytest.warns(CheckpointWarning, match="another optimizer"):
        summary = train(
            _job(tmp_path, settings=tiny.settings(12, **settings, checkpoint=accepted), data=changed["data"])
        )
    assert summary["resumed_at"] == [10] and summary["steps"] == 12


def test_what_a_clock_asks_for_is_saved(tmp_path: Path):
    rhythm = {"every_steps": 1000, "every_minutes": 1e-9, "keep_last": 99}
    train(_job(tmp_path, settings=tiny.settings(4, checkpoint=rhythm)))
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 2, 3, 4]


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

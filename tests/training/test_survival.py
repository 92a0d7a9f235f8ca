"""Killed or told to stop in every phase of a run: the same bits in the end, and nothing lost that was not said."""

import io
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
import runs

from affinage.checkpoint import CheckpointStore
from affinage.errors import EXIT_PREEMPTED
from affinage.training import signals
from affinage.training.metrics import curve
from affinage.training.signals import StopRequest

STEPS, EVERY = 60, 5
KILLS = 20


def final_params(folder: Path) -> dict[str, bytes]:
    store = CheckpointStore(folder / "checkpoints")
    leaves = jax.tree_util.tree_leaves_with_path(store.restore(STEPS, {"params": None})["params"])
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module")
def nursery(cache: Path) -> Iterator[runs.Nursery]:
    with runs.Nursery(cache) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: runs.Nursery) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    nursery.finish(folder, STEPS)
    return folder


def newest(folder: Path) -> int:
    return max([0, *CheckpointStore(folder / "checkpoints").steps()])


def test_a_compiled_step_is_kept_and_read_by_the_next_start(tmp_path: Path, cache: Path, nursery):
    def kept() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in cache.rglob("jit_step-*-cache")}

    for file in cache.rglob("jit_*"):
        file.unlink()
    nursery.finish(tmp_path / "one", 6)
    first = kept()
    nursery.finish(tmp_path / "other", 6)
    assert first and kept() == first


@pytest.mark.full
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path, nursery, undisturbed: Path):
    folders, draw, killed, lost = [tmp_path / "run"], random.Random(0), 0, 0
    for kill in range(KILLS):
        if newest(folders[-1]) > STEPS - 2 * EVERY:  # nearly done: there is more to kill in another run
            folders.append(tmp_path / f"run-{kill}")
        folder = folders[-1]
        begun = newest(folder)
        run = nursery.start(folder, STEPS)
        # Every other time after a few steps, else in the start, the compilation, the restore.
        while kill % 2 and not run.steps():
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.15 if kill % 2 else 1.0))
        run.kill()
        killed += run.wait() == -signal.SIGKILL
        done = max([begun, *run.steps()])
        lost = max(lost, done - newest(folder))
    assert killed >= KILLS // 2
    assert lost <= 2 * EVERY  # an interval, and the save in flight
    for folder in folders:
        nursery.finish(folder, STEPS)
        assert final_params(folder) == final_params(undisturbed)
        assert curve(folder) == curve(undisturbed)


def test_told_to_stop_in_any_phase_it_loses_no_step(tmp_path: Path, nursery, undisturbed: Path):
    folder = tmp_path / "run"
    phases = ("start", "first batch", "compilation", "evaluation", "restore", "save", "step")
    for index, phase in enumerate(phases):
        run = nursery.start(folder, STEPS, when=phase, number=(signal.SIGTERM, signal.SIGINT)[index % 2])
        assert run.wait() == EXIT_PREEMPTED, (phase, run.said())
        assert f"signal in {phase}" in run.said()
        steps = run.steps()
        assert bool(steps) == (phase in ("evaluation", "save", "step"))
        if steps:
            assert newest(folder) == steps[-1], phase
            by_hand = index % 2 == 1  # who waits for it is told that one need not
            assert (f"SIGINT: saves step {steps[-1]:,}; Ctrl-C once more leaves without it" in run.said()) == by_hand
        else:
            assert "nothing to save" in run.said()
    assert not (folder / "summary.json").exists()
    nursery.finish(folder, STEPS)
    assert final_params(folder) == final_params(undisturbed)
    assert curve(folder) == curve(undisturbed)


def test_a_second_signal_while_the_last_save_is_written_changes_nothing(tmp_path: Path, nursery, undisturbed: Path):
    folder = tmp_path / "run"
    for first, second in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)):
        begun = newest(folder)
        run = nursery.start(folder, STEPS, when="step", number=first, then=("writing", second))
        assert run.wait() == EXIT_PREEMPTED, run.said()
        assert f"{first.name}: saved at step {run.steps()[-1]:,}" in run.said()
        assert run.said().index("signal in step") < run.said().index("signal in writing")
        assert newest(folder) == run.steps()[-1] > begun
        assert not CheckpointStore(folder / "checkpoints").damage(newest(folder))
    nursery.finish(folder, STEPS)
    assert final_params(folder) == final_params(undisturbed)
    assert curve(folder) == curve(undisturbed)


IN_NATIVE_CODE = """
import hashlib
from affinage.errors import Preempted
from affinage.stopping import OwnProcess, leave
{before}
with OwnProcess(){inside}:
    try:
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)  # native code for minutes, like a compiler
    except Preempted as told:  # the signal came before it
        leave(str(told))
"""
OF_A_TRAINING = {
    "before": "from affinage.training.signals import StopRequest; stop = StopRequest('run', grace=GRACE)",
    "inside": ", stop",
}
WITH_STEPS = (
    IN_NATIVE_CODE.format(**OF_A_TRAINING)
    .replace("GRACE", "1")
    .replace("        print", "        stop.something_to_lose(SLOWEST); print")
)


def stopped(code: str, number: int, *, again: bool = False) -> tuple[int, str]:
    """How it ended and what it said after a signal, which comes again and again if that is wanted."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        computes, late = psutil.Process(process.pid), time.monotonic() + 120
        before = computes.cpu_times().user
        while computes.cpu_times().user < before + 0.2:  # it is not yet in native code
            assert time.monotonic() < late
            time.sleep(0.01)
        process.send_signal(number)
        while again and process.poll() is None:
            assert time.monotonic() < late
            time.sleep(1.2)  # more than what counts as one wish
            process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize("place", [{"before": "", "inside": ""}, OF_A_TRAINING], ids=["a stage", "a training's start"])
def test_native_code_is_not_waited_for_where_there_is_nothing_to_save(place: dict):
    status, said = stopped(IN_NATIVE_CODE.format(**place).replace("GRACE", "30"), signal.SIGTERM)
    assert status == EXIT_PREEMPTED and "Run the same command to go on." in said


def test_a_step_that_does_not_end_is_left_after_the_grace_with_all_stacks():
    status, said = stopped(WITH_STEPS.replace("SLOWEST", "600"), signal.SIGTERM, again=True)
    assert status == EXIT_PREEMPTED
    assert "was not saved within 1 s" in said and 'File "<string>", line 9 in <module>' in said


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["without standard error", "with one of no number"])
def test_the_end_of_the_grace_needs_no_standard_error(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch):
    left: list[str] = []
    monkeypatch.setattr(signals, "leave", left.append)
    monkeypatch.setattr(sys, "stderr", stream)
    signals.StopRequest("run", grace=0.0)._limit()
    assert "was not saved within 0 s" in left[0]


@pytest.mark.parametrize(("number", "seconds"), [("SIGTERM", 600), ("SIGHUP on host 1", 600), ("SIGINT", 9000)])
def test_a_person_waits_longer(number: str, seconds: float):
    with StopRequest("run", grace=600.0) as stop:
        stop.something_to_lose(slowest_save=9000.0)
        stop._count_down(number)
        left = stop.seconds_left()
        assert left is not None and seconds - 300 < left <= seconds


def test_after_ctrl_c_a_step_that_does_not_end_is_left_when_the_slowest_save_would_have_ended():
    status, said = stopped(WITH_STEPS.replace("SLOWEST", "2"), signal.SIGINT)
    assert status == EXIT_PREEMPTED
    assert "was not saved within 2 s" in said and 'File "<string>", line 9 in <module>' in said


def test_a_person_is_waited_for_until_the_second_time():
    status, said = stopped(WITH_STEPS.replace("SLOWEST", "600"), signal.SIGINT, again=True)
    assert status == 130 and "by a second SIGINT; it goes on from its last checkpoint" in said

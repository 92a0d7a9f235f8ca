"""Machines whose disks vanish with them: a run that is copied to a URL ends with the same bits on the next one."""

import shutil
import signal
from pathlib import Path

import pytest
import runs
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.remote import RemoteFolder
from affinage.checkpoint.remote_steps import RemoteSteps
from affinage.errors import EXIT_PREEMPTED
from affinage.training.metrics import curve

pytestmark = pytest.mark.full
STEPS = 40


@pytest.fixture
def starter(warm_python: list[str]) -> runs.Runs:
    return runs.Runs(warm_python)


def newest_at(url: str) -> int:
    return max([0, *RemoteSteps(RemoteFolder(url) / "checkpoints").steps()])


def test_stopped_and_killed_machines_lose_no_more_than_others(tmp_path: Path, starter: runs.Runs):
    url, machine = f"file://{tmp_path}/elsewhere/run", tmp_path / "machine"
    begun = 0
    for phase in ("save", "step"):  # told to stop: nothing is lost, though the disk is
        run = starter.start(machine, STEPS, when=phase, remote=url)
        assert run.wait() == EXIT_PREEMPTED, run.said()
        assert newest_at(url) == run.steps()[-1], run.said()
        assert run.steps()[0] == begun + 1, "it went on from the copy"
        begun = newest_at(url)
        shutil.rmtree(machine)
    run = starter.start(machine, STEPS, remote=url)  # killed: what was copied stays
    run.until(run.steps)
    run.kill()
    assert run.wait() == -signal.SIGKILL and newest_at(url) >= begun
    shutil.rmtree(machine)
    starter.finish(machine, STEPS, remote=url)
    starter.finish(tmp_path / "undisturbed", STEPS)
    assert tiny.saved_bits(machine, STEPS) == tiny.saved_bits(tmp_path / "undisturbed", STEPS)
    assert curve(machine) == curve(tmp_path / "undisturbed")
    assert newest_at(url) == STEPS
    assert RemoteFolder(url).read("summary.json") == (machine / "summary.json").read_bytes()


def test_a_copy_that_does_not_end_in_the_grace_period_is_told_and_the_save_stays_here(
    tmp_path: Path, starter: runs.Runs
):
    url, machine = f"file://{tmp_path}/elsewhere/run", tmp_path / "machine"
    settings = {"survival": {"grace_seconds": 15}, "checkpoint": {"every_steps": 1000}}
    run = starter.start(machine, STEPS, when="step", remote=url, hang=0, settings=settings)
    assert run.wait() == EXIT_PREEMPTED, run.said()
    assert f"NOT all was copied to {url}" in run.said() and "was not saved within" not in run.said()
    assert CheckpointStore(machine / "checkpoints").steps() == [run.steps()[-1]]
    settings["survival"] = {"grace_seconds": 300}
    run = starter.start(machine, STEPS, when="step", remote=url, settings=settings)  # started again on the machine
    assert run.wait() == EXIT_PREEMPTED and newest_at(url) == run.steps()[-1]

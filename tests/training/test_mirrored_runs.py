"""Machines whose disks vanish with them: a run that is copied to a URL ends with the same bits on the next one."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.looking import compare
from affinage.checkpoint.remote import RemoteFolder
from affinage.checkpoint.remote_steps import RemoteSteps
from affinage.errors import EXIT_PREEMPTED
from affinage.training.metrics import curve

STEPS = 40


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Nursery]:
    with runs.Nursery(tmp_path_factory.mktemp("cache")) as nursery:
        yield nursery


def newest_at(url: str) -> int:
    return max([0, *RemoteSteps(RemoteFolder(url) / "checkpoints").steps()])


def test_stopped_and_killed_machines_lose_no_more_than_others(tmp_path: Path, nursery: runs.Nursery):
    url, machine = f"file://{tmp_path}/elsewhere/run", tmp_path / "machine"
    begun = 0
    for phase in ("save", "evaluation", "step"):  # told to stop: nothing is lost, though the disk is
        run = nursery.start(machine, STEPS, when=phase, remote=url)
        assert run.wait() == EXIT_PREEMPTED, run.said()
        assert f"copied to {url}" in run.said() and newest_at(url) == run.steps()[-1], run.said()
        assert run.steps()[0] == begun + 1, "it went on from the copy"
        begun = newest_at(url)
        shutil.rmtree(machine)
    run = nursery.start(machine, STEPS, remote=url)  # killed: what was copied stays
    while not run.steps():
        time.sleep(0.01)
    run.kill()
    assert run.wait() == -signal.SIGKILL and newest_at(url) >= begun
    shutil.rmtree(machine)
    nursery.finish(machine, STEPS, remote=url)
    nursery.finish(tmp_path / "undisturbed", STEPS)
    stores = [CheckpointStore(folder / "checkpoints") for folder in (machine, tmp_path / "undisturbed")]
    found = compare((stores[0], STEPS), (stores[1], STEPS), numbers=True)["arrays"]
    assert found["same"] and not found["different"] and not found["only"]
    assert curve(machine) == curve(tmp_path / "undisturbed")
    assert newest_at(url) == STEPS
    assert RemoteFolder(url).read("summary.json") == (machine / "summary.json").read_bytes()


def test_a_copy_that_does_not_end_in_the_grace_period_is_told_and_the_save_stays_here(
    tmp_path: Path, nursery: runs.Nursery
):
    url, machine = f"file://{tmp_path}/elsewhere/run", tmp_path / "machine"
    settings = {"survival": {"grace_seconds": 15}, "checkpoint": {"every_steps": 1000}}
    run = nursery.start(machine, STEPS, when="step", remote=url, hang=0, settings=settings)
    assert run.wait() == EXIT_PREEMPTED, run.said()
    assert f"NOT all was copied to {url}: there was no time for it; no checkpoint is there" in run.said()
    assert "was not saved within" not in run.said()
    assert CheckpointStore(machine / "checkpoints").steps() == [run.steps()[-1]]
    settings["survival"] = {"grace_seconds": 300}
    run = nursery.start(machine, STEPS, when="step", remote=url, settings=settings)  # started again on the machine
    assert run.wait() == EXIT_PREEMPTED and newest_at(url) == run.steps()[-1]

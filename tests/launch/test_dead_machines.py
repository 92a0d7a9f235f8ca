"""Two machines train one model, and the cable between them is pulled."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import cabled
import gangs
import pytest

from affinage.launch import Restarts, supervise

STEPS = 40
NAMED, GONE = "host {} is not answering", "Stopped: host {} is gone: its machine has not answered for"


@pytest.fixture(scope="module")
def machines() -> Iterator[cabled.Machines]:
    try:
        with cabled.Machines() as machines:
            yield machines
    except cabled.Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def nursery(machines: cabled.Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gangs.Nursery]:
    with gangs.Nursery(tmp_path_factory.mktemp("cache"), machines=machines) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: gangs.Nursery) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert supervise(nursery, gangs.order(folder, STEPS), Restarts(failures=0), say=print) == 0
    return folder


def begun(nursery: gangs.Nursery, folder: Path, seconds: float) -> gangs.ForkedGang:
    """A run that has made some steps; it can do without a machine's answer for so many seconds."""
    survival = {"silence_seconds": seconds}
    gang = nursery.start(gangs.order(folder, STEPS, settings={"survival": survival}, pause=0.3))
    while len(gangs.steps_of(folder)) < 3:
        assert not gang.ended(0.01), gang.said(0)
    time.sleep(2.5)  # until then nobody can know whether kernels' questions are answered
    return gang


def test_a_machine_that_is_cut_off_is_named_and_left_and_the_run_goes_on(machines, nursery, undisturbed, tmp_path):
    folder = tmp_path / "run"
    gang = begun(nursery, folder, 3)
    machines.pull()
    try:
        assert gang.wait() == [1, 1]
    finally:
        machines.plug()
    for host, other in ((0, 1), (1, 0)):
        said = gang.said(host)
        assert 0 < said.index(NAMED.format(other)) < said.index(f"{GONE.format(other)} 3 s"), said
    assert gangs.newest(folder) < STEPS
    assert supervise(nursery, gangs.order(folder, STEPS), Restarts(failures=0), say=print) == 0
    assert gangs.ended_alike(folder, undisturbed, STEPS)


def test_a_cut_that_is_mended_in_time_ends_nothing(machines, nursery, undisturbed, tmp_path):
    gang = begun(nursery, tmp_path / "run", 30)
    machines.pull()
    try:
        while not all(NAMED.format(other) in gang.said(host) for host, other in ((0, 1), (1, 0))):
            assert not gang.ended(0.01)
    finally:
        machines.plug()
    assert gang.wait() == [0, 0], (gang.said(0), gang.said(1))
    assert "host 1 is answering again" in gang.said(0)
    assert gangs.ended_alike(tmp_path / "run", undisturbed, STEPS)


def test_a_host_that_is_stopped_is_on_a_machine_that_answers(nursery, undisturbed, tmp_path):
    gang = begun(nursery, tmp_path / "run", 2)
    gang.kill(1, signal.SIGSTOP)
    time.sleep(5)
    gang.kill(1, signal.SIGCONT)
    assert gang.wait() == [0, 0], (gang.said(0), gang.said(1))
    assert "answering" not in gang.said(0) + gang.said(1)
    assert gangs.ended_alike(tmp_path / "run", undisturbed, STEPS)

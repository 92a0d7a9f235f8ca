"""Two processes, of which one stands still outside of a training, or where no step is made: it is named, and left.

One that stands still alone is ended by the process beside it.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import gangs
import pytest

from affinage.errors import EXIT_PREEMPTED
from affinage.launch import Restarts, supervise

STUCK = 0.8  # seconds; one that says nothing is lost after ten all the same, and one that sleeps left after 16
LIMIT = 240  # seconds until what does not come is a failure

SAVES = ("the first, in its last save", "the second, in its last save")
STOP = int(signal.SIGSTOP)
STANDS = {  # what stands still: stage, host, how; and what the other one says of it
    "the second, while the first makes data": ("data", 1, STOP, "host 1 shows no sign of life"),
    "the first, while it makes data": ("data", 0, STOP, "host 0 does not answer"),
    "the second, in an evaluation": ("evaluation", 1, STOP, "host 1 shows no sign of life"),
    "the first, in an evaluation": ("evaluation", 0, STOP, "host 0 does not answer"),
    "the first, asleep over data": ("data", 0, "sleep", "host 0 is behind, at it (stand_still, standing.py:"),
    "the second, asleep in an evaluation": ("evaluation", 1, "sleep", "host 1 is at it (stand_still, standing.py:"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, gangs.ForkedGang]]:
    """All of them beside each other, as they mostly wait."""
    folder = tmp_path_factory.mktemp("still")
    settings = {"checkpoint": {"every_steps": 6, "keep_every": 6}, "survival": {"stuck_seconds": 3}}
    hurts = [{"host": host, "phase": "step", "by": "disk"} for host in (0, 1)]
    jobs = {
        name: gangs.order(folder / name, 6, settings=settings, hurt=hurt)
        for name, hurt in zip(SAVES, hurts, strict=True)
    }
    for name, (stage, host, by, _) in STANDS.items():
        hurt = {"host": host, "by": by}
        jobs[name] = gangs.order(folder / name.replace(" ", "-"), 0, stage=stage, stuck_seconds=STUCK, hurt=hurt)
    with gangs.Nursery(folder / "cache") as nursery:
        gangs_by_name = {name: nursery.start(job) for name, job in jobs.items()}
        try:
            yield gangs_by_name
        finally:
            for gang in gangs_by_name.values():
                gang.end()


@pytest.mark.parametrize("host", [0, 1])
def test_a_last_save_that_hangs_is_told_with_its_stacks_and_the_host_whose_disk_it_is(
    started: dict[str, gangs.ForkedGang], host: int
):
    gang, told, late = started[SAVES[host]], "", time.monotonic() + LIMIT
    named = f"in the last save: host {host} is "
    while not all(words in told for words in (named, "in disk_that_does_not_answer")):
        assert time.monotonic() < late and not gang.ended(0.1), (told, gang.said(0), gang.said(1))
        told = stacks_of(gang)
    gang.end()
    assert f"host {1 - host} is " not in told


def test_who_stands_still_outside_of_trainings_is_named_with_stacks_and_left(started: dict[str, gangs.ForkedGang]):
    for name, (_, host, by, named) in STANDS.items():
        gang, other = started[name], 1 - host
        until_ended(gang, other)
        told = stacks_of(gang)
        assert gang.status(other) == EXIT_PREEMPTED or by == "sleep", (name, gang.said(0), gang.said(1))
        assert named in told and "Thread 0x" in told, (name, told)
        assert by != "sleep" or "in work" in told, (name, told)  # the line at which it sleeps


def test_a_host_that_is_alone_and_stopped_is_named_and_the_run_goes_on_by_itself(tmp_path: Path):
    steps, told = 12, []
    settings = {"survival": {"stuck_seconds": 3}}
    with gangs.Nursery(tmp_path / "cache", hosts=1) as nursery:
        assert nursery.start(gangs.order(tmp_path / "undisturbed", steps)).wait() == [0]

        class StoppedOnce:
            hosts, before = 1, None

            def start(self, command: Sequence[str]) -> gangs.ForkedGang:
                if self.before is not None:
                    told.append(self.before.said(0))
                hurt = {"hurt": {"host": 0, "phase": "step", "by": STOP}} if self.before is None else {}
                self.before = nursery.start(gangs.order(tmp_path / "run", steps, settings=settings, **hurt))
                return self.before

            def finish(self) -> None: ...

        assert supervise(StoppedOnce(), [], Restarts(failures=1), say=told.append) == 0, told
    assert "launch: host 0 was killed by SIGKILL; all hosts start again (1 of 1 failures)" in told
    assert any("train shows no sign of life for" in line and "stopped, as by SIGSTOP" in line for line in told), told
    assert gangs.ended_alike(tmp_path / "run", tmp_path / "undisturbed", steps)


def stacks_of(gang: gangs.ForkedGang) -> str:
    return "".join(file.read_text() for file in gang.folder.glob("stuck*.txt"))


def until_ended(gang: gangs.ForkedGang, host: int) -> None:
    late = time.monotonic() + LIMIT
    while gang.status(host) is None:
        assert time.monotonic() < late, (gang.said(0), gang.said(1))
        gang.ended(0.1)

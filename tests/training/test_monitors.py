"""A monitor's look is part of a training: stopped in its midst, the training saves, and the look is made again."""

import signal
from collections.abc import Callable

import pytest

import tiny
from affinage.checkpoint import CheckpointStore
from affinage.errors import Preempted
from affinage.training import train

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


def trained(folder, monitor: EndsAt, hook=None) -> dict:
    rhythm = {"eval_every": 100, "checkpoint": {"every_steps": 100, "keep_last": 9}}
    return train(tiny.job(folder, 10, hook, monitor=monitor, validation={"held-out": tiny.HeldOut()}, **rhythm))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """A training that its monitor ends, and nobody else."""
    monitor, folder = EndsAt(), tmp_path_factory.mktemp("whole")
    summary = trained(folder, monitor)
    assert (summary["steps"], summary["ended"]) == (LAST, "monitor") and len(monitor.batches) == 3 * BATCHES
    return folder


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.full), LAST])
def test_stopped_in_a_look_it_saves_at_that_step_and_ends_as_if_it_was_not(at: int, whole, tmp_path):
    monitor = EndsAt(interrupted_at=at)
    with pytest.raises(Preempted):
        trained(tmp_path, monitor)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [at]
    assert monitor.batches.count(at) == 2 and at not in monitor.made, "it was not given up"
    again, steps = EndsAt(), []
    ended = trained(tmp_path, again, lambda step, _: steps.append(step))
    assert again.made == list(range(at, LAST + 1, 2)) and steps == list(range(at + 1, LAST + 1))
    assert (ended["steps"], ended["ended"]) == (LAST, "monitor")
    assert tiny.curve(tmp_path) == tiny.curve(whole)
    assert tiny.saved_bits(tmp_path, LAST, "params") == tiny.saved_bits(whole, LAST, "params")

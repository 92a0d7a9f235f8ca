"""A judge's look at a training is part of it: stopped in its midst, the training saves, and the look is made again."""

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.errors import Preempted
from affinage.training import TrainJob, train
from affinage.training.metrics import curve
from affinage.training.state import TrainState
from affinage.training.watchdog import Watchdog

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

    def look(self, step: int, state: TrainState, stop: Callable[[], bool]) -> str:
        for number in range(BATCHES):
            if stop():
                return ""
            self.batches.append(step)
            if number == 1 and step == self.interrupted_at:
                signal.raise_signal(signal.SIGTERM)
        self.made.append(step)
        return "it was enough" if step == LAST else ""


def job(folder: Path, judge: EndsAt) -> TrainJob:
    rhythm = {"validate_every": 100, "checkpoint": {"every_steps": 100, "keep_last": 9}}
    values: dict[str, Any] = {"graph": tiny.graph(layers=1), "mesh": {"data": 1}, "seed": 1, "feed": tiny.RandomFeed()}
    held_out = {"held-out": tiny.HeldOut()}
    return TrainJob(**values, settings=tiny.settings(8, **rhythm), folder=folder, judge=judge, validation=held_out)


def weights(folder: Path) -> list[bytes]:
    state = CheckpointStore(folder / "checkpoints").restore(LAST, {"params": None})
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state["params"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that its judge ends, and nobody else. Every batch of a look is a sign of progress."""
    begun: list[str] = []
    judge, folder = EndsAt(), tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        told = Watchdog.begins
        patch.setattr(Watchdog, "begins", lambda *given, **more: begun.append(given[1]) or told(*given, **more))
        summary = train(job(folder, judge))
    assert summary["steps"] == LAST and summary["ended"] == "it was enough"
    assert begun.count("a batch of the benchmarks") == len(judge.batches) == 3 * BATCHES
    return folder


@pytest.mark.parametrize("at", [2, LAST])
def test_stopped_in_a_look_it_saves_at_that_step_and_ends_as_if_it_was_not(at: int, whole: Path, tmp_path: Path):
    judge = EndsAt(interrupted_at=at)
    with pytest.raises(Preempted):
        train(job(tmp_path, judge))
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [at]
    assert judge.batches.count(at) == 2 and at not in judge.made, "it was not given up"
    again = EndsAt()
    steps: list[int] = []
    ended = train(dataclasses.replace(job(tmp_path, again), on_step=(lambda step, _: steps.append(step),)))
    assert again.made == list(range(at, LAST + 1, 2)) and steps == list(range(at + 1, LAST + 1))
    assert (ended["steps"], ended["ended"]) == (LAST, "it was enough")
    assert curve(tmp_path) == curve(whole) and weights(tmp_path) == weights(whole)


def test_a_stop_that_came_before_a_look_does_not_wait_for_it(tmp_path: Path):
    judge = EndsAt()

    def told(step: int, _: TrainState) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted):
        train(dataclasses.replace(job(tmp_path, judge), on_step=(told,)))
    assert judge.made == [0] and 2 not in judge.batches
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2]

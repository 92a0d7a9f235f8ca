"""Every part of a training can be another one: with trivial ones it fails, goes on, and trains as before.

The strategy is `tiny.Kept`, that of all these tests.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tiny
from affinage.checkpoint import CheckpointStore
from affinage.hardware.devices import Hardware
from affinage.parallel.strategy import Strategy
from affinage.training import train
from affinage.training.state import TrainState
from affinage.training.trainer import Feed


class InMemory(CheckpointStore):
    """A store of checkpoints that forgets when the process ends."""

    def __init__(self) -> None:
        super().__init__("unused")
        self.kept: dict[int, tuple[Any, dict[str, Any]]] = {}

    def steps(self) -> list[int]:
        return sorted(self.kept)

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        self.kept[step] = jax.tree.map(np.array, dict(state)), dict(meta)

    def wait(self, timeout: float | None = None) -> None: ...

    def restore_newest(
        self, abstract: Mapping[str, Any], accept: Callable[[Mapping[str, Any]], None], before: int | None
    ) -> Any:
        if not self.kept:
            return None
        step = max(step for step in self.kept if before is None or step < before)
        state, meta = self.kept[step]
        accept(meta)
        return step, tiny.placed(state, dict(abstract)), meta


class Borrowed(Hardware):
    """Hardware that is one device of somebody's, and knows who has it."""

    lent = False

    def acquire(self) -> list[jax.Device]:
        self.lent = True
        return jax.devices()[1:2]

    def release(self) -> None:
        self.lent = False


def test_a_training_of_other_parts_is_the_usual_one(tmp_path: Path):
    store, hardware, own, seen = InMemory(), Borrowed(), tmp_path / "own", set()
    strategy: Strategy = tiny.Kept(tiny.job(tmp_path))
    feed: Feed = tiny.RandomFeed()
    parts = {"feed": feed, "store": store, "strategy": strategy, "hardware": hardware}

    def look(step: int, state: TrainState) -> None:
        assert hardware.lent
        seen.update(device for leaf in jax.tree.leaves(state.params) for device in leaf.devices())

    with pytest.raises(RuntimeError):
        train(tiny.job(own, on_step=(look, tiny.fails_at(6)), **parts))
    assert not hardware.lent  # given back, whatever happened
    assert train(tiny.job(own, 10, look, **parts))["resumed_at"] == [5] and store.steps() == [5, 10]
    assert seen == {jax.devices()[1]} and not (own / "checkpoints").exists()
    train(tiny.job(tmp_path / "usual"))
    ours, usual = ([row["loss"] for row in tiny.lines(folder) if "loss" in row] for folder in (own, tmp_path / "usual"))
    assert ours == pytest.approx(usual, rel=1e-6) and len(usual) == 10

"""Every part of a training can be another one: with a trivial one each it fails, goes on, and trains as before."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from affinage.hardware.acquisition import Hardware
from affinage.launch import Ending, Launcher, Restarts, supervise
from affinage.model import Call, Graph
from affinage.parallel import Strategy
from affinage.tracking import TrackedRun, Tracker
from affinage.training import train
from affinage.training.job import Checkpoints, Feed
from affinage.training.state import TrainState

STEPS = 10


class Listed:
    """A feed of batches that were made before."""

    def __init__(self) -> None:
        self.batches = [tiny.RandomFeed().batch(step) for step in range(STEPS)]

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield self.batches[start_step % STEPS]
            start_step += 1


class InMemory:
    """A store of checkpoints that forgets when the process ends."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Any, dict[str, Any]]] = {}

    def steps(self) -> list[int]:
        return sorted(self.kept)

    def prepare(self, state: Mapping[str, Any]) -> None: ...

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        self.kept[step] = jax.tree.map(np.array, dict(state)), dict(meta)

    def wait(self) -> None: ...

    def in_flight(self) -> float:
        return 0.0

    def forget_after(self, step: int) -> None:
        self.kept = {kept: saved for kept, saved in self.kept.items() if kept <= step}

    def restore_newest(
        self, abstract: Mapping[str, Any], accept: Callable[[Mapping[str, Any]], None], at_most: int | None
    ) -> Any:
        if not self.kept:
            return None
        step = max((step for step in self.kept if at_most is None or step <= at_most), default=min(self.kept))
        state, meta = self.kept[step]
        accept(meta)
        return step, tiny.placed(state, dict(abstract)), meta


class Jit:
    """A strategy that compiles when it is called first, and leaves all to XLA."""

    def check(self, graph: Graph, rows: int, call: Call) -> None: ...

    def adapt(self, call: Call) -> Call:
        return call

    def compile_training(self, step: Any, state: Any, batch: Any) -> Any:
        return jax.jit(step)

    def compile_evaluation(self, step: Any, params: Any, batch: Any) -> Any:
        return jax.jit(step)


class Losses:
    """A tracker that keeps one number."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def start(self, run: TrackedRun) -> str:
        return "here"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self.found[step] = values["train/loss"]

    def finish(self, ending: str) -> None: ...


class Borrowed:
    """Hardware that is one device of somebody's, and knows who has it."""

    lent = False

    def acquire(self) -> list[jax.Device]:
        self.lent = True
        return jax.devices()[1:2]

    def release(self) -> None:
        self.lent = False


class Here:
    """A launcher that does the work of a command itself, on one host."""

    hosts = 1

    def __init__(self, work: Callable[[Sequence[str]], None]) -> None:
        self.work, self.status = work, 0

    def start(self, command: Sequence[str]) -> "Here":
        try:
            self.work(command)
            self.status = 0
        except RuntimeError:
            self.status = 1
        return self

    def finish(self) -> None: ...

    def ended(self, seconds: float) -> list[Ending]:
        return [Ending(0, self.status)]

    def tell(self, number: int) -> None: ...

    def end(self) -> None: ...


def test_a_training_of_other_parts_is_the_usual_one(tmp_path: Path):
    feed: Feed = Listed()
    store: Checkpoints = InMemory()
    strategy: Strategy = Jit()
    tracker: Tracker = Losses()
    hardware: Hardware[jax.Device] = Borrowed()
    starts, summaries, seen = [], [], set()

    def look(step: int, state: TrainState) -> None:
        assert hardware.lent
        seen.update(device for leaf in jax.tree.leaves(state.params) for device in leaf.devices())

    def work(command: Sequence[str]) -> None:
        starts.append(list(command))
        assert not hardware.lent  # given back, whatever happened
        parts = {"feed": feed, "store": store, "strategy": strategy, "hardware": hardware}
        hooks = (look, tiny.fails_at(6 if len(starts) == 1 else 0))
        summaries.append(
            train(tiny.job(tmp_path / "own", STEPS, trackers={"own": lambda: tracker}, on_step=hooks, **parts))
        )

    launcher: Launcher = Here(work)
    assert supervise(launcher, ["train", "x.yaml"], Restarts(), say=lambda line: None) == 0
    assert starts == [["train", "x.yaml"]] * 2
    assert summaries[0]["resumed_at"] == [5] and store.steps() == [5, 10]
    assert seen == {jax.devices()[1]} and not (tmp_path / "own" / "checkpoints").exists()

    train(tiny.job(tmp_path / "usual", STEPS))
    usual = {line["step"]: line["loss"] for line in tiny.lines(tmp_path / "usual") if "loss" in line}
    assert tracker.found == pytest.approx(usual, rel=1e-6) and len(usual) == STEPS

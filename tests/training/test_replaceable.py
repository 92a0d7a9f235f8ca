"""Every part of a training can be another one: here a trivial one each, and it trains as before."""

import csv
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
from affinage.tracking import TrackedRun
from affinage.training import TrainJob, train
from affinage.training.job import Checkpoints, Feed
from affinage.training.metrics import MetricsLog
from affinage.training.state import TrainState

STEPS = 6


class Alphabet:
    """A feed of one sentence, for ever."""

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        tokens = np.tile(np.arange(tiny.CONTEXT, dtype=np.int32), (8, 1))
        ones = np.ones_like(tokens)
        while True:
            yield {
                "tokens": tokens,
                "segment_ids": ones,
                "positions": tokens,
                "loss_mask": ones.astype(np.float32),
                "rows": np.arange(8, dtype=np.int32),
            }


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
        put = jax.tree.map(lambda like, array: jax.device_put(array, like.sharding), dict(abstract), state)
        return step, put, meta


class Jit:
    """A strategy that compiles when it is called first, and leaves all to XLA."""

    def check(self, graph: Graph, rows: int, call: Call) -> None: ...

    def adapt(self, call: Call) -> Call:
        return call

    def compile_training(self, step: Any, state: Any, batch: Any) -> Any:
        return jax.jit(step)

    def compile_evaluation(self, step: Any, params: Any, batch: Any) -> Any:
        return jax.jit(step)


class Csv:
    """A tracker of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, run: TrackedRun) -> str:
        return self.path.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([step, values.get("train/loss")])

    def finish(self, ending: str) -> None: ...


def job(folder: Path, **parts: Any) -> TrainJob:
    return tiny.job(folder, STEPS, **parts)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in MetricsLog(folder / "metrics.jsonl", STEPS).training()]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("usual")
    train(job(folder))
    return losses(folder)


def test_another_feed(tmp_path: Path, usual: list[float]):
    feed: Feed = Alphabet()
    summary = train(job(tmp_path, feed=feed))
    assert summary["final_loss"] < usual[-1]  # one sentence is learned faster than noise


def test_another_store_of_checkpoints(tmp_path: Path, usual: list[float]):
    memory = InMemory()
    store: Checkpoints = memory

    with pytest.raises(RuntimeError):
        train(job(tmp_path, store=store, hook=tiny.fails_at(6)))
    assert memory.steps() == [5] and not (tmp_path / "checkpoints").exists()
    assert train(job(tmp_path, store=store))["resumed_at"] == [5]
    assert losses(tmp_path) == usual and memory.steps() == [5, 6]


def test_another_strategy(tmp_path: Path, usual: list[float]):
    train(job(tmp_path, strategy=Jit(), mesh={"fsdp": 2}))
    assert losses(tmp_path) == pytest.approx(usual, rel=1e-5)


def test_another_tracker(tmp_path: Path, usual: list[float]):
    train(job(tmp_path, trackers={"csv": lambda: Csv(tmp_path / "losses.csv")}))
    rows = [row for row in csv.reader((tmp_path / "losses.csv").open()) if row[1]]
    assert [float(loss) for _, loss in rows] == usual


class Borrowed:
    """Hardware that is one device of somebody's, and knows who has it."""

    def __init__(self) -> None:
        self.lent = False

    def acquire(self) -> list[jax.Device]:
        self.lent = True
        return jax.devices()[1:2]

    def release(self) -> None:
        self.lent = False


def test_other_hardware(tmp_path: Path, usual: list[float]):
    borrowed, seen = Borrowed(), set()
    hardware: Hardware[jax.Device] = borrowed

    def look(step: int, state: TrainState) -> None:
        assert borrowed.lent
        seen.update(device for leaf in jax.tree.leaves(state.params) for device in leaf.devices())

    with pytest.raises(RuntimeError):
        train(job(tmp_path, hardware=hardware, on_step=(look, tiny.fails_at(6))))
    assert not borrowed.lent  # given back, whatever happened
    train(job(tmp_path, hardware=hardware, on_step=(look,)))
    assert losses(tmp_path) == usual and seen == {jax.devices()[1]} and not borrowed.lent


class Here:
    """A launcher that does the work of a command itself, on one host."""

    hosts = 1

    def __init__(self, work: Callable[[Sequence[str]], None]) -> None:
        self.work, self.told = work, []

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

    def tell(self, number: int) -> None:
        self.told.append(number)

    def end(self) -> None: ...


def test_another_launcher(tmp_path: Path, usual: list[float]):
    starts = []

    def work(command: Sequence[str]) -> None:
        starts.append(list(command))

        train(job(tmp_path, hook=tiny.fails_at(6 if len(starts) == 1 else 0)))

    said: list[str] = []
    launcher: Launcher = Here(work)
    assert supervise(launcher, ["train", "x.yaml"], Restarts(), say=said.append) == 0
    assert starts == [["train", "x.yaml"]] * 2 and len(said) == 1
    assert losses(tmp_path) == usual

"""A run that extends another is the run that one would have made of the same pieces at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from affinage.data.dataloader import DataLoader
from affinage.training import TrainJob, train
from affinage.training.checkpointing import Checkpointer
from affinage.training.metrics import GoodputTimer
from affinage.training.watchdog import Watchdog
from run_affinage import refused
from token_rows import write_tokens

BORDER, STEPS = 10, 16
SCHEDULE = {"name": "constant", "peak_lr": 1e-2, "min_lr": 0.0, "warmup_steps": 4}
MIXTURE = [{"from_step": 0, "weights": {"all": 1.0}}, {"from_step": BORDER, "weights": {"a": 3.0, "b": 1.0}}]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for name, seed in (("a", 1), ("b", 2)):
        tokens = np.random.default_rng(seed).integers(5, tiny.VOCABULARY, (50, tiny.CONTEXT)).astype(np.uint16)
        write_tokens(folder / name, tokens, source=name, language="")
    return folder


def job(folder: Path, rows: Path, steps: int, mixture: list | None, **changes: Any) -> TrainJob:
    stages = None if mixture is None else [(stage["from_step"], stage["weights"]) for stage in mixture]
    changes |= {"schedule": SCHEDULE, "mixture": mixture, "eval_every": 5, "data": {"rows": "the same"}}
    changes |= {"graph": tiny.graph(dropout=0.1, layers=1), "validation": {"held out": tiny.HeldOut()}}
    return tiny.job(folder, steps, feed=DataLoader(rows, seed=3, batch=8, mixture=stages), **changes)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def first(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    train(job(folder, rows, BORDER, None))
    return folder


@pytest.mark.full
def test_more_steps_and_new_weights_are_one_run_bit_for_bit(rows: Path, first: Path, tmp_path: Path):
    before = files_of(first)
    train(job(tmp_path / "one", rows, STEPS, MIXTURE))
    allowed = {"every_steps": 5, "allow_changes": ["mixture"]}  # its first stage is what was trained on
    extension = job(tmp_path / "more", rows, STEPS, MIXTURE, extends=(first, BORDER), checkpoint=allowed)

    with pytest.raises(RuntimeError):
        train(replace(extension, on_step=(tiny.fails_at(12),)))  # before anything was saved
    summary = train(extension)
    assert tiny.saved_bits(tmp_path / "more", STEPS) == tiny.saved_bits(tmp_path / "one", STEPS)
    assert tiny.curve(tmp_path / "more") == tiny.curve(tmp_path / "one")
    assert summary["steps"] == STEPS and summary["resumed_at"] == [BORDER]
    assert files_of(first) == before


@pytest.mark.parametrize(
    ("changes", "mixture", "named"),
    [
        ({"optimizer": {"b1": 0.8}}, None, "optimizer.b1"),
        ({}, [{"from_step": 0, "weights": {"a": 1.0}}], "mixture"),
        ({"optimizer": {"name": "sgd"}, "checkpoint": {"allow_changes": ["optimizer"]}}, None, "opt_state"),
        ({"health": {"spike_window": 16}, "checkpoint": {"allow_changes": ["health"]}}, None, "window.losses"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is extended with another", "ignore:coroutine .* was never awaited")
def test_what_an_extension_may_not_change_is_refused_by_name(rows, first, tmp_path, changes, mixture, named: str):
    extension = job(tmp_path, rows, STEPS, mixture, extends=(first, BORDER), **changes)
    watchdog = Watchdog("train", tmp_path, extension.runtime)
    refused(Checkpointer(tiny.uncompiled(extension), GoodputTimer(), watchdog).restore, match=named)

"""The watchdog leaves what does not end, whoever reads what it says; and nothing that has ended."""

import os
import queue
import sys
import time
from pathlib import Path

import pytest

from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess
from affinage.training import watchdog
from affinage.training.ledger import LifeSign
from affinage.training.watchdog import Watchdog


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    """Why this process would have been left."""
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "leave", why.put)
    monkeypatch.setattr(OwnProcess, "current", OwnProcess())
    return why


def watched(folder: Path) -> Watchdog:
    found = Watchdog("train", folder, SurvivalSettings(stuck_seconds=0.2, leave_when_stuck=True), LifeSign(None))
    found.step_begins(1)
    return found


def test_it_leaves_though_nobody_reads_what_it_says(tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch):
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(watchdog, "_LAST_WORDS", 0.0)
    monkeypatch.setattr(sys, "stderr", os.fdopen(writes, "w"))
    with watched(tmp_path):
        assert left.get(timeout=60).startswith("train: step 1 has not ended for")


def test_a_training_that_ends_while_it_is_about_to_be_left_is_not_left(
    tmp_path: Path, left, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "_LAST_WORDS", 600.0)
    with watched(tmp_path):
        late = time.monotonic() + 60
        while "step 1 has not ended" not in capfd.readouterr().err:
            assert time.monotonic() < late
            time.sleep(0.01)
    assert left.empty()

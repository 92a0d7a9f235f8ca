"""Every second of a run is in one account, as the wall clock has it, over failures and preemptions."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from affinage.errors import Preempted
from affinage.training import metrics, train
from affinage.training.metrics import ACCOUNTS, GoodputTimer

SLOW = 0.05  # seconds to make a batch


class SlowFeed(tiny.RandomFeed):
    def iterate(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        for batch in super().iterate(number):
            time.sleep(SLOW)
            yield batch


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times, in seconds since 1970, at which accounts were read; the last time is that of the summary."""
    times, seconds = [], GoodputTimer.seconds

    def timed(accounts: GoodputTimer) -> dict[str, float]:
        found = seconds(accounts)
        times.append(time.time())
        return found

    monkeypatch.setattr(GoodputTimer, "seconds", timed)
    return times


@pytest.mark.full
def test_the_accounts_are_the_wall_clock_over_a_failure_a_preemption_and_pauses(tmp_path: Path, looked_at: list[float]):
    summary, began = None, time.time()
    for hook in (tiny.fails_at(8), tiny.stops_at(12), None):
        with contextlib.nullcontext() if hook is None else pytest.raises((Preempted, RuntimeError)):
            how = {"feed": SlowFeed(), "validation": {"x": tiny.HeldOut()}, "log_every": 2}
            summary = train(tiny.job(tmp_path, 14, hook, **how))
        time.sleep(0.3)
    assert summary is not None and summary["resumed_at"] == [5, 12]
    wall = looked_at[-1] - began
    seconds = summary["seconds"]
    assert seconds["total"] == pytest.approx(wall, rel=0.01)
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in ACCOUNTS), abs=0.01)
    assert 0.55 <= seconds["paused"] + seconds["lost"] <= wall
    assert all(seconds[name] > 0 for name in ("compute", "compile", "data", "validation", "save", "restore"))
    lines = [line for line in tiny.lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines][:4] == [1, 2, 4, 6]
    assert all(line["data_time"] > 0 for line in lines) and lines[1]["data_time"] >= SLOW - 0.001


def test_accounts_inside_of_others_are_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr(metrics, "time", clock)
    accounts = GoodputTimer()
    with accounts.account("compute"):
        clock.now += 1
        with accounts.account("save"):
            clock.now += 8
        clock.now += 2
    clock.now += 0.5
    expected = {**dict.fromkeys(ACCOUNTS, 0.0), "compute": 3.0, "save": 8.0, "idle": 0.5}
    assert accounts.seconds() == expected
    accounts.lose_since({"seconds": {"compute": 0.25}})
    assert accounts.seconds() == {**expected, "compute": 0.25, "save": 0.0, "lost": 10.75}

    (tmp_path / "written").touch()
    os.utime(tmp_path / "written", (60.0, 60.0))  # the start before was saved at 50, and ended at 60
    accounts = GoodputTimer(tmp_path / "written")
    accounts.resume({"seconds": {"compute": 5.0}, "clock": 50.0})
    resumed = {"compute": 5.0, "lost": 10.0, "paused": 51.5}
    assert accounts.seconds() == {**dict.fromkeys(ACCOUNTS, 0.0), **resumed}

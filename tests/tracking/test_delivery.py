"""A tracker that is slow, fails or hangs takes nothing from the training and is told of once."""

import threading
from pathlib import Path

import pytest

import tiny
from affinage import tracking
from affinage.tracking import TrackedRun, Tracker, Trackers, metrics_of, tracker, trackers_of
from affinage.training import train
from run_affinage import refused


class Listed:
    """Starts a tracker that keeps what it gets, and fails where it is told to."""

    def __init__(self, fails: str = "", hangs: bool = False) -> None:
        self.fails, self.hangs, self.runs, self.lines, self.endings = fails, threading.Event(), [], [], []
        if not hangs:
            self.hangs.set()

    def _enter(self, method: str) -> None:
        if self.fails == method:
            self.hangs.wait()
            raise SystemExit(f"no {method} with token=abcdefgh12345")

    def __call__(self, run: TrackedRun) -> Tracker:
        self._enter("start")
        self.runs.append(run)
        return Tracker(run.id or "the id", self.log, self.finish)

    def log(self, step: int, values: dict) -> None:
        self._enter("log")
        self.lines.append((step, values))

    def finish(self, ending: str) -> None:
        self._enter("finish")
        self.endings.append(ending)


def test_a_tracker_gets_every_line_and_its_id_again(tmp_path: Path):
    first, second = Listed(), Listed()
    held_out = {"validation": {"x": tiny.HeldOut()}}
    with pytest.raises(RuntimeError):
        train(tiny.job(tmp_path, 10, tiny.fails_at(8), trackers={"a": first}, **held_out))
    train(tiny.job(tmp_path, 10, trackers={"a": second}, **held_out))
    assert (first.runs[0].id, second.runs[0].id) == ("", "the id") and second.runs[0].start == 5
    assert first.endings == ["failed"] and second.endings == ["finished"]
    assert [step for step, _ in second.lines] == [6, 7, 8, 9, 10, 10]
    assert [step for step, values in second.lines if "validation/x/bits_per_byte" in values] == [10]
    assert second.runs[0].facts["settings"]["steps"] == 10


def deliver(folder: Path, of: dict[str, Listed]) -> list[str]:
    """Hand over some lines, and return what was reported."""
    reports: list[str] = []
    with Trackers(of, TrackedRun("t"), folder, reports.append) as delivery:
        for step in range(1, 11):
            delivery.log({"step": step, "loss": None if step == 1 else 1.0 / step, "skipped": 0.0})
    for each in of.values():
        each.hangs.set()
    return reports


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_or_hangs_is_told_of_once_and_the_others_go_on(tmp_path, monkeypatch, method, hangs: bool):
    monkeypatch.setattr(tracking, "TO_CLOSE", {"finished": 1.0 if hangs else 30.0})
    well = Listed()
    [said] = deliver(tmp_path, {"sick": Listed(method, hangs), "well": well})
    assert len(well.lines) == 10 and well.endings == ["finished"]
    assert well.lines[:2] == [(1, {"train/skipped": 0.0}), (2, {"train/loss": 0.5, "train/skipped": 0.0})]
    assert "tracker sick" in said and "abcdefgh12345" not in said


def test_of_a_tracker_that_is_too_slow_lines_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "WAITING", 3)
    monkeypatch.setattr(tracking, "TO_CLOSE", {"finished": 0.1})
    [report] = deliver(tmp_path, {"stuck": Listed("log", hangs=True)})
    assert "loses lines" in report


def test_plugins_have_trackers_too():
    @tracker("listed")
    def own(run: TrackedRun, fails: str = "") -> Tracker:
        return Listed(fails)(run)

    assert trackers_of({"listed": {"fails": "never"}})["listed"](TrackedRun("t")).id == "the id"
    refused(trackers_of, {"lisded": {}}, match="lisded")
    refused(trackers_of, {"listed": {"falls": 1}}, match="falls")


def test_scores_have_names_by_what_they_are_of():
    row = {"step": 7, "evaluation": {"tasks": {"piqa": {"acc": {"value": 0.5, "stderr": None}}}}}
    assert metrics_of(row) == {"evaluation/tasks/piqa/acc/value": 0.5}

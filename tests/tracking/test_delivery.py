"""A tracker that is slow, fails or hangs takes nothing from the training and is told of once."""

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
import tiny

from affinage.errors import UserError
from affinage.tracking import TrackedRun, Trackers, tracker, trackers_of
from affinage.tracking.trackers import metrics_of
from affinage.training import train
from waiting import until


class Listed:
    """Keeps what it gets, and fails where it is told to."""

    def __init__(self, fails: str = "", hangs: threading.Event | None = None) -> None:
        self.fails, self.hangs, self.runs, self.lines, self.endings = fails, hangs, [], [], []

    def _enter(self, method: str) -> None:
        if self.fails == method:
            if self.hangs is not None:
                self.hangs.wait()
            raise SystemExit(f"no {method} with token=abcdefgh12345")

    def start(self, run: TrackedRun) -> str:
        self._enter("start")
        self.runs.append(run)
        return run.id or "the id"

    def log(self, step: int, values: dict) -> None:
        self._enter("log")
        self.lines.append((step, values))

    def finish(self, ending: str) -> None:
        self._enter("finish")
        self.endings.append(ending)


def test_a_tracker_gets_every_line_and_its_id_again(tmp_path: Path):
    def trained(hook: object = None, **trackers: Listed) -> None:
        makers = {name: (lambda each=each: each) for name, each in trackers.items()}
        train(tiny.job(tmp_path, 10, hook, validation={"x": tiny.HeldOut()}, trackers=makers))

    first, second, late = Listed(), Listed(), Listed()
    with pytest.raises(RuntimeError):
        trained(tiny.fails_at(8), a=first)
    trained(a=second, late=late)
    assert (first.runs[0].id, second.runs[0].id) == ("", "the id") and second.runs[0].start == 5
    assert first.endings == ["failed"] and second.endings == ["finished"]
    told = [(step, values["train/loss"]) for step, values in late.lines if "train/loss" in values]
    assert told == [(row["step"], row["loss"]) for row in tiny.lines(tmp_path) if "loss" in row]  # also of before it
    assert [step for step, values in late.lines if "validation/x/bits_per_byte" in values] == [10]
    assert [step for step, _ in second.lines] == [6, 7, 8, 9, 10, 10]
    assert second.runs[0].facts["settings"]["steps"] == 10


def deliver(folder: Path, trackers: dict[str, Listed], lines: int = 10, **limits: object) -> list[str]:
    """Hand over some lines; what was said."""
    said: list[str] = []
    makers = {name: (lambda each=each: each) for name, each in trackers.items()}
    # Whoever takes lines at all is in time for them, where few are kept for those who do not.
    takes = [each for each in trackers.values() if limits.get("waiting") and each.fails not in ("start", "log")]
    with Trackers(makers, TrackedRun("t"), folder, before=(), say=said.append, **limits) as delivery:
        for step in range(1, lines + 1):
            delivery.log({"step": step, "loss": None if step == 1 else 1.0 / step, "skipped": 0.0})
            until(lambda step=step: all(len(each.lines) >= step for each in takes))
    return said


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path, method: str):
    well = Listed()
    [said] = deliver(tmp_path, {"sick": Listed(method), "well": well})
    assert len(well.lines) == 10 and well.endings == ["finished"]
    assert well.lines[:2] == [(1, {"train/skipped": 0.0}), (2, {"train/loss": 0.5, "train/skipped": 0.0})]
    assert "tracker sick" in said and "abcdefgh12345" not in said


@pytest.mark.parametrize("method", ["start", "finish"])
def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, method: str):
    for_ever, well = threading.Event(), Listed()
    told = deliver(tmp_path, {"stuck": Listed(method, for_ever), "well": well}, waiting=3, close_seconds=0.3)
    for_ever.set()
    assert len(well.lines) == 10
    assert len([line for line in told if "tracker stuck" in line]) == 1


def test_plugins_have_trackers_too(tmp_path: Path):
    @tracker("listed")
    class Own(Listed):
        pass

    where = {"recipe": "r", "training": "t", "runs": tmp_path}
    made = trackers_of({"listed": {"fails": "never"}}, **where)["listed"]()
    assert isinstance(made, Own) and made.fails == "never"
    with pytest.raises(UserError, match="lisded"):
        trackers_of({"lisded": {}}, **where)
    with pytest.raises(UserError, match="falls"):
        trackers_of({"listed": {"falls": 1}}, **where)


def test_scores_have_names_by_what_they_are_of():
    scores = {"tasks": {"piqa": {"acc": {"value": 0.5, "stderr": None}}}, "bits_per_byte": {"en": 1.5}}
    assert metrics_of({"step": 7, "evaluation": scores}) == {
        "evaluation/tasks/piqa/acc/value": 0.5,
        "evaluation/bits_per_byte/en": 1.5,
    }

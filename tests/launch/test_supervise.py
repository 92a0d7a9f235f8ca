"""Which endings start a run again, how often, and who is told of."""

import signal
import time
from collections.abc import Sequence

import pytest

from affinage.errors import UserError
from affinage.hardware import missed
from affinage.launch import Ending, Gang, Restarts, supervise, told
from affinage.launch.local import Watch
from affinage.launch.process import HostProcess
from affinage.launch.told import Told
from affinage.stopping import STOPPED

TOLD = (signal.SIGTERM,)
SAVES = (75,)


def gone(host: int) -> missed.Missed:
    return missed.Missed(host, "is gone")


class Scripted:
    """A launcher whose hosts end as is written: for every start, (host, status) in order, a third where it is lost.

    An ending with more to it is written as such.

    At `TOLD` the process that supervises them gets SIGTERM; at `SAVES` they go on until they are told to stop. A start
    that is an exception is one that fails with it.
    """

    hosts = 2

    def __init__(self, *starts: Sequence[tuple[int, ...] | Ending] | Exception) -> None:
        self.starts, self.begun, self.told, self.ended, self.finished = list(starts), 0, [], 0, False

    def start(self, command: Sequence[str]) -> Gang:
        start = self.starts.pop(0)
        if isinstance(start, Exception):
            raise start
        script, launcher = list(start), self
        launcher.begun += 1

        class Here:
            def ended(self, seconds: float) -> list[Ending]:
                if not script or (script[0] == SAVES and not launcher.told):
                    time.sleep(min(seconds, 0.01))
                    return []
                if script[0] == SAVES:
                    script.pop(0)
                if not script:
                    return []
                if script[0] == TOLD:
                    signal.raise_signal(script.pop(0)[0])
                    return []
                ending = script.pop(0)
                if isinstance(ending, Ending):
                    return [ending]
                host, status, *lost = ending
                return [Ending(host, status, out_of_sight=bool(lost))]

            def tell(self, number: signal.Signals) -> None:
                launcher.told.append(number)

            def end(self) -> None:
                launcher.ended += 1

        return Here()

    def finish(self) -> None:
        self.finished = True


def run(launcher: Scripted, grace: float = 60.0, room_every: float = 60.0, **restarts: float) -> tuple[int, list[str]]:
    said: list[str] = []
    watched = {"grace": grace, "room_every": room_every, "say": said.append}
    status = supervise(launcher, ["run", "x"], Restarts(**restarts), **watched)  # type: ignore[arg-type]
    assert launcher.ended == launcher.begun and launcher.finished  # nothing is left
    return status, said


DONE = [(1, 0), (0, 0)]


KILLED, SAVED = [(1, -signal.SIGKILL)], [(0, 75), (1, 75)]


@pytest.mark.parametrize(
    ("endings", "told"),
    [
        ([(1, -signal.SIGKILL), (0, -signal.SIGABRT)], "host 1 was killed by SIGKILL"),
        ([Ending(0, 1, missed=gone(1)), (1, -signal.SIGKILL)], "host 1 was killed by SIGKILL"),
        ([Ending(0, 1, missed=gone(1)), (1, 3)], "host 1 failed with status 3"),
        ([Ending(0, 1, missed=gone(1)), (1, 75, True)], "host 1 was lost sight of"),
        ([(1, -signal.SIGABRT), (0, -signal.SIGKILL)], "host 0 was killed by SIGKILL"),  # JAX, without its coordinator
        ([(0, -signal.SIGABRT), (1, 1)], "host 1 failed with status 1"),  # JAX, where another one fails
        ([(0, -signal.SIGABRT), Ending(1, 1, missed=gone(0))], "host 0 was killed by SIGABRT"),
        ([Ending(0, 1, "a", missed=gone(1))], "host 1 is gone, says host 0 (a)"),  # its machine: its end is never seen
        ([Ending(0, 1, missed=gone(1)), Ending(1, 1, missed=gone(0))], "host 1 is gone, says host 0"),  # a cut
    ],
)
def test_after_a_failure_all_start_again_and_who_died_is_told_of_and_not_who_left_for_it(endings: list, told: str):
    hosts = max(2, len(endings))
    launcher = Scripted(endings, [(host, 0) for host in range(hosts)])
    launcher.hosts = hosts
    status, said = run(launcher)
    assert status == 0 and said == [f"launch: {told}; all hosts start again (1 of 10 failures)"]


def test_whom_a_host_misses_is_told_of_in_its_words():
    left = Ending(0, 75, missed=missed.Missed(1, "does not answer"))
    status, said = run(Scripted([left, (1, -signal.SIGKILL)], DONE), failures=0)
    assert status == 0 and "host 1 does not answer, says host 0" in said[0] and "1 of 1000 preemptions" in said[0]
    assert str(Ending(1, 75, "a", missed=missed.Missed(1, "is behind"))) == "host 1 (a) is behind"


def test_what_hosts_say_of_one_that_is_missed_is_read_in_the_same_words():
    now, late = missed.at("the save", "write, store.py:3"), "mine: the save has not ended for 540 s"
    for said, how in {
        missed.gone(1): "is gone",
        f"{late}: {missed.mute(1)}": "does not answer",
        f"{late}, and {missed.silent(1, now)}": "shows no sign of life",
        f"{late}: {missed.behind(1, now)}": "is behind",
        f"{late}: {missed.waited_for(1, now)}": "is at the save",
        f"{late}: {missed.waited_for(1, missed.at_nothing_yet())}": "is before its first sign",
    }.items():
        assert missed.missed_by(f"{STOPPED}{said}. Run the same command to go on.") == missed.Missed(1, how), said


def test_what_a_host_says_as_it_leaves_is_of_its_ending():
    said: list[str] = []
    process = HostProcess(["sh", "-c", "echo step 3; echo; echo Stopped: host 1 is gone.; echo more; exit 1"])
    watch, found = Watch([process], said.append, ["a"]), []
    while not found:
        found = watch.ended(1.0)
    process.end()
    assert found == [Ending(0, 1, "a", missed=gone(1))] and said[0] == "0 | step 3"


@pytest.mark.parametrize(
    ("starts", "limits", "status", "begun"),
    [
        ([SAVED, [(0, 1)], SAVED, [(0, 1)]], {"preemptions": 2, "failures": 1}, 1, 4),
        ([SAVED, SAVED], {"preemptions": 1, "failures": 0}, 75, 2),
        ([KILLED, SAVED, KILLED, SAVED, DONE], {"preemptions": 1, "failures": 1, "lasting": 0.0}, 0, 5),
        ([KILLED, SAVED, KILLED, SAVED, DONE], {"preemptions": 1, "failures": 1, "lasting": 60.0}, 1, 3),
        ([[(1, 0), (0, 2)]], {}, 2, 1),
    ],
    ids=["two budgets", "preemptions", "a start that lasted gives them back", "one that did not", "a user's mistake"],
)
def test_a_run_starts_again_as_often_as_its_budgets_allow(starts: list, limits: dict, status: int, begun: int):
    launcher = Scripted(*starts)
    assert run(launcher, **limits)[0] == status and launcher.begun == begun


class Growing(Scripted):
    """Has room for more hosts when the first start is looked at for the second time, but not for the third."""

    looks = 0

    def has_room(self) -> bool:
        self.looks += 1
        return self.begun == 1 and self.looks in (2, 4, 5)


def test_hosts_give_way_to_more_of_them_and_that_is_no_preemption():
    launcher = Growing([SAVES, (1, 75), (0, 75)], DONE)
    status, said = run(launcher, room_every=0.0, preemptions=0, failures=0)
    assert status == 0 and launcher.begun == 2 and launcher.told == [signal.SIGINT]
    assert len(said) == 1 and "room for more hosts" in said[0] and launcher.looks == 5
    status, said = run(Growing([SAVES, (1, 1), (0, 75)]), room_every=0.0, preemptions=0, failures=0)
    assert status == 1 and "host 1 failed" in said[-1]  # it could not save
    assert run(Growing([SAVES, (1, 0), (0, 0)]), room_every=0.0, preemptions=0, failures=0)[0] == 0  # they were done


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(Told, "wait", lambda self, seconds: waited.append(seconds))
    return waited


def test_a_start_that_fails_is_the_users_at_first_and_tried_again_later_ever_more_seldom(pauses: list[float]):
    nowhere = UserError("no room", fix="Look.")
    with pytest.raises(UserError):
        run(Scripted(nowhere, DONE))
    status, said = run(Scripted(KILLED, nowhere, RuntimeError("a node\nis lost"), KILLED, nowhere, DONE))
    assert status == 0 and pauses == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert "no room" in said[1] and said[2].endswith(
        "RuntimeError: a node; all hosts start again in 2 s (3 of 10 failures)"
    )
    pauses.clear()
    status, said = run(Scripted(KILLED, *[nowhere] * 9), failures=9)
    assert status == 1 and pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_starts_that_end_at_once_are_waited_after_later_where_they_were_told_to(pauses: list[float]):
    run(Scripted(*[[(0, 1)]] * 6), failures=5)
    assert pauses == [0, 0, 0, 2, 4]
    pauses.clear()
    run(Scripted(*[SAVED] * 13), preemptions=12)
    assert pauses == [0] * 10 + [2, 4]


def test_when_one_is_told_to_stop_the_others_are_too():
    launcher = Scripted(SAVED, DONE)
    assert run(launcher)[0] == 0 and launcher.told == [signal.SIGTERM]


def test_one_that_was_lost_sight_of_is_preempted_where_another_saved_and_else_has_failed():
    launcher = Scripted([(1, 75, True), (0, 75)], DONE)
    assert run(launcher, failures=0)[0] == 0 and launcher.begun == 2 and launcher.told == []
    for others in ([(0, 1)], [(0, 75, True)], []):  # dead with its machine, all out of sight, one that still waits
        status, said = run(Scripted([(1, 75, True), *others], DONE), grace=0.2, preemptions=0)
        assert status == 0 and said[-1].endswith("host 1 was lost sight of; all hosts start again (1 of 10 failures)")


def test_told_to_stop_it_passes_it_on_and_starts_nothing_again():
    launcher = Scripted([TOLD])
    status, said = run(launcher, grace=0.2)
    assert status == 75 and launcher.begun == 1 and launcher.told == [signal.SIGTERM]
    assert len(said) == 1 and "host 0, 1 did not end in time" in said[0]


def test_what_nohup_has_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Told() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert noted.number is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("apart", "count"), [(1e9, 1), (-1.0, 2)], ids=["within a second", "apart"])
def test_two_presses_within_a_second_are_one_wish(apart: float, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(told, "ONE_PRESS", apart)
    with Told() as noted:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert noted.count == count

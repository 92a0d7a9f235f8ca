"""Which endings start a run again, how often, and what becomes of processes."""

import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.hardware import hosts, missed
from affinage.launch import Ending, Gang, LocalLauncher, Restarts, supervise, told
from affinage.launch.local import Watch
from affinage.launch.process import HostProcess, start_all
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
                    time.sleep(seconds)
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


def run(launcher: Scripted, grace: float = 60.0, **restarts: float) -> tuple[int, list[str]]:
    said: list[str] = []
    status = supervise(launcher, ["run", "x"], Restarts(**restarts), grace=grace, say=said.append)
    assert launcher.ended == launcher.begun and launcher.finished  # nothing is left
    return status, said


DONE = [(1, 0), (0, 0)]


def test_a_lost_host_starts_all_again_and_what_came_of_it_is_not_blamed():
    launcher = Scripted([(1, -signal.SIGKILL), (0, -signal.SIGABRT)], DONE)
    status, said = run(launcher)
    assert status == 0 and launcher.begun == 2
    assert said == ["launch: host 1 was killed by SIGKILL; all hosts start again (1 of 10 failures)"]


@pytest.mark.parametrize(
    ("endings", "told"),
    [
        ([Ending(0, 1, missed=gone(1)), (1, -signal.SIGKILL)], "host 1 was killed by SIGKILL"),
        ([Ending(0, 1, missed=gone(1)), (1, 3)], "host 1 failed with status 3"),
        ([Ending(0, 1, missed=gone(1)), (1, 75, True)], "host 1 was lost sight of"),
        ([(1, -signal.SIGABRT), (0, -signal.SIGKILL)], "host 0 was killed by SIGKILL"),  # JAX, without its coordinator
        ([(1, -signal.SIGABRT), Ending(0, 1, missed=gone(1))], "host 1 was killed by SIGABRT"),
        ([(0, -signal.SIGABRT), (1, 1)], "host 1 failed with status 1"),  # JAX, where another one fails
        ([(0, -signal.SIGABRT), (1, 1), (2, -signal.SIGKILL)], "host 2 was killed by SIGKILL"),
        ([(0, -signal.SIGABRT), Ending(1, 1, missed=gone(0))], "host 0 was killed by SIGABRT"),
        ([Ending(0, 1, missed=gone(1)), (2, 1)], "host 1 is gone, says host 0"),
        ([Ending(0, 1, "a", missed=gone(1))], "host 1 is gone, says host 0 (a)"),  # its machine: its end is never seen
        (
            [Ending(0, 1, missed=gone(1)), Ending(1, 1, missed=gone(0))],
            "host 1 is gone, says host 0",
        ),  # a cut between them
    ],
)
def test_who_died_is_told_of_and_not_who_left_for_it(endings: list, told: str):
    hosts = max(2, len(endings))
    launcher = Scripted(endings, [(host, 0) for host in range(hosts)])
    launcher.hosts = hosts
    status, said = run(launcher)
    assert status == 0 and said == [f"launch: {told}; all hosts start again (1 of 10 failures)"]


def test_whom_a_host_misses_is_told_of_in_its_words_and_not_who_left_for_it():
    left = Ending(0, 75, missed=missed.Missed(1, "does not answer"))
    status, said = run(Scripted([left, (1, -signal.SIGKILL)], DONE), failures=0)
    assert status == 0
    assert said == ["launch: host 1 does not answer, says host 0; all hosts start again (1 of 1000 preemptions)"]


def test_a_host_says_for_whom_it_leaves():
    for line, host in {
        "Stopped: host 1 is gone. Run the same command to go on.": 1,
        "Stopped: host 12 is gone: its machine has not answered for 5 s. Run the same command to go on.": 12,
        "Stopped: mine: pretrain: step 7 has not ended for 27 s: host 2 is behind, at step 6 (wait, x.py:3).": 2,
        "Stopped: mine: step 7 has not ended for 27 s, and host 1 shows no sign of life, last at step 6 (x.py:3).": 1,
        "Stopped: mine: step 7 has not ended for 27 s, and host 0 does not answer.": 0,
        "Stopped: mine: step 7 has not ended for 27 s: host 0 is at step 7 (x.py:3); host 1 is at step 7 (x).": None,
        "Stopped: mine: host 3 shows no sign of life, last at step 7: x; host 1 shows no sign of life.": 3,
        "Stopped: mine: nothing has moved for 30 s in clean: host 0 does not answer.": 0,
        "host 0 is gone": 0,
        "host 1 is not answering: the machine, or the network, may be dead.": None,
        "mine, host 1 shows no sign of life for 28 s: it is stopped, as by SIGSTOP": None,
        "Stopped: pretrain stopped by SIGTERM at step 3. Run the same command to go on.": None,
        "Stopped: host 0 has found a mistake, and tells of it.": None,
    }.items():
        found = missed.missed_by(line)
        assert (None if found is None else found.host) == host and (found is None or found.how in line), line


def test_what_hosts_say_of_one_that_is_missed_is_read_in_the_same_words():
    now = missed.at("the save", "write, store.py:3")
    for said, how in {
        missed.gone(1): "is gone",
        missed.gone(1, "its machine has not answered for 5 s"): "is gone",
        f"mine: the save has not ended for 540 s: {missed.mute(1)}": "does not answer",
        f"mine: the save has not ended for 540 s, and {missed.silent(1, now)}": "shows no sign of life",
        f"mine: {missed.silent(1, missed.at_nothing_yet())}": "shows no sign of life",
        f"mine: the save has not ended for 540 s: {missed.behind(1, now)}": "is behind",
        f"mine: the save has not ended for 540 s: {missed.waited_for(1, now)}": "is at the save",
        f"mine: nothing has moved: {missed.waited_for(1, missed.at_nothing_yet())}": "is before its first sign",
    }.items():
        assert missed.missed_by(f"{STOPPED}{said}. Run the same command to go on.") == missed.Missed(1, how), said


def test_whom_all_the_others_wait_for_at_a_save_is_told_of_by_launch():
    left = Ending(
        0, 75, missed=missed.missed_by("Stopped: mine: the save has not ended for 540 s: host 1 is at the save (x).")
    )
    status, said = run(Scripted([left, (1, 75)], DONE), failures=0)
    assert status == 0
    assert said == ["launch: host 1 is at the save, says host 0; all hosts start again (1 of 1000 preemptions)"]


def test_a_host_that_names_itself_says_it_of_itself():
    assert str(Ending(0, 75, missed=missed.Missed(0, "is at the save"))) == "host 0 is at the save"
    assert str(Ending(1, 75, "a", missed=missed.Missed(1, "is behind"))) == "host 1 (a) is behind"


def test_what_a_host_says_as_it_leaves_is_of_its_ending():
    said: list[str] = []
    process = HostProcess(["sh", "-c", "echo step 3; echo; echo Stopped: host 1 is gone.; echo more; exit 1"])
    watch, found = Watch([process], said.append, ["a"]), []
    while not found:
        found = watch.ended(1.0)
    process.end()
    assert found == [Ending(0, 1, "a", missed=gone(1))] and said[0] == "0 | step 3"


def test_budgets_of_preemptions_and_failures_are_apart():
    told, failed = [(0, 75), (1, 75)], [(0, 1)]
    status, said = run(Scripted(told, failed, told, failed), preemptions=2, failures=1)
    assert status == 1 and said[-1] == "launch: host 0 failed with status 1; given up after 1 failures"
    assert run(Scripted(told, told), preemptions=1, failures=0)[0] == 75


class Growing(Scripted):
    """Has room for more hosts when the first start is looked at for the second time, but not for the third."""

    looks = 0

    def has_room(self) -> bool:
        self.looks += 1
        return self.begun == 1 and self.looks in (2, 4, 5)


def test_hosts_give_way_to_more_of_them_and_that_is_no_preemption(monkeypatch):
    monkeypatch.setattr(sys.modules["affinage.launch.supervise"], "_ROOM_EVERY", 0.0)
    monkeypatch.setattr(sys.modules["affinage.launch.supervise"], "_LOOK_EVERY", 0.01)
    launcher = Growing([SAVES, (1, 75), (0, 75)], DONE)
    status, said = run(launcher, preemptions=0, failures=0)
    assert status == 0 and launcher.begun == 2 and launcher.told == [signal.SIGINT]
    assert said == ["launch: there is room for more hosts; these are told to save, and all start again"]
    assert launcher.looks == 5
    launcher = Growing([SAVES, (1, 75), (0, 75)], RuntimeError("it is gone again"), DONE)
    status, said = run(launcher, preemptions=0, failures=1)
    assert status == 0 and "could not be started: RuntimeError: it is gone again" in said[1]
    status, said = run(Growing([SAVES, (1, 1), (0, 75)], DONE), preemptions=0, failures=0)  # one could not save
    assert status == 1 and said[-1] == "launch: host 1 failed with status 1; given up after 0 failures"
    assert run(Growing([SAVES, (1, 0), (0, 0)]), preemptions=0, failures=0)[0] == 0  # they were done anyway
    monkeypatch.setattr(sys.modules["affinage.launch.supervise"], "_TO_GROW", 0.1)
    status, said = run(Growing([SAVES], DONE), preemptions=0, failures=0)  # a save that does not end
    assert status == 0 and said[1:] == ["launch: host 0, 1 did not end in time, and is killed"]


def test_a_start_that_lasted_gives_the_restarts_back():
    killed, told = [(0, -signal.SIGKILL)], [(0, 75), (1, 75)]
    starts = killed, told, killed, told, DONE
    status, said = run(Scripted(*starts), preemptions=1, failures=1, lasting=0.0)
    assert status == 0 and [line.rpartition("(")[2] for line in said] == ["1 of 1 failures)", "1 of 1 preemptions)"] * 2
    assert run(Scripted(*starts), preemptions=1, failures=1, lasting=60.0)[0] == 1


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(Told, "wait", lambda self, seconds: waited.append(seconds))
    return waited


def test_a_start_that_fails_is_the_users_at_first_and_tried_again_later(pauses: list[float]):
    nowhere = UserError("no room", fix="Look.")
    with pytest.raises(UserError, match="no room"):
        run(Scripted(nowhere, DONE))
    killed = [(1, -signal.SIGKILL)]
    status, said = run(Scripted(killed, nowhere, RuntimeError("a node\nis lost"), killed, nowhere, DONE))
    assert status == 0 and pauses == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert said[1:3] == [
        "launch: the hosts could not be started: no room; all hosts start again in 1 s (2 of 10 failures)",
        "launch: the hosts could not be started: RuntimeError: a node; all hosts start again in 2 s (3 of 10 failures)",
    ]


def test_pauses_between_starts_that_fail_grow_up_to_a_minute_and_end_with_the_failures(pauses: list[float]):
    status, said = run(Scripted([(1, -signal.SIGKILL)], *[UserError("no room")] * 9), failures=9)
    assert status == 1 and pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert said[-1] == "launch: the hosts could not be started: no room; given up after 9 failures"


def test_starts_that_end_at_once_are_waited_after_later_where_they_were_told_to(pauses: list[float]):
    run(Scripted(*[[(0, 1)]] * 6), failures=5)
    assert pauses == [0, 0, 0, 2, 4]
    pauses.clear()
    run(Scripted(*[[(0, 75), (1, 75)]] * 13), preemptions=12)
    assert pauses == [0] * 10 + [2, 4]


def test_none_is_left_where_not_all_can_be_started(tmp_path: Path):
    file = tmp_path / "process"
    first = ["sh", "-c", f"echo $$ > {file}.part; mv {file}.part {file}; sleep 60"]

    def begun() -> Iterator[HostProcess]:
        yield HostProcess(first)
        while not file.exists():
            time.sleep(0.01)
        yield HostProcess([str(tmp_path / "nothing")])

    with pytest.raises(FileNotFoundError):
        start_all(begun())
    assert not _runs(int(file.read_text()))


def test_when_one_is_told_to_stop_the_others_are_too():
    launcher = Scripted([(0, 75), (1, 75)], DONE)
    assert run(launcher)[0] == 0 and launcher.told == [signal.SIGTERM]


def test_the_others_are_given_the_time_to_save_with_one_that_was_lost_sight_of():
    launcher = Scripted([(1, 75, True), (0, 75)], DONE)
    status, said = run(launcher, failures=0)
    assert status == 0 and launcher.begun == 2 and launcher.told == []
    assert said == ["launch: host 1 was lost sight of; all hosts start again (1 of 1000 preemptions)"]


def test_one_that_was_lost_sight_of_and_nobody_saved_with_is_a_failure():
    for others in ([(0, 1)], [(0, 75, True)], []):  # dead with its machine, all out of sight, one that still waits
        status, said = run(Scripted([(1, 75, True), *others], DONE), grace=0.2, preemptions=0)
        assert status == 0
        assert said[-1] == "launch: host 1 was lost sight of; all hosts start again (1 of 10 failures)"


def test_a_mistake_of_the_user_is_not_tried_again():
    launcher = Scripted([(1, 0), (0, 2)])
    assert run(launcher)[0] == 2 and launcher.begun == 1


def test_told_to_stop_it_passes_it_on_and_starts_nothing_again():
    launcher = Scripted([TOLD])
    status, said = run(launcher, grace=0.2)
    assert status == 75 and launcher.begun == 1 and launcher.told == [signal.SIGTERM]
    assert said == ["launch: host 0, 1 did not end in time, and is killed"]


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_lines_of_local_hosts_are_marked(system: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("affinage.launch.process._LAST_WORDS", 60.0)  # whoever reads them may be late
    said: list[str] = []
    monkeypatch.setattr(platform, "system", lambda: system)
    assert supervise(LocalLauncher(2, say=said.append), ["--version"], Restarts(failures=0), say=said.append) == 0
    assert sorted(line.partition(" | ")[0] for line in said) == ["0", "1"] and all("affinage" in line for line in said)


def test_local_hosts_die_with_the_launcher(tmp_path: Path):
    code = (
        "import time\nfrom affinage.launch import LocalLauncher\n"
        f"gang = LocalLauncher(2).start(['world', {str(tmp_path / 'world')!r}, '--megabytes', '5000'])\n"
        "print(*(process.pid for process in gang._processes), flush=True)\ntime.sleep(3600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert len(pids) == 2
    launcher.kill()
    launcher.wait()
    while any(_runs(pid) for pid in pids):
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (hosts.COORDINATOR, hosts.HOSTS, hosts.HOST):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_host_knows_its_place(environment: pytest.MonkeyPatch):
    assert hosts.place() is None
    environment.setenv(hosts.COORDINATOR, "10.0.0.1:4321")
    environment.setenv(hosts.HOSTS, "4")
    with pytest.raises(UserError, match="which of how many hosts"):
        hosts.place()
    environment.setenv(hosts.HOST, "3")
    assert hosts.place() == hosts.Place("10.0.0.1:4321", 4, 3)
    environment.setenv(hosts.HOST, "4")
    with pytest.raises(UserError, match="AFFINAGE_HOST=4"):
        hosts.place()


def test_slurm_says_the_place(environment: pytest.MonkeyPatch):
    environment.setenv(hosts.COORDINATOR, "auto")
    job = {"JOB_ID": "4097", "STEP_NODELIST": "node[007-010]", "NTASKS": "32", "PROCID": "9", "LOCALID": "1"}
    for name, value in job.items():
        environment.setenv(f"SLURM_{name}", value)
    assert hosts.place() == hosts.Place("node007:61441", 32, 9, detected=True)


def test_what_nohup_has_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Told() as told:
            signal.raise_signal(signal.SIGHUP)
            assert told.number is None
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("apart", "count"), [(1e9, 1), (-1.0, 2)], ids=["within a second", "apart"])
def test_two_presses_within_a_second_are_one_wish(apart: float, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(told, "ONE_PRESS", apart)
    with Told() as noted:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert noted.count == count

"""How processes find each other, which exits start a run again, and what is left of those that were started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
import pytest

from affinage.cluster import launch, processes
from affinage.cluster.launch import WorkerExit, WorkerGroup, reserved_port, start_local, start_processes, supervise
from affinage.cluster.ray_launch import RayLauncher
from affinage.errors import Preempted, UserError
from run_affinage import refused
from waiting import until

TINY = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
SIGNAL = (-1, 0)
DONE = [(1, 0), (0, 0)]
KILLED, SAVED = [(1, -signal.SIGKILL)], [(0, 75), (1, 75)]


class Scripted:
    """A launcher, and its workers, which end as is written: for every start, (worker, status) in order.

    At `SIGNAL` the process that supervises them gets SIGTERM. A start that is an exception is one that fails with it;
    one that is `SIGNAL` waits until that comes.
    """

    workers = 2

    def __init__(self, *starts: Sequence[tuple[int, int]] | Exception) -> None:
        self.starts, self.script, self.begun, self.sent, self.killed = list(starts), [], 0, [], 0

    def start(self, command: Sequence[str]) -> WorkerGroup:
        start = self.starts.pop(0)
        if isinstance(start, Exception):
            raise start
        if start == SIGNAL:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("it went on waiting")
        self.script, self.begun, self.ended = list(start), self.begun + 1, set()
        return self

    def exits(self, seconds: float) -> list[WorkerExit]:
        if not self.script:
            time.sleep(min(seconds, 0.01))
            return []
        if self.script[0] != SIGNAL:
            self.ended.add(self.script[0][0])
            return [WorkerExit(*self.script.pop(0))]
        self.script.pop(0)
        signal.raise_signal(signal.SIGTERM)
        return []

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def kill(self) -> list[int]:
        self.killed += 1
        return [worker for worker in range(self.workers) if worker not in self.ended]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_QUICK", 0.0)
    monkeypatch.setattr(launch, "_AFTER", {})
    monkeypatch.setattr(launch, "_AFTER_DEATH", 0.2)


def run(launcher: Scripted, **limits: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    status = supervise(launcher.start, ["run", "x"], **limits, grace=0.2, say=said.append)
    assert launcher.killed == launcher.begun  # nothing is left
    return status, said


@pytest.mark.parametrize(("exits", "named"), [
    ([(1, -signal.SIGKILL), (0, -signal.SIGABRT)], "worker 1 was killed by SIGKILL"),
    ([(0, -signal.SIGABRT), (1, -signal.SIGKILL)], "worker 1 was killed by SIGKILL"),  # JAX was faster
    ([(0, -signal.SIGABRT), (1, 1)], "worker 1 ended with status 1"),
    ([(0, -signal.SIGABRT)], "worker 1 did not answer (worker 0 was killed by SIGABRT)"),  # it was stopped
    ([(1, 0)], "worker 0 did not answer (worker 1 ended with status 0)"),
])  # fmt: skip
def test_after_a_failure_all_start_again_and_who_died_is_named(exits: list, named: str):
    status, said = run(Scripted(exits, DONE))
    assert status == 0 and said == [f"launch: {named}; all start again (1 of 10 failures)"]


@pytest.mark.parametrize(
    ("starts", "limits", "status", "begun"),
    [
        ([SAVED, [(0, 1)], SAVED, [(0, 1)]], {"max_failures": 1}, 1, 4),
        ([KILLED, KILLED, DONE], {"max_failures": 1, "reset_after": 0.0}, 0, 3),
        ([[(1, 0), (0, 2)]], {}, 2, 1),
    ],
    ids=["preemptions are no failures", "a start that lasted gives them back", "a user's mistake"],
)
def test_a_run_starts_again_as_often_as_its_budget_allows(starts: list, limits: dict, status: int, begun: int):
    launcher = Scripted(*starts)
    assert run(launcher, **limits)[0] == status and launcher.begun == begun


@pytest.mark.parametrize(("within", "status", "begun"), [(600.0, 75, 11), (0.0, 0, 15)])
def test_a_run_that_is_preempted_at_once_again_and_again_is_given_up(monkeypatch, within: float, status: int, begun):
    monkeypatch.setattr(launch, "_HANGS_WITHIN", within)
    launcher = Scripted(*[SAVED] * 14, DONE)
    assert run(launcher, max_failures=0)[0] == status and launcher.begun == begun


def test_a_first_start_that_fails_is_an_error_and_a_later_one_a_failure():
    nowhere = UserError("no room", fix="Look.")
    refused(lambda: run(Scripted(nowhere, DONE)))
    status, said = run(Scripted(KILLED, nowhere, RuntimeError("a node\nis lost"), DONE))
    assert status == 0 and "no room" in said[1] and "RuntimeError: a node; all start again" in said[2]


def test_a_signal_is_passed_on_and_nothing_starts_again():
    launcher = Scripted([SIGNAL])
    status, said = run(launcher)
    assert status == 75 and launcher.begun == 1 and launcher.sent == [signal.SIGTERM] and not said
    with pytest.raises(Preempted):  # while machines are waited for
        run(Scripted(SIGNAL))
    assert run(Scripted(KILLED, SIGNAL))[0] == 75


def test_a_mistake_that_the_processes_of_a_launch_find_ends_it_with_one_message_and_status_2(own_runs: Path):
    said: list[str] = []
    command = ["run", str(TINY), "--until", "pretrain", "--runs", str(own_runs), "--set", "mesh={data: 3}"]
    start = partial(start_local, workers=2, devices=1, say=said.append)
    assert supervise(start, [*command, "--set", "pretrain.steps=3"], say=said.append) == 2, said
    mistake = next(line for line in said if "Error: " in line)
    assert mistake.startswith("0 | ") and "the mesh data 3 does not fit 2 devices" in mistake
    assert not any("Traceback" in line for line in said), said


def exits_of(group: WorkerGroup, count: int) -> list[WorkerExit]:
    found: list[WorkerExit] = []
    until(lambda: found.extend(group.exits(1.0)) or len(found) == count)
    return found


def test_lines_and_statuses_come_back_and_what_a_worker_has_started_is_killed_with_it(tmp_path: Path):
    said: list[str] = []
    script = f"echo in $AFFINAGE_PROCESS_ID of $AFFINAGE_NUM_PROCESSES; sleep 600 & echo $! > {tmp_path}/child; exit 3"
    group = start_processes(["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, 2, said.append)
    assert {(each.worker, each.status) for each in exits_of(group, 2)} == {(0, 3), (1, 3)}
    assert set(said) == {"0 | in 0 of 2", "1 | in 1 of 2"}
    group.kill()
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(FileNotFoundError):
        start_processes([str(tmp_path / "nothing")], {}, 2, said.append)


PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]


def test_workers_run_on_rays_machines_save_when_they_get_a_signal_and_start_again(tmp_path: Path):
    said, recipe = list[str](), tmp_path / f"{os.getpid()}.yaml"
    recipe.write_text("name: one")

    def running() -> WorkerGroup:
        for file in (*tmp_path.glob("process-*"), *tmp_path.glob("saved-*")):
            file.unlink()
        group = launcher.start(["wait", str(tmp_path), str(recipe)])
        until(lambda: all((tmp_path / f"process-{worker}").exists() for worker in range(2)))
        return group

    launcher = RayLauncher(2, devices=1, files={str(recipe): b"name: other"}, say=said.append, program=PROGRAM)
    try:
        group = running()
        group.send(signal.SIGTERM)
        assert [each.status for each in exits_of(group, 2)] == [75, 75]
        group.kill()
        assert not any(Path(gettempdir()).glob(f"affinage-*{recipe}")), "files are there no longer than a run"
        assert {(tmp_path / f"saved-{worker}").read_text() for worker in range(2)} == {"SIGTERM"}
        assert {"0 | name: other", "1 | name: other", "0 | worker 0 of 2", "1 | worker 1 of 2"} <= set(said)
        group = running()
        process, actor = map(int, (tmp_path / "process-1").read_text().split())
        os.kill(actor, signal.SIGKILL)  # the worker of Ray, and with it the process that it has started
        assert [(each.worker, each.status) for each in exits_of(group, 1)] == [(1, -signal.SIGKILL)]
        until(lambda: not Path(f"/proc/{process}").exists())
        group.kill()
        assert supervise(launcher.start, ["exit", "1"], max_failures=1, say=said.append) == 1
        assert sum("ended with status 1" in line for line in said) == 2
        group = RayLauncher(2, min_workers=1, devices=1, say=said.append, program=PROGRAM).start(["exit", "0"])
        group.kill()
        assert group.workers == 1  # there is one machine
    finally:
        launcher.close()


def test_a_mistake_is_printed_without_what_jax_prints_of_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "_AFTER", {2: 30.0})
    said: list[str] = []
    start = partial(start_processes, environment=os.environ, workers=2, say=said.append)
    assert supervise(lambda words: start([*PROGRAM, *words]), ["mistake", "2"], say=said.append) == 2
    assert "0 | worker 0 of 2" in said and not any("stack" in line for line in said)


# ---- how processes find each other

AGREE = """
from affinage.cluster.processes import ProcessLost, init_distributed
with init_distributed() as processes:
    print([processes.all_min("rows", value) for value in ([7, 2, 5], [5, 3, 5])[processes.index]],
          processes.broadcast("a word", ["of", processes.index]), flush=True)
    if processes.first:
        try:
            processes.barrier("the middle", seconds=0.5)
        except ProcessLost as error:
            print(error, flush=True)
    processes.barrier("the end")
"""
ALONE = """
import sys
from affinage.cli import main
from affinage.cluster import processes
processes.TO_START = 2.0
main(["run", sys.argv[1], "--runs", sys.argv[2]])
"""
# Of the second of two processes, as Open MPI gives it, which JAX detects.
OPEN_MPI = {
    processes.COORDINATOR: "auto",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def at(index: int, address: str) -> dict[str, str]:
    """The environment of a process."""
    place = {processes.COORDINATOR: address, processes.NUM_PROCESSES: "2", processes.PROCESS_ID: str(index)}
    return os.environ | place


def test_processes_agree_on_the_least_and_on_the_firsts_word_and_one_that_does_not_come_is_named():
    held, address = reserved_port()
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with held:
        both = [subprocess.Popen([sys.executable, "-c", AGREE], env=at(index, address), **pipe) for index in range(2)]
        said = [each.communicate(timeout=300)[0].splitlines() for each in both]
    assert [each.returncode for each in both] == [0, 0]
    first, second = ([line for line in lines if "Gloo" not in line] for lines in said)
    agreed = "[5, 2, 5] ['of', 0]"
    assert second == [agreed] and first[0] == agreed
    assert "`the middle`" in first[1] and "0.5 s" in first[1]


def test_a_process_whose_others_do_not_start_ends_so_that_it_is_started_again(tmp_path: Path):
    held, address = reserved_port()
    command = [sys.executable, "-c", ALONE, str(TINY), str(tmp_path)]
    places = {f"{address}: process 1 of 2": at(1, address), "auto: this process": os.environ | OPEN_MPI}
    with held:
        both = [subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True) for place in places.values()]
        for words, process in zip(places, both, strict=True):
            said = process.communicate(timeout=300)[1]
            assert process.returncode == 1 and f"{words} did not meet the others" in said, said
            assert "Traceback" not in said and "stack trace" not in said


def test_the_environment_gives_a_process_its_place(monkeypatch: pytest.MonkeyPatch):
    for name in (processes.COORDINATOR, processes.NUM_PROCESSES, processes.PROCESS_ID):
        monkeypatch.delenv(name, raising=False)
    assert processes.placement() is None
    monkeypatch.setenv(processes.COORDINATOR, "10.0.0.1:4321")
    monkeypatch.setenv(processes.NUM_PROCESSES, "4")
    mistake = refused(processes.placement)
    assert processes.NUM_PROCESSES in mistake.where and mistake.fix
    monkeypatch.setenv(processes.PROCESS_ID, "4")
    refused(processes.placement)
    monkeypatch.setenv(processes.PROCESS_ID, "3")
    assert processes.placement() == processes.Placement("10.0.0.1:4321", 4, 3)
    monkeypatch.setenv(processes.COORDINATOR, "auto")
    assert processes.placement() == processes.Placement("auto")

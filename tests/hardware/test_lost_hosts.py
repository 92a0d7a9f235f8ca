"""A host that dies, is silent or stands still is noticed and named by the others.

Hosts here are threads of one process, or connections that speak as hosts do.
"""

import json
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from affinage.config.load import load_recipe
from affinage.errors import EXIT_PREEMPTED, UserError
from affinage.hardware import links, silence
from affinage.hardware.beats import Beats, Doing
from affinage.hardware.links import Links
from affinage.hardware.movement import Movement, waits_for_others
from affinage.hardware.silence import Ear, Since
from hosts_in_memory import Coordinator, HostInMemory
from waiting import until

LOOPBACK = "127.0.0.1"
LIMIT = 120  # seconds until what does not come is a failure


class Group:
    """Links of the first hosts; the others are sockets here, which say what their hosts would."""

    def __init__(self, count: int, real: int, patience: float = 5.0) -> None:
        self.coordinator, self.lost, self.said = Coordinator(), [], queue.SimpleQueue()
        self.links = []
        for host in range(real):
            heard: queue.SimpleQueue = queue.SimpleQueue()
            self.lost.append(heard)
            of = HostInMemory(host, count, coordinator=self.coordinator)
            lost = lambda other, why, _, heard=heard: heard.put((other, why))  # noqa: E731
            self.links.append(Links(of, LOOPBACK, LOOPBACK, lost, patience, self.said.put))
        until(lambda: "affinage/links" in self.coordinator.words)
        self.sockets = {host: self.connect(host) for host in range(real, count)}
        until(lambda: all(each.complete for each in self.links))

    def connect(self, host: int, token: str = "") -> socket.socket:
        said = json.loads(self.coordinator.words["affinage/links"])
        link = socket.create_connection((LOOPBACK, said["port"]), LIMIT)
        link.sendall(f"{token or said['token']} {host}\n".encode())
        return link

    def leave(self, host: int, word: str) -> None:
        with self.sockets[host] as link:
            link.sendall(word.encode())

    def part(self) -> None:
        for each in self.links:
            each.say_goodbye()


def test_all_hear_of_who_died_or_has_found_a_mistake_and_nobody_of_who_said_goodbye_or_is_a_stranger():
    group = Group(5, real=2)
    with group.connect(3, token="0" * 32) as stranger:
        assert stranger.recv(1) == b""  # it is hung up on
    group.leave(2, "bye\n")
    group.leave(3, "3 mis")  # cut off
    assert [heard.get(timeout=LIMIT) for heard in group.lost] == [(3, "")] * 2
    group.leave(4, "4 mistake\n")
    assert [heard.get(timeout=LIMIT) for heard in group.lost] == [(4, "mistake")] * 2
    group.part()
    assert all(heard.empty() for heard in group.lost)


@pytest.mark.full
def test_a_machine_that_does_not_answer_is_named_and_lost_to_all(monkeypatch: pytest.MonkeyPatch):
    began, silent = time.monotonic(), []

    def since(link: socket.socket) -> Since:  # what a kernel would know
        ms = int(1000 * (time.monotonic() - began))
        return Since(ms + 10**7, ms + 10**7, ms if link.getpeername()[1] in silent else 0)

    monkeypatch.setattr(silence, "since", since)
    monkeypatch.setattr(links, "KNOWN", True)
    group = Group(3, real=2, patience=1.0)
    silent.append(group.sockets[2].getsockname()[1])
    assert [heard.get(timeout=LIMIT) for heard in group.lost] == [(2, "silent")] * 2
    assert "host 2 is" in group.said.get(timeout=LIMIT)
    group.part()
    group.sockets[2].close()


def looks(*answered: int, second: int | None = None) -> list[str]:
    """What is found at looks, each at so many ms since the last answer, of a machine that has answered before.

    `second`: how much longer ago the last answer by a second connection is.
    """
    ear, long_ago = Ear(answers=True, both=second is not None), 10**7
    other = [None if second is None else Since(long_ago, long_ago, ms + second) for ms in answered]
    return [ear.look(Since(long_ago, long_ago, ms), 5.0, also) for ms, also in zip(answered, other)]


@pytest.mark.parametrize(
    ("found", "news"),
    [
        (looks(*range(0, 8000, 250)), ["silent", "gone"]),
        (looks(*range(0, 7000, 100), second=500), ["silent", "gone"]),
        (looks(*range(0, 5900, 250), 10, 260, *range(500, 2500, 250)), ["silent", "back", "silent"]),
        (looks(*[20, 270, 520, 770, 1020] * 9), []),
        (looks(900, 1150, 1400, 30, 1300, 1550, 40), []),
        (looks(300, 3_600_000, 20, 300), []),
        (looks(*[*range(0, 1040, 100)] * 9, second=0), []),
    ],
    ids=["dead", "dead, two connections", "back", "answers", "lost questions", "slept", "not asked in turn"],
)
def test_a_machine_is_silent_after_questions_without_an_answer_and_then_gone(found: list[str], news: list[str]):
    assert list(dict.fromkeys(what for what in found if what != "nothing new")) == list(dict.fromkeys(news))
    assert found.count("silent") == news.count("silent")


def test_who_never_answered_a_question_is_not_judged():
    ear = Ear()
    assert {ear.look(Since(ms, ms + 5, ms), 5.0) for ms in range(0, 60_000, 250)} == {"nothing new"}
    assert not ear.answers


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a kernel has heard")
def test_the_kernel_of_a_peer_that_reads_nothing_answers():
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as link:
        peer, _ = server.accept()  # never read from
        with peer:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            silence.ask_often(link)
            link.sendall(b"a line\n")
            ear, heard = Ear(), set()
            until(lambda: heard.add(ear.look_at(link, 5.0)) or ear.answers)
            assert heard == {"nothing new"}


def test_a_host_cannot_be_silent_for_longer_than_jax_lets_it():
    with pytest.raises(UserError, match="heartbeat_timeout"):
        load_recipe("quickstart", ["runtime.heartbeat_timeout=50"])  # JAX ends all hosts before


@pytest.mark.full
def test_of_hosts_that_wait_for_each_other_the_one_that_is_behind_or_silent_or_mute_is_named():
    coordinator = Coordinator()
    doing = [Doing(5, "step 5", late=host == 1) for host in range(3)]
    beats = [
        Beats(HostInMemory(host, 3, coordinator=coordinator), lambda host=host: doing[host], every=0.05, patience=0.6)
        for host in range(3)
    ]
    try:
        until(lambda: all(f"host {host} is at step 5" in beats[1].blame() for host in range(3)))
        doing[0], doing[1] = Doing(6, "step 6", late=False), Doing(6, "step 6", late=True)
        until(lambda: (said := beats[1].blame()).startswith("host 2 is behind") and "host 0" not in said)
        doing[2] = Doing(6, "step 6", late=False)
        beats[2].close()
        until(lambda: (said := beats[1].blame()).startswith("host 2 shows no sign of life") and "host 0" not in said)
        coordinator.answers.clear()
        until(lambda: "host 0 does not answer" in beats[1].blame())
    finally:
        coordinator.answers.set()
        for each in beats:
            each.close()


ENDS = """
import os, signal, sys, threading
from pathlib import Path
from affinage.hardware import pulse, standstill
from affinage.config.runtime import RuntimeSettings
from affinage.stopping import OwnProcess

standstill.ELSEWHERE, pulse.SILENT_FOR_LONG = 2.0, 2.0
os.environ["AFFINAGE_PARENT"] = "1"  # somebody starts it again
settings = RuntimeSettings(hang_timeout=1.0, exit_on_hang=True)
with OwnProcess(), pulse.guarded("run", settings):
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    with standstill.Standstill("run", Path(sys.argv[1]), settings):
        threading.Event().wait()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [("waits", EXIT_PREEMPTED, "Stopped: run: nothing has moved"), ("stopped", -signal.SIGKILL, "no sign of life")],
)
def test_one_that_stands_still_is_ended_where_somebody_starts_it_again(
    warm_python: list[str], tmp_path: Path, how: str, status: int, said: str
):
    words = [*warm_python, "-c", ENDS, how]
    ended = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=LIMIT, cwd=tmp_path)
    assert ended.returncode == status and said in ended.stderr, ended.stderr


def test_what_computes_or_waits_for_others_moves():
    def still(work: Callable[[], object]) -> float:
        watched, late = Movement(), time.monotonic() + 2.2
        while time.monotonic() < late:
            work()
            found = watched.look()
        return found

    until(lambda: still(lambda: time.sleep(0.11)) > 0.9)
    until(lambda: still(lambda: sum(range(10_000))) < 0.9)
    with waits_for_others():
        until(lambda: still(lambda: time.sleep(0.11)) < 0.9)

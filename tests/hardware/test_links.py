"""A host that ends without a goodbye is noticed by all others. Hosts of one process, with a dictionary between them."""

import contextlib
import errno
import json
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from affinage.errors import Preempted, UserError
from affinage.hardware import joining
from affinage.hardware.hosts import Place
from affinage.hardware.links import Links, Why
from affinage.hardware.silence import KNOWN
from affinage.stopping import GivenUp, OwnProcess
from hosts_in_memory import Coordinator, HostInMemory

LOOPBACK = "127.0.0.1"


class Gang:
    def __init__(self, count: int) -> None:
        self.coordinator = Coordinator()
        self.lost: list[queue.SimpleQueue[tuple[int, str]]] = [queue.SimpleQueue() for _ in range(count)]
        self.links = [
            Links(HostInMemory(host, count, coordinator=self.coordinator), LOOPBACK, LOOPBACK, self._hear(host))
            for host in range(count)
        ]
        late = time.monotonic() + 120
        while len(self.links[0]._links) < count - 1 or not all(links._links for links in self.links):
            assert time.monotonic() < late
            time.sleep(0.01)

    def _hear(self, host: int):
        return lambda number, why, _: self.lost[host].put((number, why))

    def die(self, host: int) -> None:
        """What the kernel does with a killed process's connections."""
        self.links[host]._ended.set()  # it does nothing any more
        for link in self.links[host]._links.values():
            with contextlib.suppress(OSError):  # the other one has closed it
                link.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def gang() -> Iterator[Gang]:
    found = Gang(4)
    yield found
    for links in found.links:
        links.say_goodbye()


def test_all_hear_of_one_that_died(gang: Gang):
    gang.die(2)
    assert [gang.lost[host].get(timeout=60) for host in (0, 1, 3)] == [(2, "")] * 3


def test_all_hear_of_the_first_that_died(gang: Gang):
    gang.die(0)
    assert [gang.lost[host].get(timeout=60) for host in (1, 2, 3)] == [(0, "")] * 3


def test_whoever_says_goodbye_is_not_gone(gang: Gang):
    gang.links[1].say_goodbye()
    gang.die(1)
    gang.die(3)
    assert gang.lost[0].get(timeout=60) == gang.lost[2].get(timeout=60) == (3, "")
    gang.links[0].say_goodbye()
    gang.die(0)
    time.sleep(0.3)
    assert [found.qsize() for found in gang.lost] == [0, 0, 0, 0]


@pytest.mark.skipif(not KNOWN, reason="there is a second one where the kernel tells what it has heard")
def test_the_end_of_a_second_link_is_nobodys(gang: Gang):
    while len(gang.links[0]._second) < 3 or 0 not in gang.links[2]._second:
        time.sleep(0.01)
    gang.links[2]._second[0].shutdown(socket.SHUT_RDWR)
    while 2 in gang.links[0]._second:
        time.sleep(0.01)
    gang.die(3)
    assert gang.lost[0].get(timeout=60) == gang.lost[2].get(timeout=60) == (3, "")
    assert gang.lost[0].empty()


def test_a_mistake_that_only_one_has_found_is_told(gang: Gang):
    gang.links[2].say_goodbye("mistake")
    gang.die(2)
    assert [gang.lost[host].get(timeout=60) for host in (0, 1, 3)] == [(2, "mistake")] * 3


def test_a_stranger_is_not_heard(gang: Gang):
    port = json.loads(gang.coordinator.words["affinage/links"])["port"]
    for said in (b"", b"no token 2\n", b"0" * 32 + b" 2\n", b"\xff" * 10_000, b"bye\n"):
        with socket.create_connection((LOOPBACK, port)) as stranger:
            stranger.sendall(said)
            if said:
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""  # it is hung up on
    gang.die(3)
    assert [gang.lost[host].get(timeout=60) for host in (0, 1, 2)] == [(3, "")] * 3
    time.sleep(0.1)
    assert [found.qsize() for found in gang.lost] == [0, 0, 0, 0]


class Met(Links):
    """Counts the links that have been made, and on which a goodbye was sent if there was one to send."""

    met = 0

    def _meet(self, host: int, link: socket.socket) -> None:
        super()._meet(host, link)
        self.met += 1


@contextlib.contextmanager
def late(count: int, *, said_before: bool, host: int, mistake: bool = False) -> Iterator[list]:
    """What all hear where `host` says goodbye before there are links (itself not yet connected, or the first one)."""
    coordinator, lost = Coordinator(), [queue.SimpleQueue() for _ in range(count)]

    def begin(number: int) -> Met:
        hosts = HostInMemory(number, count, coordinator=coordinator)
        return Met(hosts, LOOPBACK, LOOPBACK, lambda other, why, _: lost[number].put((other, why)))

    begun = {host: begin(host)}
    if said_before:
        begun[host].say_goodbye("mistake" if mistake else "")
    for number in range(count):
        if number not in begun:
            begun[number] = begin(number)
    until = time.monotonic() + 120
    while begun[0].met < count - 1 or not all(links.met for links in begun.values()):
        assert time.monotonic() < until
        time.sleep(0.01)
    for link in begun[host]._links.values():
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)  # what was sent before is heard, as where a process ends
    yield lost
    for links in begun.values():
        links.say_goodbye()


@pytest.mark.parametrize("host", [0, 1])
def test_a_goodbye_before_there_was_a_link_is_heard(host: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("affinage.hardware.links._LATE", 120.0)  # the others may be late on a busy machine
    with late(3, said_before=True, host=host) as lost:
        time.sleep(0.3)
        assert [found.qsize() for found in lost] == [0, 0, 0]
    with late(3, said_before=False, host=host) as lost:
        assert all(found.get(timeout=60) == (host, "") for number, found in enumerate(lost) if number != host)


@pytest.mark.parametrize("host", [0, 1])
def test_a_mistake_before_there_was_a_link_is_told(host: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("affinage.hardware.links._LATE", 120.0)
    with late(3, said_before=True, host=host, mistake=True) as lost:
        assert all(found.get(timeout=60) == (host, "mistake") for number, found in enumerate(lost) if number != host)


def test_what_comes_in_one_piece_or_in_many_is_heard():
    coordinator = Coordinator()
    hear: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    first = HostInMemory(0, 3, coordinator=coordinator)
    links = Links(first, LOOPBACK, LOOPBACK, lambda host, why, _: hear.put((host, why)))
    said = json.loads(HostInMemory(1, 3, coordinator=coordinator).hear("affinage/links", 30, said=""))
    with socket.create_connection((LOOPBACK, said["port"])) as one:
        one.sendall(f"{said['token']} 1\n1 mistake\n".encode())
        assert hear.get(timeout=60) == (1, "mistake")
    with socket.create_connection((LOOPBACK, said["port"])) as other:
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for letter in f"{said['token']} 2\n2 mistake\n":
            other.sendall(letter.encode())
            time.sleep(0.001)
        assert hear.get(timeout=60) == (2, "mistake")
    links.say_goodbye()


def has_ipv6() -> bool:
    """Whether one socket hears both kinds, and the loopback has an address of the newer one."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return socket.has_dualstack_ipv6()
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_who_listens_on_all_addresses_is_reached_by_both_kinds():
    coordinator = Coordinator()
    first = Links(HostInMemory(0, 3, coordinator=coordinator), "", "::", lambda *_: None)
    others = [
        Links(HostInMemory(host, 3, coordinator=coordinator), address, "", lambda *_: None)
        for host, address in ((1, LOOPBACK), (2, "::1"))
    ]
    while len(first._links) < 2:
        time.sleep(0.01)
    for links in (first, *others):
        links.say_goodbye()


def test_one_connection_that_fails_at_once_does_not_end_the_others(gang: Gang, monkeypatch: pytest.MonkeyPatch):
    def failing(link: socket.socket) -> None:
        raise OSError(22, "it has hung up")  # as some kernels say

    port = json.loads(gang.coordinator.words["affinage/links"])["port"]
    with monkeypatch.context() as patch:
        patch.setattr("affinage.hardware.links._keep_alive", failing)
        with socket.create_connection((LOOPBACK, port), 30) as stranger:
            assert stranger.recv(1) == b""
    gang.die(3)
    assert gang.lost[0].get(timeout=60) == (3, "")


def test_the_first_host_is_named_before_anything_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """JAX may abort this process within half a second of the first host's death."""
    done: list[str] = []

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            done.append("waits")
            return False

    monkeypatch.setattr(joining, "say", done.append)
    monkeypatch.setattr(joining, "leave", lambda why, status: done.append(f"leaves with {status}: {why}"))
    joining._leave_without(0, "", Waited())
    assert done == ["host 0 is gone", "waits", "leaves with 1: host 0 is gone"]


def test_a_host_that_leaves_by_itself_is_not_left_for_the_mistake_of_another():
    leaving = threading.Event()
    leaving.set()
    joining._leave_without(1, "mistake", leaving)  # it returns


def test_a_host_that_has_something_to_save_is_told_to_stop_as_the_one_was_that_has_left():
    heard: queue.SimpleQueue = queue.SimpleQueue()
    with OwnProcess() as own, own.listen(heard.put):
        joining._leave_without(1, "stopped", threading.Event())
        assert heard.get(timeout=60) == signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("wrong"), ["mistake"]),
        (OSError(errno.ENOSPC, "no room"), ["mistake"]),
        (OSError(errno.EPIPE, "broken"), []),
        (Preempted("told"), [""]),
        (GivenUp("told"), ["stopped"]),
    ],
)
def test_what_the_program_calls_a_mistake_is_one_for_all(error: Exception, told: list, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []

    class Recorded(Links):
        def say_goodbye(self, why: Why = "") -> None:
            said.append(why)

    alone = Place("127.0.0.1:1", 1, 0)  # no others, so nothing is connected
    monkeypatch.setattr(joining, "place", lambda: alone)
    monkeypatch.setattr(joining, "_connect", lambda found: None)
    monkeypatch.setattr(joining, "Links", Recorded)
    with pytest.raises(type(error)), joining.joined():
        raise error
    assert said == told

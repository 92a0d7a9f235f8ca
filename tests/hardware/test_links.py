"""A host that ends without a goodbye is noticed by all others. Hosts of one process, with a dictionary between them."""

import contextlib
import json
import queue
import socket
import time
from collections.abc import Iterator

import pytest

from affinage.hardware.links import Links
from hosts_in_memory import Coordinator, HostInMemory

LOOPBACK = "127.0.0.1"


class Gang:
    def __init__(self, count: int) -> None:
        self.coordinator = Coordinator()
        self.lost: list[queue.SimpleQueue[tuple[int, bool]]] = [queue.SimpleQueue() for _ in range(count)]
        self.links = [
            Links(HostInMemory(host, count, coordinator=self.coordinator), LOOPBACK, LOOPBACK, self._hear(host))
            for host in range(count)
        ]
        late = time.monotonic() + 120
        while len(self.links[0]._links) < count - 1:
            assert time.monotonic() < late
            time.sleep(0.01)

    def _hear(self, host: int):
        return lambda number, mistake: self.lost[host].put((number, mistake))

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
    assert [gang.lost[host].get(timeout=30) for host in (0, 1, 3)] == [(2, False)] * 3


def test_all_hear_of_the_first_that_died(gang: Gang):
    gang.die(0)
    assert [gang.lost[host].get(timeout=30) for host in (1, 2, 3)] == [(0, False)] * 3


def test_whoever_says_goodbye_is_not_gone(gang: Gang):
    gang.links[1].say_goodbye()
    gang.die(1)
    gang.die(3)
    assert gang.lost[0].get(timeout=30) == gang.lost[2].get(timeout=30) == (3, False)
    gang.links[0].say_goodbye()
    gang.die(0)
    time.sleep(0.3)
    assert [found.qsize() for found in gang.lost] == [0, 0, 0, 0]


def test_a_mistake_that_only_one_has_found_is_told(gang: Gang):
    gang.links[2].say_goodbye(mistake=True)
    gang.die(2)
    assert [gang.lost[host].get(timeout=30) for host in (0, 1, 3)] == [(2, True)] * 3


def test_a_stranger_is_not_heard(gang: Gang):
    port = json.loads(gang.coordinator.words["affinage/links"])["port"]
    for said in (b"", b"no token 2\n", b"0" * 32 + b" 2\n", b"\xff" * 10_000, b"bye\n"):
        with socket.create_connection((LOOPBACK, port)) as stranger:
            stranger.sendall(said)
            if said:
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""  # it is hung up on
    gang.die(3)
    assert gang.lost[0].get(timeout=30) == (3, False)
    time.sleep(0.1)
    assert [found.qsize() for found in gang.lost] == [0, 1, 1, 0]

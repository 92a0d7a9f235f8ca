"""When a machine is taken for silent, and for gone: by what a kernel would tell of a connection, look by look."""

import queue
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from affinage.errors import UserError
from affinage.hardware import links, silence
from affinage.hardware.links import Links
from affinage.hardware.silence import Ear, Since
from affinage.recipe.load import load_recipe
from hosts_in_memory import Coordinator, HostInMemory

LONG_AGO = 10**7  # ms
PATIENCE = 5.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a kernel has heard")


def looks(*answered: int) -> list[str]:
    """What is found at looks, each at so many ms since the last answer, of a machine that has answered before."""
    ear = Ear(answers=True)
    return [ear.look(Since(LONG_AGO, LONG_AGO, ms), PATIENCE) for ms in answered]


def test_a_dead_machine_is_named_once_and_gone_after_the_patience():
    found = looks(*range(0, 8000, 250))
    at = {what: found.index(what) * 0.25 for what in ("silent", "gone")}
    assert 1 < at["silent"] <= 2 and at["gone"] == 1 + PATIENCE  # from the first question on
    assert found.count("silent") == 1 and "back" not in found
    assert set(found[found.index("gone") :]) == {"gone"}
    assert set(found[: found.index("silent")]) == {"nothing new"}


def test_a_machine_that_is_back_in_time_is_told_and_can_be_silent_again():
    found = looks(*range(0, 5900, 250), 10, 260, *range(500, 2500, 250))
    assert [what for what in found if what != "nothing new"] == ["silent", "back", "silent"]


def test_answers_that_come_once_a_second_or_late_are_none_of_a_dead_machine():
    assert set(looks(*([20, 270, 520, 770, 1020] * 9))) == {"nothing new"}
    assert set(looks(900, 1150, 1400, 30, 1300, 1550, 40)) == {"nothing new"}  # a question or two were lost


def test_bytes_that_come_are_a_sign_of_life():
    ear = Ear(answers=True)
    assert {ear.look(Since(10, 100, ms), PATIENCE) for ms in range(0, 60_000, 250)} == {"nothing new"}


def test_time_that_went_by_all_at_once_is_no_silence():
    assert set(looks(300, 3_600_000, 20, 300)) == {"nothing new"}  # this machine slept for an hour
    found = looks(300, *range(3_600_000, 3_602_000, 250))
    assert found.index("silent") == 3 and found.index("gone") == 8


def looks_at_two(*answered: tuple[int, int]) -> list[str]:
    """The same of two connections that are asked in turn."""
    ear = Ear(answers=True, both=True)
    ages = ((Since(LONG_AGO, LONG_AGO, ms) for ms in both) for both in answered)
    return [ear.look(one, PATIENCE, other) for one, other in ages]


@pytest.mark.parametrize("since_the_other", [400, 500, 600])
def test_a_dead_machine_is_named_within_a_second_where_two_connections_are_asked_in_turn(since_the_other: int):
    found = looks_at_two(*((ms, ms + since_the_other) for ms in range(0, 7000, 100)))
    assert found.index("silent") < 10 and found.index("gone") == 10 * (0.6 + PATIENCE)


def test_a_lost_question_of_two_connections_makes_nobody_silent():
    lost = [(ms, ms + 500) for ms in range(0, 800, 100)]  # asked at 500, and again
    assert set(looks_at_two(*lost, (0, 800), (100, 900), (200, 1000), (300, 30))) == {"nothing new"}


def test_who_was_asked_on_neither_connection_is_not_judged():
    """They are not asked in turn any more: both are asked after a second."""
    assert set(looks_at_two(*([(ms, ms) for ms in range(0, 1040, 100)] * 9))) == {"nothing new"}


def test_who_never_answers_a_question_is_not_judged():
    """A firewall may let none through; then all would seem dead."""
    ear = Ear()
    for ms in range(0, 60_000, 250):  # the only answer was one to bytes
        assert ear.look(Since(ms, ms + 5, ms), PATIENCE) == "nothing new"
    assert not ear.answers
    ear.look(Since(1100, 1105, 90), PATIENCE)
    assert ear.answers


@linux
def test_the_kernel_of_a_peer_that_reads_nothing_answers():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        peer, _ = server.accept()  # never read from
        with peer:
            links._keep_alive(link)
            link.sendall(b"a line\n")
            ear, until = Ear(), time.monotonic() + 60
            while not ear.answers:
                assert time.monotonic() < until and ear.look_at(link, PATIENCE) == "nothing new"
                time.sleep(0.05)
            assert silence.since(link).heard > 500  # it is not bytes that were heard


@linux
def test_kernels_come_to_ask_on_two_connections_in_turn():
    with socket.create_server(("127.0.0.1", 0)) as server:
        pair = [socket.create_connection(server.getsockname()) for _ in range(2)]
        peers = [server.accept()[0] for _ in pair]
        for link in pair:
            links._keep_alive(link)
        ear, until, apart = Ear(), time.monotonic() + 60, 0.0
        while not 0.2 < apart < 0.8:
            assert time.monotonic() < until and ear.look_at(pair[0], PATIENCE, pair[1]) == "nothing new"
            time.sleep(0.05)
            if ear.turned:
                apart = abs(silence.since(pair[0]).age - silence.since(pair[1]).age)
        peers[1].close()  # then the first one alone is judged by
        for _ in range(40):
            assert ear.look_at(pair[0], PATIENCE, pair[1]) == "nothing new"
            time.sleep(0.05)
        for each in (*pair, peers[0]):
            each.close()


@linux
def test_who_has_never_answered_is_asked_no_more_before_the_kernel_hangs_up(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        links._keep_alive(link)
        for ms, asked in ((20_000, 1), (40_000, 0)):
            monkeypatch.setattr(silence, "since", lambda _, ms=ms: Since(ms, ms, ms))
            assert Ear().look_at(link, PATIENCE) == "nothing new"
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == asked


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[set]:
    """The connections whose other ends are silent."""
    found: set = set()
    began = time.monotonic()

    def since(link: socket.socket) -> Since:
        ms = int(1000 * (time.monotonic() - began))
        return Since(ms + LONG_AGO, ms + LONG_AGO, ms if link in found else 0)

    monkeypatch.setattr(silence, "since", since)
    monkeypatch.setattr(links, "KNOWN", True)
    yield found


def test_all_hear_of_a_machine_that_is_silent_and_one_line_names_it(silent: set):
    coordinator, count = Coordinator(), 4
    lost: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(count)]
    said: queue.SimpleQueue = queue.SimpleQueue()

    def begin(host: int) -> Links:
        hosts, place = HostInMemory(host, count, coordinator=coordinator), ("127.0.0.1", "127.0.0.1")
        return Links(hosts, *place, lambda other, why, _: lost[host].put((other, why)), 2.0, said.put)

    begun = [begin(host) for host in range(count)]
    until = time.monotonic() + 120
    while min(map(len, (begun[0]._links, begun[0]._second))) < count - 1 or not all(each._links for each in begun):
        assert time.monotonic() < until
        time.sleep(0.01)
    begun[3].say_goodbye()
    while 3 not in begun[0]._left:
        time.sleep(0.01)
    # The latter has left in good order.
    silent |= {links[host] for links in (begun[0]._links, begun[0]._second) for host in (2, 3)}
    assert [lost[host].get(timeout=60) for host in (0, 1)] == [(2, "silent")] * 2
    assert "host 2 is not answering" in said.get(timeout=60)
    for each in begun:
        each.say_goodbye()
    assert said.empty() and all(found.empty() for found in lost)


def test_the_most_patient_training_of_a_recipe_decides():
    asked = {"pretrain": 6, "sft": 20, "dpo": 3}
    overrides = [f"{name}.survival.silence_seconds={seconds}" for name, seconds in asked.items()]
    assert load_recipe("quickstart", overrides).recipe.survival.silence_seconds == 20
    with pytest.raises(UserError, match="silence_seconds"):
        load_recipe("quickstart", ["sft.survival.silence_seconds=50"])  # JAX would end all hosts before

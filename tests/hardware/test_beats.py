"""Who is named when hosts wait for each other."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from affinage.hardware import beats, stacks
from affinage.hardware.beats import Beats, Doing
from hosts_in_memory import Coordinator, HostInMemory

LIMIT = 120  # seconds until what does not come is a failure


class Mortal(HostInMemory):
    """A host that says nothing more once it is dead, also of what it was about to say."""

    def __init__(self, index: int, coordinator: Coordinator) -> None:
        super().__init__(index, 3, coordinator=coordinator)
        self._lives, self._dead = threading.Lock(), False

    def tell(self, key: str, value: str, *, anew: bool = False) -> None:
        with self._lives:
            if not self._dead:
                super().tell(key, value, anew=anew)

    def die(self) -> None:
        with self._lives:
            self._dead = True


class Three:
    """Three hosts at step 5, of which the second looks at the others."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.doing = [Doing(5, "step 5", late=host == 1) for host in range(3)]
        self.hosts = [Mortal(host, self.coordinator) for host in range(3)]
        self.beats = [Beats(self.hosts[host], self._of(host)) for host in range(3)]

    def _of(self, host: int):
        return lambda: self.doing[host]

    def until(self, said: str) -> str:
        """What the second host says as soon as `said` is in it."""
        return wait_until(lambda blamed: said in blamed, self.beats[1].blame)

    def names_alone(self, host: int, what: str) -> None:
        """The second host comes to say this of one, and nothing of others: on a busy machine they may be late, too."""
        wait_until(lambda said: said.startswith(f"host {host} {what}") and alone(said), self.beats[1].blame)


def alone(said: str) -> bool:
    return "; host " not in said


def wait_until(true: Callable[[str], bool], say: Callable[[], str]) -> str:
    late = time.monotonic() + LIMIT
    while not true(said := say()):
        assert time.monotonic() < late, said
        time.sleep(0.05)
    return said


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    monkeypatch.setattr(beats, "_EVERY", 0.05)
    monkeypatch.setattr(beats, "_SILENT", 0.6)
    found = Three()
    yield found
    found.coordinator.answers.set()
    for one in found.beats:
        one.close()


def test_where_all_are_at_the_same_all_are_named(three: Three):
    blamed = three.until("host 0 is at step 5")
    assert "host 1 is at step 5" in blamed and "host 2 is at step 5" in blamed


def test_a_host_that_is_behind_is_named_alone(three: Three):
    three.doing[0], three.doing[1] = Doing(6, "step 6", late=False), Doing(6, "step 6", late=True)
    three.names_alone(2, "is behind, at step 5")


def test_a_host_that_stands_still_is_named_alone(three: Three):
    three.until("host 2 is at step 5")
    three.hosts[2].die()
    three.names_alone(2, "shows no sign of life, last at step 5")


def test_a_first_host_that_stands_still_is_named(three: Three):
    three.until("host 0 is at step 5")
    three.coordinator.answers.clear()
    three.until("host 0 does not answer")
    three.coordinator.answers.set()
    assert "host 0 is at step 5" in three.until("host 0 is")  # it was not given up


def test_nobody_else_is_named_while_the_first_host_does_not_answer(three: Three):
    three.until("host 2 is at step 5")
    three.coordinator.answers.clear()
    late, blamed = time.monotonic() + LIMIT, ""
    while blamed != "host 0 does not answer":
        assert time.monotonic() < late, blamed
        asked, blamed = three.beats[1]._asked, three.beats[1].blame()
        # Where it had asked before, and waits for the same answer afterwards, it knew nothing of the others.
        assert asked is None or asked != three.beats[1]._asked or "no sign of life" not in blamed


def test_nobody_looks_while_nothing_takes_long(three: Three):
    three.until("host 2 is at step 5")
    three.doing[1] = Doing(6, "step 6", late=False)
    three.hosts[2].die()
    late = time.monotonic() + LIMIT
    while three.beats[1]._looks_since is not None:
        assert time.monotonic() < late
        time.sleep(0.05)
    three.doing[1] = Doing(7, "step 7", late=True)
    # What was seen when it last looked says nothing about the time between.
    assert "host 2 shows no sign of life" in three.until("host 2")


def test_a_host_is_not_called_silent_as_long_as_it_gives_a_sign(three: Three, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beats, "SILENT_FOR_LONG", 1.0)
    three.until("host 2 is at step 5")
    silent = three.beats[1].silent
    wait_until(lambda said: not said, silent)
    three.hosts[2].die()
    wait_until(lambda said: said.startswith("host 2 shows no sign of life, last at step 5") and alone(said), silent)


def test_nothing_is_collected_while_python_looks_at_its_threads(monkeypatch: pytest.MonkeyPatch):
    # Python 3.11 would stop for good: a host was, in the midst of a save, for which Orbax starts threads.
    look, collects = sys._current_frames, []

    def looked() -> dict:
        if threading.current_thread() is threading.main_thread():  # hosts of other tests may be about to end
            collects.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", looked)
    assert "test_beats.py" in stacks.where()
    assert collects == [False]
    with stacks._looking:  # nobody else is at it
        assert gc.isenabled()

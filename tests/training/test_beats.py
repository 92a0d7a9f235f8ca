"""Who is named when hosts wait for each other."""

import time
from collections.abc import Iterator

import pytest

from affinage.training import beats
from affinage.training.beats import Beats, Doing
from hosts_in_memory import Coordinator, HostInMemory

LIMIT = 120  # seconds until what does not come is a failure


class Three:
    """Three hosts at step 5, of which the second looks at the others."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.doing = [Doing(5, "step 5", late=host == 1) for host in range(3)]
        hosts = [HostInMemory(host, 3, coordinator=self.coordinator) for host in range(3)]
        self.beats = [Beats(hosts[host], self._of(host)) for host in range(3)]

    def _of(self, host: int):
        return lambda: self.doing[host]

    def until(self, said: str) -> str:
        """What the second host says as soon as `said` is in it."""
        late = time.monotonic() + LIMIT
        while said not in (blamed := self.beats[1].blame()):
            assert time.monotonic() < late, blamed
            time.sleep(0.05)
        return blamed


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
    blamed = three.until("host 2 is behind, at step 5")
    assert "host 0" not in blamed and "host 1" not in blamed


def test_a_host_that_stands_still_is_named_alone(three: Three):
    three.until("host 2 is at step 5")
    three.beats[2].close()
    blamed = three.until("host 2 shows no sign of life, last at step 5")
    assert "host 0" not in blamed and "host 1" not in blamed


def test_a_first_host_that_stands_still_is_named(three: Three):
    three.until("host 0 is at step 5")
    three.coordinator.answers.clear()
    three.until("host 0 does not answer")
    three.coordinator.answers.set()
    assert "host 0 is at step 5" in three.until("host 0 is")  # it was not given up


def test_nobody_else_is_named_while_the_first_host_does_not_answer(three: Three):
    three.until("host 2 is at step 5")
    three.coordinator.answers.clear()
    late, said = time.monotonic() + LIMIT, [""]
    while "host 0 does not answer" not in said:
        assert time.monotonic() < late, said
        said.append(three.beats[1].blame())
    assert not [blamed for blamed in said if "no sign of life" in blamed]


def test_nobody_looks_while_nothing_takes_long(three: Three):
    three.until("host 2 is at step 5")
    three.doing[1] = Doing(6, "step 6", late=False)
    three.beats[2].close()
    late = time.monotonic() + LIMIT
    while three.beats[1]._looks_since is not None:
        assert time.monotonic() < late
        time.sleep(0.05)
    three.doing[1] = Doing(7, "step 7", late=True)
    # What was seen when it last looked says nothing about the time between.
    assert three.until("host 2").startswith("host 2 shows no sign of life")


def test_a_host_is_not_called_silent_as_long_as_it_gives_a_sign(three: Three, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beats, "_SILENT_FOR_LONG", 1.0)
    three.until("host 2 is at step 5")
    assert three.beats[1].silent() == ""
    three.beats[2].close()
    late = time.monotonic() + LIMIT
    while not (silent := three.beats[1].silent()):
        assert time.monotonic() < late
        time.sleep(0.05)
    assert silent.startswith("host 2 shows no sign of life, last at step 5") and "host 0" not in silent

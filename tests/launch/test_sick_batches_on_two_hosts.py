"""Two hosts of which one has a batch that is not finite judge it alike, and go back together."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import gangs
import pytest

from affinage.launch import Gang, Restarts, supervise

STEPS, SICK = 20, [8, 13]


@pytest.fixture(scope="module")
def two(cache: Path) -> Iterator[gangs.Nursery]:
    with gangs.Nursery(cache) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def one(cache: Path) -> Iterator[gangs.Nursery]:
    """A host with the devices of both."""
    with gangs.Nursery(cache, hosts=1) as nursery:
        yield nursery


def order(folder: Path, policy: str, **more: object) -> list[str]:
    return gangs.order(folder, STEPS, sick=SICK, settings={"health": {"on_non_finite": policy}}, **more)


def done(folder: Path) -> list[tuple[int, str]]:
    """What was done about which step."""
    events = [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]
    return [(event["step"], event["done"]) for event in events]


@pytest.mark.full
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_two_hosts_judge_a_sick_batch_of_one_alike_and_go_back_together(tmp_path: Path, two, one, policy: str):
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert supervise(one, order(alone, policy), Restarts(failures=0), say=lambda line: None) == 0
    killed: list[Gang] = []

    class KilledOnTheWayBack:
        hosts = two.hosts

        def start(self, command: list[str]) -> Gang:
            hurt = {"hurt": {"host": 1, "phase": "going back", "by": int(signal.SIGKILL)}} if not killed else {}
            gang = two.start(order(together, policy, **hurt))
            if hurt and policy == "rewind":
                gang.wait_for_one()
                assert "hurt in going back" in gang.said(1), gang.said(1)
            killed.append(gang)
            return gang

        def finish(self) -> None: ...

    assert supervise(KilledOnTheWayBack(), [], Restarts(failures=1), say=lambda line: None) == 0
    back = [(8, "rewound to 5"), (13, "rewound to 10")]
    assert done(together) == done(alone) == (back if policy == "rewind" else [(step, "skipped") for step in SICK])
    assert gangs.ended_alike(together, alone, STEPS)
    assert gangs.steps_of(together, 0) == gangs.steps_of(together, 1)
    assert len(killed) == (2 if policy == "rewind" else 1)

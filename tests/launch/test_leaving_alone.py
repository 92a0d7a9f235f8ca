"""Of two hosts one leaves by itself: the other one does not wait for it at JAX's own end, which would abort it."""

import os
import subprocess
import sys

import pytest

from affinage.launch.process import reserved_port

HOST = """
import os, signal, sys, time
from affinage.errors import Preempted
from affinage.hardware import joining
from affinage.stopping import OwnProcess, leave, left_when_done

class Links(joining.Links):
    def __init__(self, *given):
        super().__init__(*given)
        while not self._complete:
            time.sleep(0.01)

joining.Links = Links
with left_when_done():
    try:
        with OwnProcess(), joining.joined() as hosts:
            hosts.meet("the beginning")
            if hosts.first:
                {first}
            {second}
    except Preempted:
        sys.exit(75)
"""
WAITS = 'hosts.meet("the end", seconds=300)'


@pytest.mark.parametrize(
    ("first", "second", "statuses"),
    [
        ('raise Preempted("told to stop")', 'leave("told while in native code")', [75, 75]),
        ('leave("told while in native code")', 'raise Preempted("told to stop")', [75, 75]),
        (WAITS, 'raise ValueError("an error of ours")', [1, 1]),
    ],
    ids=["the second", "the first", "by an error"],
)
def test_no_host_waits_for_one_that_has_left(first: str, second: str, statuses: list[int]):
    ended, said = both(first, second)
    assert ended == statuses, said
    assert not any("Check failure" in each for each in said), said


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize(
    "how",
    ["os.kill(os.getpid(), signal.SIGTERM); time.sleep(300)", 'leave("SIGTERM, in native code", told=True)'],
    ids=["in Python", "in native code"],
)
def test_where_one_host_alone_is_told_to_stop_the_other_leaves_with_one_line(told: int, how: str):
    ended, said = both(*((how, WAITS) if told == 0 else (WAITS, how)))
    assert ended == [75, 75], said
    assert said[1 - told].strip() == f"Stopped: host {told} was told to stop. Run the same command to go on."


def both(first: str, second: str) -> tuple[list[int], list[str]]:
    """How the two hosts end that do this, and what they say."""
    held, address = reserved_port()
    hosts = []
    for host in range(2):
        place = {"AFFINAGE_COORDINATOR": address, "AFFINAGE_HOSTS": "2", "AFFINAGE_HOST": str(host)}
        command = [sys.executable, "-c", HOST.format(first=first, second=second)]
        hosts.append(subprocess.Popen(command, env={**os.environ, **place}, text=True, stderr=subprocess.PIPE))
    with held:
        said = [host.communicate(timeout=300)[1] for host in hosts]
    return [host.returncode for host in hosts], said

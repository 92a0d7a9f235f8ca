"""What `affinage launch` refuses before it has started anything, and that its help's example is accepted."""

import re
import shlex

import pytest

from affinage.cli.launch import launch

CLOUD = ("--set", "hardware.slice=v4-32", "--set", "hardware.cloud={project: p, zone: z}")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the hosts that would have been started."""
    commands: list[list[str]] = []
    monkeypatch.setattr("affinage.launch.supervise", lambda launcher, words, *_, **__: commands.append(words) or 0)
    return commands


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "2", "--devices", "4"), "1 device, but there are 8 (hosts: 2, devices of each: 4)"),
        (("--hosts", "2", "--devices", "4", "--set", "mesh={fsdp: auto, tensor: 3}"), "does not divide the 8"),
        (("--on", "ssh", "--machines", "a,b", "--devices", "2"), "1 device, but there are 4"),
        (("--on", "ray", "--hosts", "2", "--devices", "2"), "1 device, but there are 4"),
        (("--on", "cloud", *CLOUD), "1 device, but there are 16 (hosts: 4, devices of each: 4)"),
    ],
)
def test_a_mesh_that_is_not_of_all_devices(affinage, started, words, message):
    status, _, err = affinage("launch", "quickstart", *words)
    assert status == 2 and message in err and "mesh" in err and not started


@pytest.mark.parametrize(
    "words",
    [
        ("--hosts", "1", "--devices", "4"),  # one host may leave some of its devices out
        ("--hosts", "2", "--devices", "4", "--until", "rows"),  # nothing is trained
        ("--hosts", "2"),  # each host has what it has
    ],
)
def test_what_may_be_meant_is_started(affinage, started, words):
    assert affinage("launch", "quickstart", *words)[0] == 0 and len(started) == 1


def test_the_example_of_the_help_is_accepted(affinage, started):
    [example] = re.findall(r"Example: affinage (launch quickstart.*)", launch.__doc__ or "")
    assert affinage(*shlex.split(example))[0] == 0 and len(started) == 1

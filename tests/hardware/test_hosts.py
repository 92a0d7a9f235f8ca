"""How hosts find each other, what they agree on, and what becomes of those whose others do not come."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from affinage.errors import TransientError, UserError, of_the_machine
from affinage.hardware import hosts
from affinage.launch.process import reserved_port

AGREE = """
from affinage.hardware.hosts import HostLost
from affinage.hardware.joining import joined
with joined() as hosts:
    print([hosts.least("rows", value) for value in ([7, 2, 5], [5, 3, 5])[hosts.index]],
          hosts.share("a word", ["said by", hosts.index]), flush=True)
    if hosts.first:
        try:
            hosts.meet("the middle", seconds=0.5)
        except HostLost as error:
            print(error, flush=True)
    hosts.meet("the end")
"""
ALONE = """
import sys
from affinage.cli.program import main
from affinage.hardware import joining
joining.JOIN = 2
main(["run", sys.argv[1], "--runs", sys.argv[2]])
"""
TINY = Path(__file__).parents[1] / "recipes" / "tiny.yaml"


def host(number: int, address: str) -> dict[str, str]:
    return os.environ | {hosts.COORDINATOR: address, hosts.HOSTS: "2", hosts.HOST: str(number)}


def test_hosts_agree_on_the_least_and_on_the_firsts_word_and_who_does_not_come_is_named(warm_python: list[str]):
    held, address = reserved_port()
    both = [
        subprocess.Popen([*warm_python, "-c", AGREE], env=host(number, address), stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    with held:
        first, second = [each.communicate(timeout=300)[0].splitlines() for each in both]
    agreed = "[5, 2, 5] ['said by', 0]"
    assert second == [agreed] and first[0] == agreed
    assert "host 1" in first[1] and "the middle" in first[1]


def test_a_host_whose_others_do_not_come_ends_so_that_it_is_started_again(warm_python: list[str], tmp_path: Path):
    held, address = reserved_port()
    with held:
        command = [*warm_python, "-c", ALONE, str(TINY), str(tmp_path)]
        ended = subprocess.run(command, env=host(1, address), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    assert "host 1 of 2 did not meet the others" in ended.stderr and address in ended.stderr
    assert "Traceback" not in ended.stderr and "stack trace" not in ended.stderr


def test_a_disk_behind_a_network_may_come_back_and_a_full_one_does_not():
    for number, passes in {errno.EIO: True, errno.ESTALE: True, errno.ENOSPC: False}.items():
        told = of_the_machine(OSError(number, os.strerror(number), "runs"))
        assert isinstance(told, UserError) and isinstance(told, TransientError) == passes


def test_the_environment_or_slurm_gives_a_host_its_place(monkeypatch: pytest.MonkeyPatch):
    for name in (hosts.COORDINATOR, hosts.HOSTS, hosts.HOST):
        monkeypatch.delenv(name, raising=False)
    assert hosts.place() is None
    monkeypatch.setenv(hosts.COORDINATOR, "10.0.0.1:4321")
    monkeypatch.setenv(hosts.HOSTS, "4")
    with pytest.raises(UserError) as refused:
        hosts.place()
    assert hosts.HOSTS in refused.value.where and refused.value.fix
    monkeypatch.setenv(hosts.HOST, "4")
    with pytest.raises(UserError):
        hosts.place()
    monkeypatch.setenv(hosts.HOST, "3")
    assert hosts.place() == hosts.Place("10.0.0.1:4321", 4, 3)
    monkeypatch.setenv(hosts.COORDINATOR, "auto")
    job = {"JOB_ID": "4097", "STEP_NODELIST": "node[007-010]", "NTASKS": "32", "PROCID": "9", "LOCALID": "1"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = hosts.place()
    assert found is not None and (found.hosts, found.host, found.detected) == (32, 9, True)
    assert found.coordinator.startswith("node007:")

"""Launchers for other machines: ssh through a stand-in that runs the line here, Ray on a cluster of this machine."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from affinage.errors import UserError
from affinage.hardware.cloud import CloudSlice
from affinage.hardware.slices import find_slice
from affinage.launch.gang import Ending, Gang, Launcher, Restarts
from affinage.launch.process import HostProcess
from affinage.launch.ray import RayLauncher
from affinage.launch.remains import Remains
from affinage.launch.rented import RentedLauncher
from affinage.launch.ssh import SshLauncher
from affinage.launch.supervise import supervise
from affinage.recipe.claims import CloudSettings
from tpu_api import serving

FAKE = [sys.executable, str(Path(__file__).with_name("fake_host.py"))]


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def endings(gang: Gang, hosts: int) -> list[Ending]:
    found: list[Ending] = []
    end = time.monotonic() + 60
    while len(found) < hosts:
        assert time.monotonic() < end
        found += gang.ended(0.5)
    return sorted(found, key=lambda ending: ending.host)


def alive(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def ssh(tmp_path: Path) -> Callable[..., Launcher]:
    """A stand-in for ssh: drops the options and the address, and gives the rest to a shell of its own session."""
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        "#!/bin/bash\n"
        "while [[ $1 == -* ]]; do if [[ $1 == -o ]]; then shift 2; else shift; fi; done\n"
        f'[[ $1 == gone ]] && exit 255\ncd {tmp_path} && mkdir -p "$1" && cd "$1" && shift\n'
        'exec sh -c "$*"\n'
    )
    stand_in.chmod(stat.S_IRWXU)

    def launcher(hosts: int, **options: object) -> Launcher:
        addresses = [f"me@machine{host}" for host in range(hosts)]
        options = {"program": " ".join(FAKE), "ssh": [str(stand_in)], **options}
        return SshLauncher(options.pop("addresses", addresses), **options)  # type: ignore[arg-type]

    return launcher


@pytest.fixture(scope="module")
def ray() -> Iterator[Callable[..., Launcher]]:
    opened: list[RayLauncher] = []

    def launcher(hosts: int, **options: object) -> Launcher:
        opened.append(RayLauncher(hosts, program=FAKE, devices=1, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield launcher
    for each in opened[-1:]:
        each.close()


@pytest.fixture(params=["ssh", "ray"])
def launcher(request: pytest.FixtureRequest) -> Callable[..., Launcher]:
    return request.getfixturevalue(request.param)


def test_every_host_is_told_where_it_is_and_what_it_writes_comes_here(launcher, tmp_path: Path):
    said: list[str] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: one")
    launcher = launcher(2, files={str(recipe): b"name: another"}, say=said.append)
    gang = launcher.start(["read", str(recipe)])
    try:
        assert [ending.status for ending in endings(gang, 2)] == [0, 0]
    finally:
        gang.end()
    assert {line.split(" at ")[0] for line in said if "host" in line} == {"0 | host 0 of 2", "1 | host 1 of 2"}
    assert len({line.split(" at ")[1] for line in said if "host" in line}) == 1  # the coordinator
    assert {"0 | name: another", "1 | name: another"} <= set(said)  # its own content there differs
    assert recipe.read_text() == "name: one"


def test_signals_reach_every_host(launcher, tmp_path: Path):
    gang = launcher(2).start(["wait", str(tmp_path)])
    try:
        until(lambda: all((tmp_path / f"process-{host}").exists() for host in range(2)))
        assert gang.ended(0.0) == []
        gang.tell(signal.SIGTERM)
        assert [ending.status for ending in endings(gang, 2)] == [75, 75]
    finally:
        gang.end()
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text() == "SIGTERM"


def test_a_failure_is_told_with_its_host(launcher, tmp_path: Path):
    gang = launcher(2).start(["fail"])
    try:
        assert [ending.status for ending in endings(gang, 2)] == [0, 3]
    finally:
        gang.end()


def test_nothing_is_left_running(launcher, tmp_path: Path):
    gang = launcher(2).start(["stubborn", str(tmp_path)])
    until(lambda: all((tmp_path / f"process-{host}").exists() for host in range(2)))
    processes = [int((tmp_path / f"process-{host}").read_text()) for host in range(2)]
    assert all(map(alive, processes))
    gang.end()
    gang.end()
    until(lambda: not any(map(alive, processes)), 10)


def test_a_machine_that_ssh_does_not_reach_is_named(ssh):
    with pytest.raises(UserError, match="host gone cannot be prepared"):
        ssh(2, addresses=["machine", "gone"]).start(["fail"])
    with pytest.raises(UserError, match="no addresses"):
        ssh(1, addresses=["-oProxyCommand=evil"])


def test_a_preparation_that_fails_is_told_and_nothing_is_started(ssh, tmp_path: Path):
    with pytest.raises(UserError, match="no such wheel") as wrong:
        ssh(2, prepare="echo no such wheel; false").start(["wait", str(tmp_path)])
    assert wrong.value.where == "--prepare" and not list(tmp_path.glob("process-*"))


def test_what_ray_takes_the_agent_from_is_told_to_save(ray, tmp_path: Path):
    gang = ray(2).start(["wait", str(tmp_path)])
    try:
        until(lambda: all((tmp_path / f"process-{host}").exists() for host in range(2)))
        gang._ray.kill(gang._agents[1])
        (ending,) = endings(gang, 1)
        assert ending.host == 1 and ending.status == 75 and ending.out_of_sight
        until(lambda: (tmp_path / "saved-1").exists())
    finally:
        gang.end()
    assert not (tmp_path / "saved-0").exists()


def test_fewer_hosts_than_wished_where_that_is_allowed(ray, tmp_path: Path):
    import ray as library

    launcher = ray(2, least=1)
    machines = sum(node["Alive"] for node in library.nodes())
    gang = launcher.start(["fail"])
    gang.end()
    assert machines == 1 and launcher.hosts == 1


def test_what_outlived_its_starter_is_waited_for_and_then_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Remains, "PATIENCE", 0.3)
    place = {"AFFINAGE_HOST": "0", "AFFINAGE_HOSTS": "1", "AFFINAGE_COORDINATOR": "-"}
    process = HostProcess([*FAKE, "stubborn", str(tmp_path)], {**os.environ, **place})
    try:
        until((tmp_path / "process-0").exists)
        Remains("command", "first").note(process.pid)
        with pytest.raises(UserError, match="under way already"):
            Remains("command", "second").end()  # its parent, this process, is there
        noted = tmp_path / f"affinage-{os.getuid()}" / "command" / f"{process.pid}.process"
        start, began, _ = noted.read_text().split()
        noted.write_text(f"{start} {began} 1")
        Remains("command", "first").end()
        assert alive(process.pid)  # of this very start
        Remains("command", "second").end()
        assert not alive(process.pid) and not noted.exists()
    finally:
        process.end()


def test_the_end_of_who_started_it_is_the_end_of_a_host(tmp_path: Path):
    place = {"AFFINAGE_HOST": "0", "AFFINAGE_HOSTS": "1", "AFFINAGE_COORDINATOR": "-"}
    environment = {**os.environ, **place, "AFFINAGE_PARENT_SIGNAL": str(int(signal.SIGTERM))}
    program = (
        "import os, sys, time\n"
        "from affinage.launch.process import HostProcess\n"
        "HostProcess(sys.argv[1:], dict(os.environ))\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, *FAKE, "wait", str(tmp_path)], env=environment) as starter:
        try:
            until((tmp_path / "process-0").exists)
        finally:
            starter.kill()
    until((tmp_path / "saved-0").exists)


def test_a_slice_is_rented_used_and_given_back(ssh, tmp_path: Path, monkeypatch):
    said: list[str] = []
    settings = CloudSettings(project="lab", zone="us-central2-b")
    with serving() as (cloud, api):
        slice = CloudSlice("run", find_slice("v4-16"), settings, said.append, requests.Session(), lambda _: None, api)
        launcher = RentedLauncher(slice, 4, lambda addresses: ssh(4, addresses=addresses, say=said.append))
        assert supervise(launcher, ["fail"], Restarts(failures=0), say=said.append) == 1
        assert "run" in cloud.queue
        cloud.queue["run"]["course"] = ["SUSPENDED"]  # taken back: asked for again by the next start
        gang = launcher.start(["fail"])
        assert [ending.where for ending in endings(gang, 4)] == [f"10.0.0.{host}" for host in range(4)]
        gang.end()
        assert len(cloud.wishes) == 2
        slice.release()
        assert not cloud.queue

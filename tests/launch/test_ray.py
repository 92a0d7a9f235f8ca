"""Hosts that are machines of a Ray cluster."""

import os
import signal
from pathlib import Path

import pytest
from endings import endings

from affinage.errors import UserError
from affinage.hardware.ray_cluster import on_loopback
from affinage.launch import Gang
from affinage.launch.ray import RayLauncher
from affinage.launch.remains import Remains
from waiting import until

SCRIPT = str(Path(__file__).with_name("fake_host.py"))


def test_hosts_run_on_rays_machines_save_when_told_and_start_again(tmp_path: Path):
    said: list[str] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: one")
    options = {"program": [SCRIPT], "devices": 1, "modules": (), "answers": 300.0, "say": said.append}
    launcher = RayLauncher(2, files={str(recipe): b"name: other"}, **options)  # type: ignore[arg-type]

    def begun() -> Gang:
        for file in (*tmp_path.glob("process-*"), *tmp_path.glob("saved-*")):
            file.unlink()
        gang = launcher.start(["wait", str(tmp_path), str(recipe)])
        until(lambda: all((tmp_path / f"process-{host}").exists() for host in range(2)))
        return gang

    try:
        gang = begun()
        gang.tell(signal.SIGTERM)
        assert [ending.status for ending in endings(gang, 2)] == [75, 75]
        gang.end()
        assert {(tmp_path / f"saved-{host}").read_text() for host in range(2)} == {"SIGTERM"}
        assert {"0 | name: other", "1 | name: other"} <= set(said)
        assert {line.split(" at ")[0] for line in said if " at " in line} == {f"{n} | host {n} of 2" for n in (0, 1)}
        gang = begun()
        os.kill(int((tmp_path / "process-1").read_text()), signal.SIGKILL)
        assert [(ending.host, ending.status) for ending in endings(gang, 1)] == [(1, -signal.SIGKILL)]
        gang.end()
        launcher.finish()
        fewer = RayLauncher(2, least=1, **options)  # type: ignore[arg-type]
        fewer.start(["end", "0"]).end()
        assert fewer.hosts == 1 and not fewer.has_room()  # a host for each machine, of which there is one
        fewer.finish()
    finally:
        launcher.close()


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [
        (["127.0.0.1", "127.0.0.1"], True),
        (["127.0.0.1", "10.0.0.2"], False),
        (["head.cluster.local"], False),  # Ray keeps a name that it was given
    ],
)
def test_a_cluster_is_this_machines_alone_where_all_addresses_are_loopback(addresses: list[str], alone: bool):
    assert on_loopback(addresses) is alone


def test_what_outlived_its_starter_is_waited_for_and_then_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from affinage.launch.process import HostProcess

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Remains, "PATIENCE", 0.3)
    place = {"AFFINAGE_HOST": "0", "AFFINAGE_HOSTS": "1", "AFFINAGE_COORDINATOR": "-"}
    process = HostProcess(["python3", SCRIPT, "stubborn", str(tmp_path)], os.environ | place)
    try:
        until((tmp_path / "process-0").exists)
        Remains("command", "first").note(process.pid, os.getpid())
        with pytest.raises(UserError, match="under way already"):
            Remains("command", "second").end()  # its owner, this process, is there
        [noted] = tmp_path.glob("affinage-*/command/*.process")
        start, began, owner, _ = noted.read_text().split()
        noted.write_text(f"{start} {began} {owner} 1")  # another process of that number
        Remains("command", "first").end()
        assert process.status() is None  # of this very start
        Remains("command", "second").end()
        assert process.status() == -signal.SIGKILL and not noted.exists()
    finally:
        process.end()

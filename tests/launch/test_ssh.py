"""Hosts that ssh reaches, and slices that are rented for them: ssh is a stand-in that runs the line here."""

import os
import signal
import sys
from pathlib import Path

import pytest
import requests
from endings import endings

from affinage.config.claims import CloudSettings
from affinage.errors import UserError
from affinage.hardware.cloud import CloudSlice
from affinage.hardware.slices import find_slice
from affinage.launch import Ending, Restarts, supervise
from affinage.launch.rented import RentedLauncher
from affinage.launch.ssh import SshLauncher
from tpu_api import serving
from waiting import until

HOST = Path(__file__).with_name("fake_host.py")
# Each address has a folder of its own; `gone` is not reached.
SSH = """
import os, subprocess, sys
folder, *words = sys.argv[1:]
while words[0].startswith("-"):
    del words[: 2 if words[0] == "-o" else 1]
address, *line = words
if address == "gone":
    sys.exit(255)
os.makedirs(here := os.path.join(folder, address), exist_ok=True)
os.environ.pop("AFFINAGE_PARENT", None)
status = subprocess.Popen(["sh", "-c", " ".join(line)], cwd=here, start_new_session=True).wait()
sys.exit(255 if status < 0 else status)
"""


def launcher(folder: Path, addresses: list[str], **options: object) -> SshLauncher:
    script = folder / "ssh.py"
    script.write_text(SSH)
    ssh = [sys.executable, "-ISs", str(script), str(folder)]
    return SshLauncher(addresses, program=f"{sys.executable} -ISs {HOST}", ssh=ssh, **options)  # type: ignore[arg-type]


def test_hosts_are_told_where_they_are_get_their_files_and_signals_and_none_is_left(tmp_path: Path):
    said: list[str] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: one")
    two = launcher(tmp_path, ["me@a", "me@b"], files={str(recipe): b"name: other"}, say=said.append)
    gang = two.start(["wait", str(tmp_path), str(recipe)])
    begun = [lambda at=at: any(tmp_path.glob(f"me@{at}/affinage/.host-*")) for at in "ab"]
    until(lambda: all((tmp_path / f"process-{host}").exists() and noted() for host, noted in enumerate(begun)))
    gang.tell(signal.SIGTERM)
    assert endings(gang, 2) == [Ending(0, 75, "me@a"), Ending(1, 75, "me@b")]
    gang.end()
    assert {(tmp_path / f"saved-{host}").read_text() for host in range(2)} == {"SIGTERM"}
    assert {f"{host} | host {host} of 2 at a:8476" for host in range(2)} <= set(said)
    assert {"0 | name: other", "1 | name: other"} <= set(said) and recipe.read_text() == "name: one"
    gang = two.start(["end", "255"])  # of the program, not of its connection
    assert [ending.status for ending in endings(gang, 2)] == [1, 1]
    gang.end()
    gang = two.start(["stubborn", str(tmp_path)])
    gang.end()


def test_a_machine_that_is_not_reached_or_prepared_is_named_before_anything_is_started(tmp_path: Path):
    for addresses, prepare, where in (["gone"], "", "ssh"), (["a"], "echo no such wheel; false", "--prepare"):
        with pytest.raises(UserError) as refused:
            launcher(tmp_path, addresses, prepare=prepare).start(["wait", str(tmp_path)])
        assert refused.value.where == where and addresses[0] in str(refused.value) and refused.value.fix
    with pytest.raises(UserError):
        launcher(tmp_path, ["-oProxyCommand=evil"])
    assert not list(tmp_path.glob("process-*"))


def test_a_slice_is_rented_used_and_rented_again_where_it_was_taken_back(tmp_path: Path):
    settings, said = CloudSettings(project="lab", zone="us-central2-b"), []
    with serving() as (cloud, api):
        rented = CloudSlice("run", find_slice("v4-16"), settings, said.append, requests.Session(), lambda _: None, api)
        hosts = RentedLauncher(rented, 4, lambda addresses: launcher(tmp_path, list(addresses), say=said.append))
        for _ in range(2):
            assert supervise(hosts, ["end", "0"], Restarts(failures=0), say=said.append) == 0
            cloud.queue["run"]["course"] = ["SUSPENDED"]
        assert len(cloud.wishes) == 2 and {"3 | host 3 of 4 at 10.0.0.0:8476"} <= set(said)


def test_told_to_stop_the_wait_for_a_slice_ends():
    settings = CloudSettings(project="lab", zone="us-central2-b")
    with serving() as (cloud, api):
        cloud.course = ["WAITING_FOR_RESOURCES"]

        def told(seconds: float) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        rented = CloudSlice("run", find_slice("v4-16"), settings, print, requests.Session(), told, api)
        hosts = RentedLauncher(rented, 4, lambda addresses: pytest.fail("no slice came"))
        assert supervise(hosts, ["end", "0"], Restarts()) == 75

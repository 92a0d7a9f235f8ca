"""Launchers for other machines: ssh through a stand-in that runs the line here, Ray on a cluster of this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gangs
import psutil
import pytest
import requests

from affinage.errors import UserError
from affinage.hardware.acquisition import Hardware
from affinage.hardware.cloud import CloudSlice, Host
from affinage.hardware.slices import find_slice
from affinage.launch.forked import OF_A_HOST
from affinage.launch.gang import Ending, Gang, Launcher, Restarts
from affinage.launch.process import HostProcess
from affinage.launch.ray import RayLauncher
from affinage.launch.ray_agent import _imports
from affinage.launch.remains import Remains
from affinage.launch.rented import RentedLauncher
from affinage.launch.ssh import SshLauncher
from affinage.launch.supervise import supervise
from affinage.recipe.claims import CloudSettings
from tpu_api import serving

SCRIPT = str(Path(__file__).with_name("fake_host.py"))
FAKE = [sys.executable, SCRIPT]


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """On a busy machine Ray's workers take long to start, and lines come late to whoever reads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("affinage.launch.ray._ANSWERS", 300.0)
        patch.setattr("affinage.launch.ray._LASTING", 300.0)
        patch.setattr("affinage.launch.ssh._ANSWERS", 300.0)
        patch.setattr("affinage.launch.ssh._TELL", 120.0)
        patch.setattr("affinage.launch.process._LAST_WORDS", 60.0)
        yield


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def begun(folder: Path, hosts: int) -> bool:
    """Whether the processes run, and on machines that ssh reaches also whether it is written down which they are."""
    written = (any(f.stat().st_size for f in home.glob(".host-*")) for home in folder.glob("me@machine*/affinage"))
    return all((folder / f"process-{host}").exists() for host in range(hosts)) and all(written)


def endings(gang: Gang, hosts: int) -> list[Ending]:
    found: list[Ending] = []
    end = time.monotonic() + 300
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
    stand_in = [sys.executable, str(Path(__file__).with_name("fake_ssh.py")), str(tmp_path)]

    def launcher(hosts: int, **options: object) -> Launcher:
        addresses = [f"me@machine{host}" for host in range(hosts)]
        options = {"program": " ".join(FAKE), "ssh": stand_in, **options}
        return SshLauncher(options.pop("addresses", addresses), **options)  # type: ignore[arg-type]

    return launcher


@pytest.fixture(scope="module")
def opened() -> Iterator[list[RayLauncher]]:
    launchers: list[RayLauncher] = []
    yield launchers
    for each in launchers[-1:]:
        each.close()


@pytest.fixture
def ray(opened: list[RayLauncher]) -> Iterator[Callable[..., Launcher]]:
    def launcher(hosts: int, **options: object) -> Launcher:
        options = {"program": [SCRIPT], "devices": 1, "modules": (), **options}
        opened.append(RayLauncher(hosts, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield launcher
    for each in opened:
        each.finish()


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_host(launcher, tmp_path: Path, number: signal.Signals):
    gang = launcher(2).start(["wait", str(tmp_path)])
    try:
        until(lambda: begun(tmp_path, 2))
        assert gang.ended(0.0) == []
        gang.tell(number)
        assert [ending.status for ending in endings(gang, 2)] == [75, 75]
    finally:
        gang.end()
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text() == number.name


def test_hosts_are_told_which_key_signs(launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setenv("AFFINAGE_SEAL_KEY_FILE", str(tmp_path / "a key"))  # later than the cluster's nodes begin
    gang = launcher(2, say=said.append).start(["signs"])
    try:
        assert [ending.status for ending in endings(gang, 2)] == [0, 0]
    finally:
        gang.end()
    assert {f"{host} | signs with {tmp_path}/a key" for host in range(2)} <= set(said)


def test_a_failure_is_told_with_its_host(launcher, tmp_path: Path):
    gang = launcher(2).start(["fail"])
    try:
        assert [ending.status for ending in endings(gang, 2)] == [0, 3]
    finally:
        gang.end()


def test_nothing_is_left_running(launcher, tmp_path: Path):
    gang = launcher(2).start(["stubborn", str(tmp_path)])
    until(lambda: begun(tmp_path, 2))
    processes = [int((tmp_path / f"process-{host}").read_text()) for host in range(2)]
    assert all(map(alive, processes))
    gang.end()
    gang.end()
    until(lambda: not any(map(alive, processes)))


def test_a_host_whose_connection_is_lost_is_out_of_sight_and_told_to_save(ssh, tmp_path: Path):
    gang = ssh(2).start(["wait", str(tmp_path)])
    try:
        until(lambda: begun(tmp_path, 2))
        os.kill(gang._processes[1].pid, signal.SIGUSR1)
        (ending,) = endings(gang, 1)
        assert ending == Ending(1, 75, "me@machine1", out_of_sight=True)
        until((tmp_path / "saved-1").exists)
        assert (tmp_path / "saved-1").read_text() == "SIGTERM" and not (tmp_path / "saved-0").exists()
    finally:
        gang.end()


def test_what_was_lost_sight_of_is_not_left_running(ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # What ignores its end holds the output of this stand-in for ssh, which is so long waited for; real ssh closes it.
    monkeypatch.setattr("affinage.launch.process._LAST_WORDS", 0.5)
    gang = ssh(1).start(["stubborn", str(tmp_path)])
    until(lambda: begun(tmp_path, 1))
    process = int((tmp_path / "process-0").read_text())
    os.kill(gang._processes[0].pid, signal.SIGUSR1)
    assert endings(gang, 1)[0].out_of_sight and alive(process)
    gang.end()
    until(lambda: not alive(process))


def test_the_end_of_a_program_is_not_taken_for_that_of_its_connection(ssh, tmp_path: Path):
    gang = ssh(1).start(["end", "255"])
    assert endings(gang, 1) == [Ending(0, 1, "me@machine0")]
    gang.end()
    gang = ssh(1).start(["wait", str(tmp_path)])
    until(lambda: begun(tmp_path, 1))
    os.kill(int((tmp_path / "process-0").read_text()), signal.SIGKILL)
    assert endings(gang, 1) == [Ending(0, -signal.SIGKILL, "me@machine0")]
    gang.end()


def test_a_machine_that_is_gone_at_a_later_start_is_named_before_any_other_begins(ssh, tmp_path: Path):
    launcher = ssh(2, prepare="echo once >> prepared")
    for _ in range(2):
        gang = launcher.start(["end", "0"])
        assert [ending.status for ending in endings(gang, 2)] == [0, 0]
        gang.end()
    assert (tmp_path / "me@machine0" / "affinage" / "prepared").read_text() == "once\n"
    launcher._addresses[1] = "gone"
    with pytest.raises(UserError, match="host gone cannot be prepared"):
        launcher.start(["wait", str(tmp_path)])
    assert not list(tmp_path.glob("process-*"))


def test_a_machine_that_dies_without_a_word_is_not_waited_for(ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its connection hangs; a host elsewhere notices, and ends. Then the machine is back.

    It is the first one, so that the short patience with it is with no other.
    """
    monkeypatch.setattr("affinage.launch.ssh._TELL", 1.0)
    said: list[str] = []

    class Dying:
        hosts, starts = 2, 0

        def __init__(self) -> None:
            self._launcher = ssh(2)

        def start(self, command: list[str]) -> Gang:
            self.starts += 1
            if self.starts == 3:
                monkeypatch.setattr("affinage.launch.ssh._ANSWERS", 300.0)
                os.kill(int((tmp_path / "process-0").read_text()), signal.SIGKILL)
                (tmp_path / "me@machine0" / "dead").unlink()
                return self._launcher.start(["end", "0"])
            if self.starts == 2:
                monkeypatch.setattr("affinage.launch.ssh._ANSWERS", 1.0)
                return self._launcher.start(["end", "0"])
            gang = self._launcher.start(["wait", str(tmp_path)])
            until(lambda: begun(tmp_path, 2))
            (tmp_path / "me@machine0" / "dead").touch()
            os.kill(int((tmp_path / "process-1").read_text()), signal.SIGKILL)
            return gang

        def finish(self) -> None: ...

    dying = Dying()
    assert supervise(dying, [], Restarts(), say=said.append) == 0
    assert dying.starts == 3 and "me@machine0 cannot be prepared: it does not answer" in said[1], said


def test_what_goes_wrong_on_a_machine_of_ray_is_told_as_if_it_were_here(ray, tmp_path: Path):
    gang = ray(1).start(["wait", str(tmp_path)])
    try:
        until((tmp_path / "process-0").exists)
        with pytest.raises(UserError, match="under way already") as wrong:
            ray(1).start(["wait", str(tmp_path)])
        assert str(wrong.value).startswith("this run is under way already, in process")
    finally:
        gang.end()


def test_a_ray_of_our_own_listens_on_loopback_alone_and_answers_nobody_without_its_token(ray):
    import grpc
    import ray as library

    here, before = psutil.Process(), listening(psutil.Process())  # other tests of this process may have left some
    ray(1)
    found = {"here": listening(here) - before}
    for process in here.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray" in " ".join(process.cmdline()):
                found.setdefault(process.name(), set()).update(listening(process))
    assert found["gcs_server"] and found["raylet"]
    assert {ip.removeprefix("::ffff:") for addresses in found.values() for ip, _ in addresses} == {"127.0.0.1"}

    def machines(*said: tuple[str, str]) -> bytes:
        address, direct = library.get_runtime_context().gcs_address, [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(address, direct) as channel:
            return channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", metadata=said, timeout=60)

    for said in ([], [("authorization", f"Bearer {'0' * 64}")]):
        with pytest.raises(grpc.RpcError) as refused:
            machines(*said)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    assert b"127.0.0.1" in machines(("authorization", f"Bearer {token.read_text()}"))


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports."""
    return {tuple(c.laddr) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_a_machine_that_ssh_does_not_reach_is_named(ssh):
    with pytest.raises(UserError, match="host gone cannot be prepared"):
        ssh(2, addresses=["machine", "gone"]).start(["fail"])
    with pytest.raises(UserError, match="no addresses"):
        ssh(1, addresses=["-oProxyCommand=evil"])


def test_a_preparation_that_fails_is_told_and_nothing_is_started(ssh, tmp_path: Path):
    with pytest.raises(UserError, match="no such wheel") as wrong:
        ssh(2, prepare="echo no such wheel; false").start(["wait", str(tmp_path)])
    assert wrong.value.where == "--prepare" and not list(tmp_path.glob("process-*"))


def test_a_preparation_that_does_not_end_is_given_up(ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("affinage.launch.ssh._PREPARES", 0.6)
    with pytest.raises(UserError, match=r"machine0 cannot be prepared: .* has not ended within 0.01 minutes") as wrong:
        ssh(1, prepare="sleep 5").start(["wait", str(tmp_path)])
    assert wrong.value.where == "--prepare" and not list(tmp_path.glob("process-*"))


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def hosts_of(folder: Path) -> list[int]:
    until(lambda: begun(folder, 2))
    return [int((folder / f"process-{host}").read_text()) for host in range(2)]


def test_a_worker_of_rays_that_is_killed_is_replaced_and_what_it_had_imported_is_not_imported_again(
    ray, tmp_path: Path
):
    launcher = ray(2)
    gang = launcher.start(["wait", str(tmp_path)])
    first = hosts_of(tmp_path)
    zygotes = [parent(process) for process in first]
    worker = gang._ray.get(gang._agents[1].worker.remote())
    os.kill(worker, signal.SIGKILL)
    assert endings(gang, 1) == [Ending(1, 75, gang._where[1], out_of_sight=True)]
    until(lambda: not alive(first[1]))
    assert (tmp_path / "saved-1").exists() and not (tmp_path / "saved-0").exists()
    gang.end()
    for host in range(2):
        (tmp_path / f"process-{host}").unlink()
    gang = launcher.start(["wait", str(tmp_path)])
    try:
        again = hosts_of(tmp_path)
        assert [parent(process) for process in again] == zygotes
        assert gang._ray.get(gang._agents[1].worker.remote()) != worker
    finally:
        gang.end()
    launcher.finish()
    until(lambda: not any(map(alive, [*again, *zygotes])))


def test_another_driver_finds_what_was_imported_for_one_that_was_killed(ray, tmp_path: Path):
    launcher = ray(2)
    launcher.start(["wait", str(tmp_path)])
    zygotes = {parent(process) for process in hosts_of(tmp_path)}
    launcher._room.leave(for_good=False)  # as Ray does for a driver that is gone
    until(lambda: all((tmp_path / f"saved-{host}").exists() for host in range(2)))
    for host in range(2):
        (tmp_path / f"process-{host}").unlink()
    again = ray(2).start(["wait", str(tmp_path)])
    try:
        assert {parent(process) for process in hosts_of(tmp_path)} == zygotes
    finally:
        again.end()


def test_what_was_imported_before_a_file_changed_is_not_what_is_imported_now(tmp_path: Path):
    code = tmp_path / "package"
    code.mkdir()
    module = code / "module.py"
    module.write_text("one = 1")
    name = _imports(code, {"OF_JAX": "1"}, ["module"])
    assert name == _imports(code, {"OF_JAX": "1", "RAY_JOB_ID": "7"}, ["module"])
    assert name != _imports(code, {"OF_JAX": "2"}, ["module"])
    assert name != _imports(code, {"OF_JAX": "1"}, ["module", "another"])
    os.utime(module, ns=(1, 1))
    assert name == _imports(code, {"OF_JAX": "1"}, ["module"])
    module.write_text("one = 2")
    assert name != _imports(code, {"OF_JAX": "1"}, ["module"])


def test_what_ray_takes_the_agent_from_is_told_to_save_and_others_take_its_place(ray, tmp_path: Path):
    launcher = ray(2)
    gang = launcher.start(["wait", str(tmp_path)])
    try:
        zygotes = {parent(process) for process in hosts_of(tmp_path)}
        gang._ray.kill(gang._agents[1])
        (ending,) = endings(gang, 1)
        assert ending.host == 1 and ending.status == 75 and ending.out_of_sight
        until(lambda: (tmp_path / "saved-1").exists())
    finally:
        gang.end()
    assert not (tmp_path / "saved-0").exists()
    for host in range(2):
        (tmp_path / f"process-{host}").unlink()
    gang = launcher.start(["wait", str(tmp_path)])
    try:
        assert {parent(process) for process in hosts_of(tmp_path)} == zygotes
    finally:
        gang.end()


class LosingAWorker:
    """A launcher on Ray; the worker that watches over the second host is killed after some steps, once if at all."""

    hosts = 2

    def __init__(self, launcher: Launcher, metrics: Path, *, kills: bool) -> None:
        self.launcher, self.metrics, self.kills = launcher, metrics, kills

    def start(self, command: list[str]) -> Gang:
        gang = self.launcher.start(command)
        ended = gang.ended

        def hurt(seconds: float) -> list[Ending]:
            if self.kills and self.metrics.exists() and len(self.metrics.read_text().splitlines()) > 5:
                os.kill(gang._ray.get(gang._agents[1].worker.remote()), signal.SIGKILL)
                self.kills = False
            return ended(min(seconds, 0.1))

        gang.ended = hurt
        return gang

    def finish(self) -> None:
        """What is imported is kept for the next training."""


@pytest.mark.full
def test_a_training_on_ray_whose_worker_is_killed_ends_with_the_same_weights(ray, tmp_path: Path):
    folder, undisturbed, said = tmp_path / "run", tmp_path / "undisturbed", []
    program = [str(Path(__file__).with_name("one_host.py"))]
    launcher = ray(2, program=program, devices=2, modules=OF_A_HOST, say=said.append)
    order = gangs.order(folder, 16, mesh={"data": 4}, pause=0.2)  # slow steps: whoever kills may be late
    assert supervise(LosingAWorker(launcher, folder, kills=False), order, Restarts(), say=said.append) == 0, said
    folder.rename(undisturbed)  # the command that was run is run again
    losing = LosingAWorker(launcher, folder / "metrics.jsonl", kills=True)
    assert supervise(losing, order, Restarts(), say=said.append) == 0, said
    assert not losing.kills and sum("all hosts start again" in line for line in said) == 1, said
    assert gangs.ended_alike(folder, undisturbed, 16)


def test_fewer_hosts_than_wished_where_that_is_allowed(ray, tmp_path: Path):
    import ray as library

    launcher = ray(2, least=1)
    machines = sum(node["Alive"] for node in library.nodes())
    gang = launcher.start(["fail"])
    gang.end()
    assert machines == 1 and launcher.hosts == 1


def test_a_command_that_cannot_be_started_is_told_and_not_waited_for():
    with pytest.raises(ValueError, match="null byte"):
        HostProcess(["a\0b"])


def test_what_outlived_its_starter_is_waited_for_and_then_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Remains, "PATIENCE", 0.3)
    place = {"AFFINAGE_HOST": "0", "AFFINAGE_HOSTS": "1", "AFFINAGE_COORDINATOR": "-"}
    process = HostProcess([*FAKE, "stubborn", str(tmp_path)], {**os.environ, **place})
    try:
        until((tmp_path / "process-0").exists)
        Remains("command", "first").note(process.pid, os.getpid())
        with pytest.raises(UserError, match="under way already"):
            Remains("command", "second").end()  # its owner, this process, is there
        noted = tmp_path / f"affinage-{os.getuid()}" / "command" / f"{process.pid}.process"
        start, began, owner, _ = noted.read_text().split()
        noted.write_text(f"{start} {began} {owner} 1")  # another process of that number
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


def test_machines_of_any_hardware_that_gives_hosts_are_used_and_a_start_takes_those_that_are_there_then(ssh):
    class Borrowed:
        """Two machines, and others at the next start."""

        first = 0

        def acquire(self) -> list[Host]:
            self.first += 2
            return [Host(f"me@machine{self.first + host}", "") for host in range(2)]

        def release(self) -> None: ...

    borrowed: Hardware[Host] = Borrowed()
    launcher = RentedLauncher(borrowed, 2, lambda addresses: ssh(2, addresses=addresses))
    for start in (2, 4):
        gang = launcher.start(["fail"])
        assert [ending.where for ending in endings(gang, 2)] == [f"me@machine{start + host}" for host in range(2)]
        gang.end()


def test_told_to_stop_the_wait_for_a_slice_ends():
    said: list[str] = []

    def told(seconds: float) -> None:
        signal.raise_signal(signal.SIGTERM)

    with serving() as (cloud, api):
        cloud.course = ["WAITING_FOR_RESOURCES"]
        settings = CloudSettings(project="lab", zone="us-central2-b")
        slice = CloudSlice("run", find_slice("v4-16"), settings, said.append, requests.Session(), told, api)
        launcher = RentedLauncher(slice, 4, lambda addresses: pytest.fail("no slice came"))
        assert supervise(launcher, ["fail"], Restarts(), say=said.append) == 75
        assert len([line for line in cloud.asked if line.startswith("GET")]) == 2

"""Two processes that train one model: killed, told to stop or stuck, it ends with the same bits."""

import contextlib
import copy
import ipaddress
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import gangs
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.errors import EXIT_PREEMPTED
from affinage.launch import Gang, Restarts, supervise
from affinage.training.metrics import MetricsLog

STEPS, EVERY = 40, 5
KILLS = 20


def order(folder: Path, **more: object) -> list[str]:
    return gangs.order(folder, STEPS, **more)


def ended_alike(one: Path, other: Path) -> bool:
    return gangs.ended_alike(one, other, STEPS)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gangs.Nursery]:
    with gangs.Nursery(tmp_path_factory.mktemp("cache")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: gangs.Nursery) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    said: list[str] = []
    assert supervise(nursery, order(folder), Restarts(failures=2), say=said.append) == 0, said
    return folder


@pytest.mark.full
def test_a_host_killed_at_random_moments_changes_no_bit(tmp_path: Path, nursery, undisturbed: Path):
    said: list[str] = []
    killed = runs = 0
    while killed < KILLS:  # a run may come to its end before the last of them
        folder = tmp_path / f"run-{runs}"
        killing = gangs.Killing(nursery, folder, KILLS - killed, seed=runs, anew_every=KILLS)
        assert supervise(killing, order(folder), Restarts(failures=KILLS + 2), say=said.append) == 0
        assert killing.lost <= 2 * EVERY  # an interval, and the save in flight
        assert ended_alike(folder, undisturbed)
        runs, killed = runs + 1, killed + killing.killed
        assert runs <= KILLS, "no kill has ended a host"
    assert killed == KILLS and sum("was killed by SIGKILL" in line for line in said) >= KILLS // 4, said


def test_one_host_is_told_to_stop_and_all_stop_at_the_same_step(tmp_path: Path, nursery, undisturbed: Path):
    folder = tmp_path / "run"
    # The first host, which leaves at once where there is nothing to save, may be gone before another one has heard why.
    for host, phase in enumerate(("step", "compilation", "evaluation", "save")):
        hurt = {"host": host % 2, "phase": phase, "by": int(signal.SIGTERM)}
        gang = nursery.start(order(folder, hurt=hurt))
        assert set(gang.wait()) == {EXIT_PREEMPTED}, (phase, gang.said(0), gang.said(1))
        made = [gangs.steps_of(folder, host) for host in (0, 1)]
        assert made[0] == made[1], phase
        assert gangs.newest(folder) == made[0][-1] if phase != "compilation" else not made[0]
    assert supervise(nursery, order(folder), Restarts(failures=2), say=lambda line: None) == 0
    assert ended_alike(folder, undisturbed)


def test_hosts_whose_disk_vanishes_go_on_from_the_copy_at_a_url(tmp_path: Path, nursery, undisturbed: Path):
    folder, url = tmp_path / "run", f"file://{tmp_path}/elsewhere/run"
    gang = nursery.start(order(folder, remote=url, hurt={"host": 1, "phase": "save", "by": int(signal.SIGTERM)}))
    assert set(gang.wait()) == {EXIT_PREEMPTED}, (gang.said(0), gang.said(1))
    made = gangs.steps_of(folder)
    assert f"copied to {url}" in gang.said(0)
    shutil.rmtree(folder)
    gang = nursery.start(order(folder, remote=url))
    assert gang.wait() == [0, 0], (gang.said(0), gang.said(1))
    assert gangs.steps_of(folder)[0] == made[-1] + 1
    assert ended_alike(folder, undisturbed)


@pytest.mark.parametrize("by", [int(signal.SIGSTOP), "sleep"], ids=["stopped", "asleep"])
def test_a_host_that_is_stuck_is_named_and_the_run_goes_on(tmp_path: Path, nursery, undisturbed: Path, by: int | str):
    folder, said, stuck = tmp_path / "run", [], tmp_path / "run" / "stuck.txt"
    named = "host 1 shows no sign of life" if by != "sleep" else "host 1 is behind"

    class UntilNamed:  # on a busy machine something else may seem stuck before it is
        hosts = nursery.hosts

        def start(self, command: list[str]) -> "Gang":
            if stuck.exists() and named in stuck.read_text():
                return nursery.start(order(folder))
            hurt = {"host": 1, "phase": "evaluation", "by": by}
            return nursery.start(order(folder, settings={"survival": {"stuck_seconds": 4}}, hurt=hurt))

        def finish(self) -> None: ...

    assert supervise(UntilNamed(), [], Restarts(failures=2, preemptions=9), say=said.append) == 0, said
    told = stuck.read_text()
    assert named in told
    assert "Thread 0x" in told and ("on_step" in told if by == "sleep" else True)
    assert ended_alike(folder, undisturbed)


@pytest.mark.parametrize("phase", ["start", "save"])
def test_nobody_waits_for_a_host_that_is_dead(tmp_path: Path, nursery, phase: str):
    gang = nursery.start(order(tmp_path / "run", hurt={"host": 1, "phase": phase, "by": int(signal.SIGKILL)}))
    assert gang.wait() == [1, -signal.SIGKILL], gang.said(0)
    # JAX by itself notices after 45 s, or when both compute something together, and names nobody.
    assert "Stopped: host 1 is gone" in gang.said(0)


def test_nobody_waits_for_the_first_host_that_is_dead(tmp_path: Path, nursery):
    gang = nursery.start(order(tmp_path / "run", hurt={"host": 0, "phase": "step", "by": int(signal.SIGKILL)}))
    first, second = gang.wait()
    assert first == -signal.SIGKILL and second != 0, gang.said(1)
    # Who hears of it first says so, a thread of ours or one of JAX's, which aborts the process.
    told = ("host 0 is gone\n", "JAX distributed service detected fatal errors")
    assert any(words in gang.said(1) for words in told), gang.said(1)


def test_saves_and_the_programs_of_all_hosts_do_not_wait_for_each_other(tmp_path: Path, nursery, undisturbed: Path):
    # After each step a validation and a save, beside which the next step begins.
    folder, often = tmp_path / "run", {"every_steps": 1, "keep_every": 1}
    gang = nursery.start(order(folder, settings={"validate_every": 1, "checkpoint": often}))
    assert gang.wait() == [0, 0], (gang.said(0), gang.said(1))
    assert CheckpointStore(folder / "checkpoints").steps() == list(range(1, STEPS + 1))
    assert gangs.saved_alike(folder, undisturbed, STEPS)


@pytest.mark.parametrize("host", [0, 1])
def test_a_save_that_fails_on_one_host_ends_the_run_at_once(tmp_path: Path, nursery, undisturbed: Path, host: int):
    folder, seldom = tmp_path / "run", {"settings": {"checkpoint": {"every_steps": STEPS // 2}}}
    gang = nursery.start(order(folder, hurt={"host": host, "phase": "save", "by": "refusal"}, **seldom))
    ended = gang.wait()
    assert ended[host] == 1 and ended[1 - host] != 0, (gang.said(0), gang.said(1))
    assert "No space left on device" in gang.said(host)
    assert max(gangs.steps_of(folder, host)) < STEPS and gangs.newest(folder) == 0
    gang = nursery.start(order(folder, **seldom))
    assert gang.wait() == [0, 0], (gang.said(0), gang.said(1))
    assert ended_alike(folder, undisturbed)


def test_one_process_with_all_devices_makes_the_same_bits(tmp_path: Path, undisturbed: Path):
    folder = tmp_path / "run"
    with gangs.Nursery(tmp_path / "cache", hosts=1) as alone:
        assert supervise(alone, order(folder), Restarts(failures=0), say=lambda line: None) == 0
    assert ended_alike(folder, undisturbed)


def test_a_run_goes_on_with_another_number_of_hosts(tmp_path: Path, nursery, undisturbed: Path):
    folder = tmp_path / "run"
    gang = nursery.start(order(folder, hurt={"host": 0, "phase": "evaluation", "by": "sleep"}))
    try:
        while not gangs.newest(folder):
            assert not gang.ended(0.01), gang.said(0)
    finally:
        gang.end()
    assert gangs.newest(folder) < STEPS
    with gangs.Nursery(tmp_path / "cache", hosts=1) as alone:
        assert supervise(alone, order(folder), Restarts(failures=0), say=lambda line: None) == 0
    assert ended_alike(folder, undisturbed)


class Shrinking:
    """A launcher of two hosts: one is lost after some steps, and there again when the other has made some more.

    Steps are slow until then: whoever looks at them may be late.
    """

    PAUSES = (0.1, 0.5)  # seconds before each batch, of the first start and of the second

    def __init__(self, nursery: gangs.Nursery, folder: Path) -> None:
        self.hosts, self.folder, self.starts, self._nursery = 2, folder, [], copy.copy(nursery)

    def start(self, command: list[str]) -> Gang:
        self.hosts = self._nursery.hosts = 1 if len(self.starts) == 1 else 2
        pauses = self.PAUSES[len(self.starts) :]
        slow = {"pause": pauses[0]} if pauses else {}
        self.starts.append(self.hosts)
        gang = self._nursery.start([json.dumps({**json.loads(command[0]), **slow})])
        if len(self.starts) == 1:
            while len(gangs.steps_of(self.folder)) <= EVERY:
                assert not gang.ended(0.01), gang.said(0)
            gang.kill(1)
        return gang

    def has_room(self) -> bool:
        return self.hosts == 1 and len(gangs.steps_of(self.folder)) > 3

    def finish(self) -> None: ...


def test_a_mesh_shrinks_with_its_hosts_and_grows_with_them_and_the_batches_are_the_same(
    tmp_path: Path, nursery, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules["affinage.launch.supervise"], "_ROOM_EVERY", 0.1)
    monkeypatch.setattr(sys.modules["affinage.launch.supervise"], "_LOOK_EVERY", 0.1)
    launcher, said = Shrinking(nursery, tmp_path / "run"), []
    of_each = order(launcher.folder, mesh={"data": "auto"}, devices=2)
    assert supervise(launcher, of_each, Restarts(failures=1, preemptions=0), say=said.append) == 0, said
    assert launcher.starts == [2, 1, 2] and "room for more hosts" in said[-1]
    assert gangs.steps_of(launcher.folder, 1)[-1] == STEPS
    # Batches are of noise: another one has another loss. Other sums of the same differ in the last digits.
    for one, other in zip(losses(launcher.folder), losses(undisturbed), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in MetricsLog(folder / "metrics.jsonl", STEPS).training()]


def test_hosts_of_this_machine_listen_on_loopback_alone(tmp_path: Path, nursery):
    assert _listened_on(nursery, tmp_path / "run") == {"127.0.0.1"}


def test_hosts_that_are_given_an_address_listen_on_it_alone(tmp_path: Path, nursery):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no address but that of the loopback")
        mine = probe.getsockname()[0]
    assert _listened_on(nursery, tmp_path / "run", at=mine) == {mine}


def _listened_on(nursery: "gangs.Nursery", folder: Path, **more: object) -> set[str]:
    """The addresses that the hosts of a run listen on; nothing of it is left afterwards."""
    gang = nursery.start(order(folder, hurt={"host": 0, "phase": "step", "by": "sleep"}, **more))
    try:
        while not gangs.steps_of(folder):
            assert not gang.ended(0.01), gang.said(0)
        return {address for pid in gang.pids for address in _listening(pid)}
    finally:
        gang.end()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in gang.pids)


def _listening(pid: int) -> set[str]:
    """The addresses that a process listens on, from Linux's tables."""
    files, found = set(), set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed again
            files.add(os.readlink(link))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state != "0A" or f"socket:[{rest[5]}]" not in files:
                continue
            words = bytes.fromhex(local.partition(":")[0])
            address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
            listened = ipaddress.ip_address(address)
            found.add(str(getattr(listened, "ipv4_mapped", None) or listened))
    return found

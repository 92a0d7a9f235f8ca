"""Clusters of Ray that were there before: which are joined, and what a run does when their machines go and come."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Machines:
    """See `ray_machines.py`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_machines.py")],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, *words: str, **options: object) -> subprocess.Popen[str]:
        """Python with these words, told of nothing but the cluster."""
        return subprocess.Popen([sys.executable, *words], env=self.environment, text=True, **options)  # type: ignore[call-overload]

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        assert self.answer() == what


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = Machines({**environment, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    assert found.address
    yield found
    found.process.communicate(timeout=300)


JOINS = """
import os, sys
from affinage.errors import UserError
from affinage.hardware import ray_cluster

def join(**options):
    words = {"asked_by": "--on ray", "address_by": "--address", "open_by": "--open-cluster"}
    ray_cluster.connect(sys.argv[1], None, **words, **options).shutdown()

join()
print("joined", flush=True)
ray_cluster._on_loopback = lambda ray: False  # as if its machines had addresses of a network
try:
    join()
except UserError as error:
    print(error, flush=True)
join(may_be_open=True)
"""


def test_a_cluster_that_asks_for_no_token_is_refused_unless_only_this_machine_reaches_it(machines: Machines):
    # This side has a token, as one may who has set it everywhere but where the cluster was started.
    ours = {**machines.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    words = [sys.executable, "-c", JOINS, machines.address]
    done = subprocess.run(words, env=ours, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    joined, refused = done.stdout.splitlines()[:2]
    assert joined == "joined"
    assert "it asks for no token" in refused and "--open-cluster" in done.stdout
    assert done.stderr.count("Warning: whoever reaches the ports of the Ray cluster") == 1


DRIVES = """
import sys
from affinage.launch import Restarts, supervise
from affinage.launch.ray import RayLauncher

sys.modules["affinage.launch.supervise"]._ROOM_EVERY = 0.5
address, program, folder = sys.argv[1:]
launcher = RayLauncher(2, address=address, least=1, devices=1, program=[program], modules=())
sys.exit(supervise(launcher, ["wait", folder], Restarts(preemptions=1, failures=0)))
"""


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_fewer_hosts_while_a_machine_is_away_and_all_of_them_when_it_is_back(machines: Machines, tmp_path: Path):
    begun, log = [tmp_path / f"process-{host}" for host in range(2)], tmp_path / "driver.log"
    for _ in range(2):
        machines.ask("come")
    with log.open("w") as out:
        words = ["-c", DRIVES, machines.address, str(HERE / "fake_host.py"), str(tmp_path)]
        driver = machines.run(*words, stdout=out, stderr=out)

        def come(hosts: int) -> bool:
            assert driver.poll() is None, log.read_text()
            return f"host 0 of {hosts}" in log.read_text() and all(file.exists() for file in begun[:hosts])

        try:
            until(lambda: come(2))
            for file in begun:
                file.unlink()
            machines.ask("go")
            until(lambda: come(1))
            assert "1 of 2 hosts are there" in log.read_text() and not begun[1].exists()
            begun[0].unlink()
            machines.ask("come")
            until(lambda: all(file.exists() for file in begun))
            driver.terminate()
            assert driver.wait(300) == 75
        finally:
            driver.kill()
            driver.wait()
    said = [line for line in log.read_text().splitlines() if line.startswith("launch: ")]
    assert len(said) == 3 and "1 of 1 preemptions" in said[0], said  # what gives way to more of them is none
    assert "there is room for more hosts" in said[2]

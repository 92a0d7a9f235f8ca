"""Kill what runs a training on a Ray cluster of three nodes on this machine, and see what comes of it.

    python benchmarks/chaos_ray.py [--quick] [--each 10] [--injuries worker host raylet driver]

A head node and two nodes of one host each. In turn: kill -9 of the Ray worker that started a host; kill -9 of the
host's own process; SIGTERM to a raylet, after which its node is started again; kill -9 of the driver,
`affinage.launch.supervise`, which is started again. The training, two processes with two devices each, must come to its
end by itself, with the curve and the final state of an undisturbed one, bit for bit, and nothing may be left running.
The seconds are those until the first step of the next start: the hosts that are told to stop first make and save the
one they are at. In those of a raylet Ray starts a new node, which is told of beside them.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
HOST = Path(__file__).parent.parent / "tests" / "launch" / "one_host.py"

from chaos import STEPS, order, same  # noqa: E402

from affinage.launch import Restarts, supervise  # noqa: E402
from affinage.launch.ray import RayLauncher  # noqa: E402

INJURIES = ("worker", "host", "raylet", "driver")
PATIENCE = 300  # seconds for a run to end


def drive(address: str, folder: Path) -> int:
    """The driver: a process of its own, so that it can be killed."""
    launcher = RayLauncher(2, address=address, devices=2, program=[str(HOST)])
    return supervise(launcher, order(folder), Restarts())


class Run:
    """A training under way: its driver, and the processes that it has on this machine."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.start_driver()

    def start_driver(self) -> None:
        command = [sys.executable, __file__, "--drive", self.cluster.address, str(self.folder)]
        self.log = self.folder.with_suffix(".log").open("a")
        self.driver = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def steps(self) -> int:
        """Steps that were written down."""
        file = self.folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def processes(self) -> list[int]:
        """Those of the hosts, and those from which these are forked."""
        commands = {process: _command(process) for process in _processes()}
        return [each for each, words in commands.items() if str(self.folder) in words and HOST.name in words]

    def hosts(self) -> list[int]:
        """The processes of the hosts."""
        found = self.processes()
        return [process for process in found if _parent(process) in found]

    def wait_until_after(self, step: int) -> None:
        """Until that many steps and one more were written down, or the run has ended."""
        _until(lambda: self.steps() > min(step, STEPS - 6) or self.driver.poll() is not None)

    def wait_for_the_end_of(self, hosts: set[int]) -> None:
        """Until none of these processes runs, or the run has ended."""
        _until(lambda: not hosts & set(self.hosts()) or self.driver.poll() is not None)

    def wait_for_the_end(self) -> int | None:
        """How the driver ended; what it has started is given a minute more."""
        _until(lambda: self.driver.poll() is not None)
        _until(lambda: not self.processes(), 60)
        return self.driver.returncode

    def hurt(self, what: str, draw: random.Random) -> float:
        """The seconds in which Ray, which starts it, had a new node in place of the lost one; 0 where none was lost."""
        if what == "driver":
            self.driver.kill()
            self.driver.wait()
            self.start_driver()
            return 0.0
        hosts = self.hosts()
        if what == "host" and hosts:
            os.kill(draw.choice(hosts), signal.SIGKILL)
        elif what == "worker":
            os.kill(draw.choice(_agents()), signal.SIGKILL)
        elif what == "raylet":
            node = draw.choice(sorted(self.cluster.worker_nodes, key=lambda node: node.node_id))
            (raylet,) = node.all_processes["raylet"]
            raylet.process.terminate()
            raylet.process.wait()
            self.cluster.remove_node(node, allow_graceful=False)
            began = time.monotonic()
            self.cluster.add_node(num_cpus=1)
            return time.monotonic() - began
        return 0.0


def injured(cluster: Any, folder: Path, undisturbed: Path, what: str, each: int) -> dict[str, float]:
    """A run is hurt `each` times, each time when it has made some steps again, then comes to its end."""
    draw = random.Random(what)
    done = wrong = stranded = left = number = 0
    back: list[float] = []
    nodes: list[float] = []
    while done < each:
        run = Run(cluster, folder / f"{what}-{number}")
        for _ in range(min(5, each - done)):
            run.wait_until_after(run.steps() + draw.randrange(8))
            hurt, began = set(run.hosts()), time.monotonic()
            nodes.append(run.hurt(what, draw))
            done += 1
            run.wait_for_the_end_of(hurt)
            run.wait_until_after(run.steps())
            back.append(time.monotonic() - began)
        status = run.wait_for_the_end()
        stranded += status != 0
        wrong += status == 0 and not _same(run.folder, undisturbed)
        left += len(run.processes())
        number += 1
        print(f"{what}: {done} of {each}, stranded {stranded}, other bits {wrong}, left running {left}", flush=True)
        print(f"{what}: seconds", *(round(seconds, 1) for seconds in back), flush=True)
        if any(nodes):
            print(f"{what}: of Ray's for a node", *(round(seconds, 1) for seconds in nodes), flush=True)
    own = [seconds - node for seconds, node in zip(back, nodes, strict=True)]
    of_ray = {
        f"{what}: seconds of these for Ray to start a node, median": round(statistics.median(nodes), 1),
        f"{what}: seconds without these, most": round(max(own), 1),
    }
    return {
        f"{what}: times": done,
        f"{what}: runs that did not come to their end": stranded,
        f"{what}: runs that ended with other bits": wrong,
        f"{what}: processes left running": left,
        f"{what}: seconds until a new step, median": round(statistics.median(back), 1),
        f"{what}: seconds until a new step, most": round(max(back), 1),
        **(of_ray if any(nodes) else {}),
    }


def _same(one: Path, other: Path) -> bool:
    """See `chaos.same`. What JAX sets in the environment is taken back, or a later node would differ from the first.

    A host imports anew where its environment is another one, in which nothing is that was imported before.
    """
    before = dict(os.environ)
    try:
        return same(one, other)
    finally:
        os.environ.clear()
        os.environ |= before


def _until(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _agents() -> list[int]:
    """Ray's workers that watch over a host each."""
    return sorted(process for process in _processes() if _command(process).startswith("ray::Agent"))


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each injury once")
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--injuries", nargs="+", choices=INJURIES, default=INJURIES)
    parser.add_argument("--drive", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        sys.exit(drive(arguments.drive[0], Path(arguments.drive[1])))
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on the loopback address alone: it asks for no token
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="affinage-chaos-ray-"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    figures: dict[str, float] = {}
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        undisturbed = Run(cluster, folder / "undisturbed")
        if undisturbed.wait_for_the_end() != 0:
            raise SystemExit((folder / "undisturbed.log").read_text())
        for what in arguments.injuries:
            figures |= injured(cluster, folder, undisturbed.folder, what, 1 if arguments.quick else arguments.each)
    finally:
        cluster.shutdown()
    shutil.rmtree(folder)
    results = [
        {"name": name, "ours": value, "peer": None, "unit": "", "ratio": None} for name, value in figures.items()
    ]
    print(json.dumps({"benchmark": "chaos_ray", "results": results}))


if __name__ == "__main__":
    main()

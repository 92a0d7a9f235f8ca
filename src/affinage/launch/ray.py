"""Hosts that are machines of a Ray cluster."""

import contextlib
import hashlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import affinage
from affinage.errors import EXIT_PREEMPTED, UserError
from affinage.hardware.hosts import COORDINATOR, HOST, HOSTS
from affinage.hardware.ray_cluster import connect
from affinage.launch.gang import Ending
from affinage.launch.process import HostProcess, Say, of_cpu, reserved_port, status_of_shell
from affinage.launch.remains import Remains

_PLACES = 120.0  # seconds until the cluster must have room for all hosts
_ANSWERS = 30.0  # seconds for an agent to start a process, or to kill it
_NEWS = 0.5  # seconds that an agent waits for something to tell
_ACCELERATORS = ("TPU", "GPU")


class RayLauncher:
    """One host for each machine of a Ray cluster that has what a host needs; a small actor on each starts its process.

    The process is none of Ray's: when Ray takes the actor away, with its machine or with this driver, the process gets
    SIGTERM and saves, the others with it. What it left is ended before the next start.

    Args:
        hosts: how many.
        address: of a running cluster (`auto`, `HOST:6379`); "" starts one on this machine, on the loopback address.
        least: start with so few hosts if the cluster has no more at that moment; None: wait for all.
        devices: of each host, played by its CPU; None: what JAX finds, all accelerators of a machine for one host.
        files: path here -> content, put on every host where the path does not hold the same; words of the command that
            are such a path are replaced by where the file is there.
        program: what the command is given to; default: affinage, with the Python of the machine's Ray.
        say: takes the lines that the hosts write, each with the number of its host before it.

    Raises:
        UserError: Ray is not installed, or the cluster does not answer.
    """

    def __init__(
        self,
        hosts: int,
        *,
        address: str = "",
        least: int | None = None,
        devices: int | None = None,
        files: Mapping[str, bytes] | None = None,
        program: Sequence[str] = (),
        say: Say = print,
    ) -> None:
        self.hosts, self._wanted, self._least = hosts, hosts, hosts if least is None else least
        self._devices, self._files, self._say = devices, dict(files or {}), say
        self._program = list(program)
        cpus = max(hosts, os.cpu_count() or 1)
        self._ray = connect(address, cpus, asked_by="--on ray", address_by="--address")

    def start(self, command: Sequence[str]) -> "RayGang":
        """See `affinage.launch.gang.Launcher`. As many hosts as there is room for, if fewer than all are enough."""
        machines = [node for node in self._ray.nodes() if node["Alive"]]
        chips = _chips(machines) if self._devices is None else {}
        if self._least < self._wanted:
            able = sum(1 for node in machines if all(node["Resources"].get(k, 0) >= n for k, n in chips.items()))
            self.hosts = max(self._least, min(self._wanted, able))
            if self.hosts < self._wanted:
                self._say(f"launch: {self.hosts} of {self._wanted} hosts are there")
        job = _Job([*self._program], list(command), of_cpu(self._devices), self._files)
        return RayGang(self._ray, job, self.hosts, chips, self._say)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()


class RayGang:
    """See `affinage.launch.gang.Gang`."""

    def __init__(
        self,
        ray: Any,
        job: "_Job",
        hosts: int,
        chips: Mapping[str, float],
        say: Say,
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._say = ray, say
        self._agents: list[Any] = []
        self._news: dict[Any, int] = {}
        bundle = {"CPU": 1.0, **chips}
        self._room = placement_group([bundle] * hosts, strategy="SPREAD")
        try:
            if not self._room.wait(_PLACES):
                raise UserError(
                    f"the cluster has no room for {hosts} hosts, each with {_in_words(bundle)}",
                    where=f"--hosts {hosts}",
                    fix="`ray status` shows what it has; --at-least N starts with fewer.",
                )
            kind = ray.remote(_Agent)
            # What runs the same command belongs together, also when another driver starts it.
            group, start = hashlib.sha256("\0".join(job.command).encode()).hexdigest()[:16], secrets.token_hex(8)
            for host in range(hosts):
                placed = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=host)
                agent = kind.options(
                    num_cpus=1,
                    num_gpus=chips.get("GPU", 0),
                    resources={name: count for name, count in chips.items() if name != "GPU"},
                    scheduling_strategy=placed,
                    max_concurrency=4,
                )
                self._agents.append(agent.remote(group, start, host))
            coordinator = ray.get(self._agents[0].coordinator.remote(), timeout=_ANSWERS)
            self._where = ray.get([agent.where.remote() for agent in self._agents], timeout=_ANSWERS)
            place = {COORDINATOR: coordinator, HOSTS: str(hosts)}
            starts = [agent.start.remote(job, place) for agent in self._agents]
            ray.get(starts, timeout=_ANSWERS + Remains.PATIENCE)
        except ray.exceptions.RayTaskError as error:
            self.end()
            raise error.cause from error  # what went wrong there, as if it had been here
        except BaseException:
            self.end()
            raise
        self._news = {agent.news.remote(): host for host, agent in enumerate(self._agents)}

    def ended(self, seconds: float) -> list[Ending]:
        """See `affinage.launch.gang.Gang`."""
        until = time.monotonic() + seconds
        found: list[Ending] = []
        while not found and self._news:
            ready, _ = self._ray.wait(list(self._news), timeout=max(0.0, until - time.monotonic()))
            for answer in ready:
                found += self._heard(self._news.pop(answer), answer)
            if time.monotonic() >= until:
                break
        return found

    def _heard(self, host: int, answer: Any) -> list[Ending]:
        try:
            lines, status = self._ray.get(answer)
        except self._ray.exceptions.RayError:
            # The agent is gone, with its worker or its raylet: the process was told so. If it is gone, too, the others
            # notice, and end.
            return [Ending(host, EXIT_PREEMPTED, self._where[host], out_of_sight=True)]
        for line in lines:
            self._say(f"{host} | {line}")
        if status is not None:
            return [Ending(host, status_of_shell(status), self._where[host])]
        self._news[self._agents[host].news.remote()] = host
        return []

    def tell(self, number: signal.Signals) -> None:
        """See `affinage.launch.gang.Gang`."""
        self._ask("tell", int(number))

    def end(self) -> None:
        """See `affinage.launch.gang.Gang`."""
        from ray.util.placement_group import remove_placement_group

        self._ask("end")
        for agent in self._agents:
            self._ray.kill(agent)
        with contextlib.suppress(self._ray.exceptions.RayError):
            remove_placement_group(self._room)
        self._agents, self._news = [], {}

    def _ask(self, method: str, *words: Any) -> None:
        """Call all agents; those that are gone, or do not answer, do not matter."""
        asked = [getattr(agent, method).remote(*words) for agent in self._agents]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=_ANSWERS)


class _Job(NamedTuple):
    """What a host runs."""

    program: list[str]
    command: list[str]
    environment: dict[str, str]
    files: dict[str, bytes]


class _Agent:
    """On a machine of the cluster: starts a host's process, tells what it writes and how it ends."""

    def __init__(self, group: str, start: str, host: int) -> None:
        self._group, self._start, self._host = group, start, host
        self._process: HostProcess | None = None
        self._held: Any = None

    def where(self) -> str:
        import ray.util

        return str(ray.util.get_node_ip_address())

    def coordinator(self) -> str:
        self._held, address = reserved_port(self.where())
        return address

    def start(self, job: _Job, place: dict[str, str]) -> None:
        remains = Remains(self._group, self._start)
        remains.end()
        at = _put(job.files, remains.folder / "files")
        words = [at.get(word, word) for word in job.command]
        # The code that is here, which may be the one that Ray brought.
        code = str(Path(affinage.__file__).parents[1])
        environment = {
            **os.environ,
            **job.environment,
            **place,
            HOST: str(self._host),
            "PYTHONPATH": os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")])),
        }
        # Ray kills the children of a worker that it ends; the keeper is the child.
        keeper = [sys.executable, "-m", "affinage.launch.keeper", self._group, self._start]
        program = job.program or [sys.executable, "-m", "affinage"]
        self._process = HostProcess([*keeper, *program, *words], environment)

    def news(self) -> tuple[list[str], int | None]:
        assert self._process is not None
        return self._process.news(_NEWS)

    def tell(self, number: int) -> None:
        if self._process is not None:
            self._process.tell(signal.Signals(number))

    def end(self) -> None:
        if self._process is not None:
            self._process.end()
        if self._held is not None:
            self._held.close()


def _put(files: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Where each file is on this machine: at its own path if that holds the same, else below `folder`."""
    found = {}
    for path, content in files.items():
        own = Path(path)
        if own.is_file() and own.read_bytes() == content:
            found[path] = path
            continue
        put = folder / own.relative_to(own.anchor)
        put.parent.mkdir(parents=True, exist_ok=True)
        put.write_bytes(content)
        found[path] = str(put)
    return found


def _chips(machines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a host needs of accelerators: all of a machine's, where every machine that has some has as many."""
    for kind in _ACCELERATORS:
        counts = {node["Resources"][kind] for node in machines if node["Resources"].get(kind)}
        if len(counts) > 1:
            raise UserError(
                f"the machines of the cluster have different numbers of {kind}s: {sorted(map(int, counts))}",
                fix="All hosts of a run need as many devices: start Ray with the same --resources on each.",
            )
        if counts:
            return {kind: counts.pop()}
    return {}


def _in_words(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {kind}" for kind, count in bundle.items())

"""Hosts that are machines of a Ray cluster."""

import contextlib
import hashlib
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from affinage.errors import EXIT_PREEMPTED, UserError
from affinage.hardware.hosts import COORDINATOR, HOSTS
from affinage.hardware.missed import Missed, missed_by
from affinage.hardware.ray_cluster import connect
from affinage.launch.forked import OF_A_HOST
from affinage.launch.gang import Ending
from affinage.launch.process import Say, of_cpu, status_of_shell
from affinage.launch.ray_agent import Agent, Job
from affinage.launch.remains import Remains

_PLACES = 120.0  # seconds until the cluster must have room for all hosts
_SETTLES = 10.0  # seconds for what is ending on the machines
_LASTING = 30.0  # seconds in which another agent, be it another driver's, finds what was imported for one
_LOOK_EVERY = 0.05  # seconds
_ACCELERATORS = ("TPU", "GPU")

_Imports = tuple[dict[str, str], tuple[str, ...]]  # the variables that they are made with, and the modules


class RayLauncher:
    """One host for each machine of a Ray cluster that has what a host needs; a small actor on each starts its process.

    The process is none of Ray's: when Ray takes the actor away, with its machine or with this driver, the process gets
    SIGTERM and saves, the others with it. What it left is ended before the next start. The actors stay from one start
    to the next; one that was killed is started anew while the hosts save. What was imported for them outlives actors
    and driver for a while.

    Args:
        hosts: how many.
        address: of a running cluster (`auto`, `HOST:6379`); "" starts one on this machine, on the loopback address.
        open_cluster: join also one that others can reach, and that asks for no token.
        least: start with so few hosts if the cluster has no more at that moment, and with more when it has; None: wait
            for all.
        devices: of each host, played by its CPU; None: what JAX finds, all accelerators of a machine for one host.
        files: path here -> content, put on every host where the path does not hold the same; words of the command that
            are such a path are replaced by where the file is there.
        program: words that the Python of the machine's Ray is given before the command's; default: -m affinage.
        modules: imported once on each machine, for all starts that come soon enough.
        answers: seconds for an agent to start a process, or to kill it.
        say: takes the lines that the hosts write, each with the number of its host before it.

    Raises:
        UserError: Ray is not installed, or the cluster does not answer, or is open to all.
    """

    def __init__(
        self,
        hosts: int,
        *,
        address: str = "",
        open_cluster: bool = False,
        least: int | None = None,
        devices: int | None = None,
        files: Mapping[str, bytes] | None = None,
        program: Sequence[str] = (),
        modules: Sequence[str] = OF_A_HOST,
        answers: float = 30.0,
        say: Say = print,
    ) -> None:
        self.hosts, self._wanted, self._least = hosts, hosts, hosts if least is None else least
        self._devices, self._files, self._say = devices, dict(files or {}), say
        self._program, self._imports = list(program), (of_cpu(devices), tuple(modules))
        self._room: _Room | None = None
        self._answers = answers
        cpus = max(hosts, os.cpu_count() or 1)
        self._ray = connect(
            address,
            cpus,
            asked_by="--on ray",
            address_by="--address",
            open_by="--open-cluster",
            may_be_open=open_cluster,
        )

    def start(self, command: Sequence[str]) -> "RayGang":
        """See `affinage.launch.gang.Launcher`. As many hosts as there is room for, if fewer than all are enough."""
        bundle = self._bundle()
        if self._least < self._wanted:
            self.hosts = max(self._least, min(self._wanted, self._settled(bundle)))
            if self.hosts < self._wanted:
                self._say(f"launch: {self.hosts} of {self._wanted} hosts are there")
        job = Job(self._program, list(command), self._files)
        # What runs the same command belongs together, also when another driver starts it.
        group = hashlib.sha256("\0".join(job.command).encode()).hexdigest()[:16]
        if self._room is not None and not self._room.serves(group, self.hosts, bundle):
            self._room.leave(for_good=False)
            self._room = None
        try:
            self._room = self._room or _Room(self._ray, group, self.hosts, bundle, self._imports, self._answers)
            return RayGang(self._ray, self._room.agents, job, self._say, self._answers)
        except self._ray.exceptions.RayTaskError as error:
            self.finish()
            raise error.cause from error  # what went wrong there, as if it had been here
        except BaseException:
            self.finish()
            raise

    def has_room(self) -> bool:
        """See `affinage.launch.gang.Elastic`."""
        if self.hosts >= self._wanted:
            return False
        try:
            return self._free(self._bundle()) > self.hosts
        except Exception:  # out of reach, or a machine unlike the others has come: no reason to end what runs
            return False

    def _bundle(self) -> dict[str, float]:
        """What a host takes of a machine."""
        chips = _chips(self._alive()) if self._devices is None else {}
        return {"CPU": 1.0, **chips}

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _settled(self, bundle: Mapping[str, float]) -> int:
        """Machines for a host, once what ends on them has ended: the actors of a driver that was killed, say."""
        able = sum(_has(node["Resources"], bundle) for node in self._alive())
        until = time.monotonic() + _SETTLES
        while (free := self._free(bundle)) < min(able, self._wanted) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        return free

    def _free(self, bundle: Mapping[str, float]) -> int:
        """Machines that have what a host takes, and that nobody else computes on."""
        from ray._private.state import available_resources_per_node

        left, ours = available_resources_per_node(), set(self._room.machines() if self._room else ())
        alive = {node["NodeID"] for node in self._alive()}
        return sum(node in ours or _has(left.get(node, {}), bundle) for node in alive)

    def finish(self) -> None:
        """See `affinage.launch.gang.Launcher`."""
        if self._room is not None:
            self._room.leave(for_good=True)
            self._room = None

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self.finish()
        self._ray.shutdown()


class _Room:
    """Places on machines of the cluster, with an agent on each; kept from one start to the next."""

    def __init__(
        self, ray: Any, group: str, hosts: int, bundle: Mapping[str, float], imports: _Imports, answers: float
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._asked_for, self._seconds = ray, (group, hosts, bundle), answers
        self.agents: list[Any] = []
        self._places = placement_group([dict(bundle)] * hosts, strategy="SPREAD")
        try:
            if not self._places.wait(_PLACES):
                raise UserError(
                    f"the cluster has no room for {hosts} hosts, each with {_in_words(bundle)}",
                    where=f"--hosts {hosts}",
                    fix="`ray status` shows what it has; --at-least N starts with fewer.",
                )
            kind = ray.remote(Agent)
            for host in range(hosts):
                placed = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=host)
                agent = kind.options(
                    num_cpus=1,
                    num_gpus=bundle.get("GPU", 0),
                    resources={name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
                    scheduling_strategy=placed,
                    max_concurrency=4,
                    max_restarts=-1,
                )
                self.agents.append(agent.remote(group, host, *imports, _LASTING))
        except BaseException:
            self.leave(for_good=True)
            raise

    def serves(self, group: str, hosts: int, bundle: Mapping[str, float]) -> bool:
        """Whether a start can have it: its machines are there, and an agent on each, if need be a new one."""
        if (group, hosts, bundle) != self._asked_for:
            return False
        if len(self._reachable()) < hosts:
            return False
        until = time.monotonic() + self._seconds
        return all(self._answers(agent, until) for agent in self.agents)

    def _answers(self, agent: Any, until: float) -> bool:
        while time.monotonic() < until:
            try:
                self._ray.get(agent.where.remote(), timeout=max(0.1, until - time.monotonic()))
            except self._ray.exceptions.ActorUnavailableError:  # Ray starts it anew
                time.sleep(_LOOK_EVERY)
            except self._ray.exceptions.RayError:
                return False
            else:
                return True
        return False

    def machines(self) -> list[str]:
        """Ray's names of the machines, by host."""
        from ray.util.placement_group import placement_group_table

        at = placement_group_table(self._places)["bundles_to_node_id"]
        return [at.get(host, "") for host in range(len(self.agents))]

    def _reachable(self) -> list[Any]:
        """The agents whose machines are there."""
        there = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return [agent for agent, machine in zip(self.agents, self.machines(), strict=True) if machine in there]

    def leave(self, *, for_good: bool) -> None:
        """Give it back, with all that runs there; what is out of reach is told so by the end of its agent.

        Not for good: other agents may find on the machines what was imported there.
        """
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(self._ray.exceptions.RayError):
            asked = [agent.finish.remote() for agent in self._reachable()] if for_good else []
            if asked:
                self._ray.wait(asked, num_returns=len(asked), timeout=self._seconds)
        for agent in self.agents:
            self._ray.kill(agent)
        with contextlib.suppress(self._ray.exceptions.RayError):
            remove_placement_group(self._places)
        self.agents = []


class RayGang:
    """See `affinage.launch.gang.Gang`."""

    def __init__(self, ray: Any, agents: Sequence[Any], job: Job, say: Say, answers: float) -> None:
        self._ray, self._agents, self._say, self._seconds = ray, list(agents), say, answers
        self._seen = set(range(len(self._agents)))  # hosts whose agent has answered ever since
        self._news: dict[Any, int] = {}
        self._missed: dict[int, Missed] = {}
        try:
            coordinator = ray.get(self._agents[0].coordinator.remote(), timeout=self._seconds)
            self._where = ray.get([agent.where.remote() for agent in self._agents], timeout=self._seconds)
            place = {COORDINATOR: coordinator, HOSTS: str(len(self._agents))}
            start = secrets.token_hex(8)
            starts = [agent.start.remote(start, job, place) for agent in self._agents]
            ray.get(starts, timeout=self._seconds + Remains.PATIENCE)
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
            # notice, and end. Ray starts another agent, which knows nothing of it.
            self._seen.discard(host)
            return [Ending(host, EXIT_PREEMPTED, self._where[host], out_of_sight=True)]
        for line in lines:
            self._say(f"{host} | {line}")
            if (missed := missed_by(line)) is not None:
                self._missed[host] = missed
        if status is not None:
            return [Ending(host, status_of_shell(status), self._where[host], missed=self._missed.get(host))]
        self._news[self._agents[host].news.remote()] = host
        return []

    def tell(self, number: signal.Signals) -> None:
        """See `affinage.launch.gang.Gang`."""
        self._ask("tell", int(number))

    def end(self) -> None:
        """See `affinage.launch.gang.Gang`."""
        self._ask("end")
        self._news = {}

    def _ask(self, method: str, *words: Any) -> None:
        """Call all agents that were not lost; those that do not answer do not matter."""
        asked = [getattr(self._agents[host], method).remote(*words) for host in sorted(self._seen)]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=self._seconds)


def _has(resources: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(resources.get(kind, 0) >= count for kind, count in bundle.items())


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

"""Workers on the machines of a Ray cluster: an actor on each machine starts a process there and returns its output."""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import affinage
from affinage.cluster.launch import Print, WorkerGroup, WorkerProcess, cpu_devices, reserved_port
from affinage.cluster.processes import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from affinage.cluster.ray_cluster import connect
from affinage.errors import UserError

_TO_PLACE = 120.0  # seconds until the cluster must have room for the least number of workers ...
_TO_SETTLE = 10.0  # ... and for a larger number, before fewer are tried
_TO_ANSWER = 120.0  # seconds for an actor, of which the first has to import
_TO_KILL = 20.0  # seconds
_NEWS_EVERY = 0.5  # seconds


class RayLauncher:
    """Starts `workers` on the machines of a Ray cluster, one on each, or at least `min_workers` if it has fewer.

    For `address` see `connect`. Each has `devices`, played by its CPU, or all accelerators of its machine. `files`
    (path here -> content) are put on every machine that does not have the same, and words of the command that are such
    a path become the path there. `program` are the words that run a command; by default those of the machine's Python
    and the code that Ray has shipped. The process of a worker ends with its actor.
    """

    def __init__(
        self,
        workers: int,
        *,
        address: str = "",
        min_workers: int | None = None,
        devices: int | None = None,
        files: Mapping[str, bytes] | None = None,
        say: Print = print,
        program: Sequence[str] = (),
    ) -> None:
        self._most = workers
        self._least = workers if min_workers is None else min(min_workers, workers)
        self._devices, self._files, self._say = devices, dict(files or {}), say
        self._program = list(program) or [sys.executable, "-m", "affinage"]
        self._ray = connect(address, max(workers, os.cpu_count() or 1), where="--address")

    def start(self, command: Sequence[str]) -> WorkerGroup:
        """Start a command of `affinage` on as many machines as have room. Raises UserError where there are too few."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # A worker takes all accelerators of a machine, of which every machine has as many.
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        bundle = {"CPU": 1.0}
        for kind in ("GPU", "TPU") if self._devices is None else ():
            if count := max(resources.get(kind, 0.0) for resources in machines):
                bundle[kind] = count
        strategy = "SPREAD" if self._devices else "STRICT_SPREAD"  # one's own machine may play several, to try it
        for workers in range(max(self._least, min(self._most, len(machines))), self._least - 1, -1):
            places = placement_group([bundle] * workers, strategy=strategy)
            if places.wait(_TO_PLACE if workers == self._least else _TO_SETTLE):
                break
            remove_placement_group(places)
        else:
            needs = ", ".join(f"{number:g} {kind}" for kind, number in bundle.items())
            what = f"the cluster has no room for {self._least} workers, each on a machine with {needs}"
            fix = "`ray status` shows what it has; --min-processes N starts with fewer."
            raise UserError(what, where=f"--processes {self._most}", fix=fix)
        if workers < self._most:
            self._say(f"launch: {workers} of {self._most} workers have a machine")
        options = {
            "num_cpus": 1.0,
            "num_gpus": bundle.get("GPU", 0.0),
            "resources": {kind: count for kind, count in bundle.items() if kind == "TPU"},
            "max_concurrency": 4,  # calls at the same time
        }
        actor = self._ray.remote(**options)(RemoteProcess)
        strategies = [PlacementGroupSchedulingStrategy(places, worker) for worker in range(workers)]
        actors = [actor.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        processes = [RayWorker(self._ray, actor) for actor in actors]
        group = WorkerGroup(processes, self._say, lambda: remove_placement_group(places))
        try:
            addresses = self._ray.get([actor.reserve_port.remote() for actor in actors], timeout=_TO_ANSWER)
            place = cpu_devices(self._devices) | {COORDINATOR: addresses[0], NUM_PROCESSES: str(workers)}
            starts = []
            for worker, (process, address) in enumerate(zip(processes, addresses, strict=True)):
                process.where = address.rpartition(":")[0]
                words, number = [*self._program, *command], {PROCESS_ID: str(worker)}
                starts.append(process.actor.start.remote(words, self._files, place | number))
            self._ray.get(starts, timeout=_TO_ANSWER)
        except BaseException:
            group.kill()
            raise
        return group

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()


class RayWorker:
    """See `affinage.cluster.launch.Worker`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self.actor, self.where = actor, ""
        self._ray, self._answer = ray, None  # to the last question for news

    def news(self) -> tuple[list[str], int | None]:
        self._answer = self._answer or self.actor.news.remote()
        if not self._ray.wait([self._answer], timeout=0)[0]:
            return [], None
        answer, self._answer = self._answer, None
        try:
            lines, status = self._ray.get(answer)
        except self._ray.exceptions.RayError:  # the actor is gone, and its process with it
            return [], -signal.SIGKILL
        return lines, status

    def send(self, number: signal.Signals) -> None:
        self.actor.send.remote(number)

    def kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self.actor.kill.remote(), timeout=_TO_KILL)
        self._ray.kill(self.actor)


class RemoteProcess(WorkerProcess):
    """The actor on a machine of the cluster, whose process is there after `start`."""

    def __init__(self) -> None: ...

    def reserve_port(self) -> str:
        """Return ADDRESS:PORT of this machine, for process 0 to listen on."""
        import ray.util

        self._port, address = reserved_port(str(ray.util.get_node_ip_address()))
        return address

    def start(self, words: list[str], files: dict[str, bytes], environment: dict[str, str]) -> None:
        """Start the process, with the code that this actor has."""
        self._folder, there = tempfile.TemporaryDirectory(prefix="affinage-", ignore_cleanup_errors=True), {}
        for path, content in files.items():
            if Path(path).is_file() and Path(path).read_bytes() == content:
                continue  # on a shared disk: what is beside it is there, too
            target = Path(self._folder.name) / Path(path).relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            there[path] = str(target)
        path = os.pathsep.join(filter(None, [str(Path(affinage.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        super().__init__([there.get(word, word) for word in words], {**os.environ, **environment, "PYTHONPATH": path})

    def news(self) -> tuple[list[str], int | None]:
        until = time.monotonic() + _NEWS_EVERY
        while True:
            lines, status = super().news()
            if lines or status is not None or time.monotonic() >= until:
                return lines, status
            time.sleep(0.02)

    def kill(self) -> None:
        super().kill()
        self._folder.cleanup()

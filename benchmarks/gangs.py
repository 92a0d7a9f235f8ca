"""Small training runs on several hosts, which start fast: each process is forked from one that has imported all.

    python gangs.py

is that one. It reads orders as JSON lines and answers each with one. With a job and a host's number it is that host.
"""

import atexit
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from cabled import Machines, move_to
from noted_phases import Notes, first_note, noted

TRAINING = Path(__file__).parent.parent / "tests" / "training"
sys.path.insert(0, str(TRAINING))

DEVICES = 4  # of all hosts together
PHASES = ("start", "compilation", "step", "evaluation", "restore", "save")
ANEW = 6.0  # seconds in which two Pythons have imported all, and begun
AIMED = ("joining", "start", "restore", "save", "finalise", "evaluation")
AIMED_WITHIN = 5.0  # seconds; a run that has no checkpoint yet restores none
SAVED_EVERY = 5  # steps
# Where a host kills itself, and within which seconds, as long as it takes: "writing" is that of the last save.
AIMS = {"restore": 0.3, "evaluation": 0.05, "save": 0.05, "writing": 0.1}


class Nursery:
    """Starts gangs; a launcher as `affinage.launch` knows them. Use it as a context manager.

    The command of a gang is its job as JSON: folder, steps, and what a host does to itself: `hurt` has the number of a
    host, a phase, and the number of a signal, "sleep", "disk" or, from the first save on, "refusal", and may have
    seconds `within` which after the phase's beginning, and how often it `passes` before; `sick` has the steps, counted
    from 1, whose loss is not finite, by a row of the last host's; `pause` has the seconds before each batch; `cache` a
    folder of compilations of its own, for which XLA then takes the time that it takes a user; `anew`: hosts are not
    forked from a process that has imported all, but are Pythons of their own; `mesh` and `devices`, where these are
    others; `at`, an address of this machine to meet at in place of the loopback's.

    Args:
        cache: of compilations.
        hosts: of each gang.
        machines: one for each host, else all are on this one.
    """

    def __init__(self, cache: Path, hosts: int = 2, machines: Machines | None = None) -> None:
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(cache),
            "NPROC": "16",
            "JAX_PLATFORMS": "cpu",
        }
        environment.pop("XLA_FLAGS", None)
        self.hosts, self.machines = hosts, machines
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def ask(self, **order: object) -> dict:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(self, command: Sequence[str]) -> "ForkedGang":
        return ForkedGang(self, json.loads(command[0]))

    def finish(self) -> None: ...


class ForkedGang:
    def __init__(self, nursery: Nursery, job: dict) -> None:
        from affinage.launch.process import reserved_port

        self.folder = Path(job["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._port, address = reserved_port(job.pop("at", "127.0.0.1"))
        if nursery.machines is not None:  # nobody else is there to take the port
            address = f"{nursery.machines.addresses[0]}:{address.rpartition(':')[2]}"
            job = {**job, "machines": nursery.machines.pids}
        for host in range(nursery.hosts):
            _log(self.folder, host).unlink(missing_ok=True)  # that of the start before
            first_note(_notes(self.folder, host), "boot" if job.get("anew") else "joining")
        self.pids = nursery.ask(do="start", hosts=nursery.hosts, address=address, **job)["pids"]
        self._nursery, self._left = nursery, set(self.pids)
        self._statuses: dict[int, int] = {}
        self.noticed = 0.0  # when the first one had ended

    def ended(self, seconds: float) -> list:
        from affinage.launch import Ending

        until = time.monotonic() + seconds
        while True:
            found = self._nursery.ask(do="poll", pids=sorted(self._left))["ended"]
            self._left -= {pid for pid, _ in found}
            self._statuses |= dict(found)
            self.noticed = self.noticed or (time.monotonic() if found else 0.0)
            if found or time.monotonic() >= until:
                return [Ending(self.pids.index(pid), status) for pid, status in found]
            time.sleep(0.01)

    def tell(self, number: signal.Signals) -> None:
        for pid in self._left:
            os.kill(pid, number)

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        if self.pids[host] in self._left:
            os.kill(self.pids[host], number)

    def end(self) -> None:
        for pid in self._left:  # not waited for yet, so that its number is nobody else's
            os.kill(pid, signal.SIGKILL)
        while self._left:
            self.ended(1.0)
        self._port.close()

    def wait(self) -> list[int]:
        """How all of them ended, by host; then nothing is left."""
        try:
            while self._left:
                self.ended(1.0)
        finally:
            self.end()
        return [self._statuses[pid] for pid in self.pids]

    def status(self, host: int) -> int | None:
        """How a host ended, as far as it is known."""
        return self._statuses.get(self.pids[host])

    def wait_for_one(self) -> None:
        """Until one of them has ended."""
        while len(self._left) == len(self.pids):
            self.ended(0.05)

    def phase(self, host: int) -> str:
        """What a host was at last, one of `noted_phases.PHASES`."""
        return noted(_notes(self.folder, host))

    def said(self, host: int) -> str:
        log = _log(self.folder, host)
        return log.read_text(errors="replace") if log.exists() else ""


class Aimed:
    """A launcher each start of which kills one of its hosts in a phase, as it does it to itself, until it was enough.

    Args:
        nursery: starts the hosts.
        folder: of the run.
        steps: of the run.
        left: how many kills each phase of `AIMS` lacks; counted down.
        draw: of hosts, phases and moments.
    """

    def __init__(self, nursery: Nursery, folder: Path, steps: int, left: dict[str, int], draw: random.Random) -> None:
        self.hosts, self._nursery, self._folder, self._steps = nursery.hosts, nursery, folder, steps
        self._left, self._draw = left, draw
        self.amid: Counter[str] = Counter()  # kills while the phase's own work was under way
        self.noted: Counter[str] = Counter()  # what the killed hosts had noted
        self.lost = 0  # the most steps that a kill cost
        self.back: dict[bool, list[float]] = {False: [], True: []}  # seconds to the next step; of Pythons of their own?
        self._killed_at = 0.0  # 0: and a step was made since

    def start(self, command: Sequence[str]) -> ForkedGang:
        saved = newest(self._folder)
        phase = self._phase(saved)
        host = self._draw.randrange(self.hosts)
        hurt: dict[str, object] = {"host": host, "phase": phase, "by": int(signal.SIGKILL)}
        hurt["within"] = AIMS.get(phase, 0.0)
        if phase == "writing":  # of the last save
            hurt["passes"] = (self._steps - saved - 1) // SAVED_EVERY
        elif phase in ("evaluation", "save"):
            hurt["passes"] = self._draw.randrange(3)
        anew = self._draw.random() < 0.25
        more = {"hurt": hurt} if phase else {}
        gang = self._nursery.start([json.dumps({**json.loads(command[0]), "anew": anew, **more})])
        while all(map(_runs, gang.pids)):
            self._look(anew)
            time.sleep(0.002)
        self._look(anew)
        if phase and f"hurt in {phase}" in gang.said(host):
            self._left[phase] -= 1
            self.amid[phase] += f"{phase} done" not in gang.said(host)
            self.noted[gang.phase(host)] += 1
            self._killed_at = time.monotonic()
            self.lost = max(self.lost, max([saved, *steps_of(self._folder)]) - newest(self._folder))
        return gang

    def finish(self) -> None: ...

    def _phase(self, saved: int) -> str:
        """One that lacks kills, and can come; "": none."""
        lacking = [phase for phase, kills in self._left.items() if kills > 0]
        after = () if saved else ("restore",)
        before = ("evaluation", "save") if saved >= self._steps - SAVED_EVERY else ()
        over = ("writing",) if saved == self._steps else ()
        possible = [phase for phase in lacking if phase not in (*after, *before, *over)]
        if not possible and not saved and lacking:
            return "save"  # the second or third, so that there is something to restore
        return self._draw.choice(possible) if possible else ""

    def _look(self, anew: bool) -> None:
        if self._killed_at and steps_of(self._folder):
            self.back[anew].append(time.monotonic() - self._killed_at)
            self._killed_at = 0.0


class Killing:
    """A launcher whose hosts are killed, one in each start, at a random moment, as often as is said.

    Every fourth kill waits for a phase that is drawn, as moments of all phases would seldom be in a short one.

    Args:
        nursery: starts the hosts.
        folder: of the run.
        kills: how many.
        seed: of the moments.
        anew_every: every so many kills the hosts are Pythons of their own, which are killed while they import, too;
            0 for none.
    """

    def __init__(self, nursery: Nursery, folder: Path, kills: int, seed: int = 0, anew_every: int = 0) -> None:
        self.hosts, self._nursery, self._folder = nursery.hosts, nursery, folder
        self._draw, self._left, self._anew_every = random.Random(seed), kills, anew_every
        self._shots: list[tuple[ForkedGang, int, str]] = []
        self.lost = 0  # the most steps that a kill cost
        self.noticed: list[float] = []  # seconds from each kill until it was noticed
        self.back: list[float] = []  # seconds from a kill to the next step, where no other kill came between
        self._last: tuple[ForkedGang, float] | None = None

    @property
    def killed(self) -> int:
        """Hosts that a kill has ended; not those that had come to their end before it."""
        return sum(self.phases.values())

    @property
    def phases(self) -> Counter[str]:
        """How many of them were at what; see `noted_phases.PHASES`."""
        return Counter(phase for gang, host, phase in self._shots if gang.status(host) == -signal.SIGKILL)

    def start(self, command: Sequence[str]) -> ForkedGang:
        if self._last is not None:
            self.noticed.append(max(0.0, self._last[0].noticed - self._last[1]))
        before = newest(self._folder)
        anew = bool(self._left and self._anew_every and self._left % self._anew_every == 0)
        gang = self._nursery.start([json.dumps({**json.loads(command[0]), "anew": anew})])
        last, self._last = self._last, None
        if self._left:
            self._left -= 1
            host = self._draw.randrange(self.hosts)
            if anew:
                time.sleep(self._draw.uniform(0.0, ANEW))
            elif self._left % 4 == 1:
                self._wait_for_phase(gang, host, self._draw.choice(AIMED))
            elif self._left % 2:
                self._wait_for_step(gang)
                if last is not None:
                    self.back.append(time.monotonic() - last[1])
                time.sleep(self._draw.uniform(0.0, 0.4))
            else:  # in the start, the compilation, the restore
                time.sleep(self._draw.uniform(0.0, 2.5))
            gang.kill(host)
            self._shots.append((gang, host, gang.phase(host)))
            self._last = gang, time.monotonic()
            self.lost = max(self.lost, max([before, *steps_of(self._folder)]) - newest(self._folder))
        return gang

    def finish(self) -> None: ...

    def _wait_for_phase(self, gang: ForkedGang, host: int, phase: str) -> None:
        until = time.monotonic() + AIMED_WITHIN
        while gang.phase(host) != phase and all(map(_runs, gang.pids)) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(self._draw.uniform(0.0, 0.005))

    def _wait_for_step(self, gang: ForkedGang) -> None:
        while not steps_of(self._folder) and all(map(_runs, gang.pids)):
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only waiting to be asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def dies(gang: ForkedGang, host: int) -> float:
    """When a host has ended, as `time.monotonic` counts; waits for it."""
    while _runs(gang.pids[host]):
        time.sleep(0.001)
    return time.monotonic()


def newest(folder: Path) -> int:
    """The newest step that is on disk."""
    from affinage.checkpoint import CheckpointStore

    return max([0, *CheckpointStore(folder / "checkpoints").steps()])


def order(folder: Path, steps: int, **more: object) -> list[str]:
    """The command of a gang."""
    return [json.dumps({"folder": str(folder), "steps": steps, **more})]


def ended_alike(one: Path, other: Path, step: int) -> bool:
    """Whether two runs ended with the same state and curve, bit for bit."""
    from affinage.training.metrics import curve

    return saved_alike(one, other, step) and curve(one) == curve(other)


def saved_alike(one: Path, other: Path, step: int) -> bool:
    """Whether two runs saved the same state at a step, bit for bit."""
    from affinage.checkpoint import CheckpointStore
    from affinage.checkpoint.browse import compare

    first, second = ((CheckpointStore(folder / "checkpoints"), step) for folder in (one, other))
    found = compare(first, second, numbers=False)["arrays"]
    return bool(found["same"]) and not found["different"] and not found["only"]


def steps_of(folder: Path, host: int = 0) -> list[int]:
    """The steps that a host has made in the last start."""
    log = _log(folder, host)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("step ") and line.split()[1].isdigit()]


def _log(folder: Path, host: int) -> Path:
    return folder.with_name(f"{folder.name}-{host}.log")


def _notes(folder: Path, host: int) -> Path:
    return folder.with_name(f"{folder.name}-{host}.phase")


def _import_all() -> None:
    from affinage.hardware.devices import prepare

    prepare()
    import tiny  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    from affinage.pipeline.runner import PipelineRunner  # noqa: F401
    from affinage.training import train  # noqa: F401


def _main() -> None:
    _import_all()
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            print(json.dumps({"pids": [_fork(order, host) for host in range(order["hosts"])]}), flush=True)
        else:
            waited = [(pid, os.waitpid(pid, os.WNOHANG)) for pid in order["pids"]]
            ended = [(pid, os.waitstatus_to_exitcode(status)) for pid, (found, status) in waited if found]
            print(json.dumps({"ended": ended}), flush=True)


def _fork(job: dict, host: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    if "machines" in job:
        move_to(job["machines"][host])
    from affinage.hardware import hosts
    from affinage.stopping import PARENT, die_with_parent

    os.environ |= {PARENT: str(parent), hosts.COORDINATOR: job["address"]}
    os.environ |= {hosts.HOSTS: str(job["hosts"]), hosts.HOST: str(host)}
    devices = f"--xla_force_host_platform_device_count={job.get('devices', DEVICES // job['hosts'])}"
    os.environ["XLA_FLAGS"] = f"{devices} --xla_backend_optimization_level=0"  # much is compiled, and little computed
    if "cache" in job:
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": job["cache"], "XLA_FLAGS": devices}
    die_with_parent()
    file = os.open(_log(Path(job["folder"]), host), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if job.get("anew"):
        os.execv(sys.executable, [sys.executable, __file__, json.dumps(job), str(host)])
    _be_host(job, host)


def _be_host(job: dict, host: int) -> NoReturn:
    if "stage" in job:
        from standing import walk

        status = walk(job, host)
    else:
        status = _train(job, host)
    sys.stdout.flush()
    atexit._run_exitfuncs()  # as at the exit of any process: the first host waits for the others
    os._exit(status)


def _train(job: dict, host: int) -> int:
    """The run itself, in the forked process; returns its exit status."""
    import traceback

    import tiny

    from affinage.config.runtime import RuntimeSettings
    from affinage.errors import EXIT_PREEMPTED, Preempted
    from affinage.hardware import joining
    from affinage.hardware.joining import joined
    from affinage.hardware.pulse import guarded
    from affinage.stopping import OwnProcess
    from affinage.training import TrainJob, train

    class SlowFeed(tiny.RandomFeed):
        def batch(self, step: int) -> dict:
            batch = super().batch(step)
            if step + 1 in job.get("sick", ()):
                batch["loss_mask"][-1] = math.nan
            return batch

        def iterate_part(self, start_step: int, part: int, parts: int) -> Iterator[dict]:
            for batch in super().iterate(start_step):
                time.sleep(job.get("pause", 0.005))
                share = len(batch["rows"]) // parts
                yield {name: array[part * share : (part + 1) * share] for name, array in batch.items()}

        def iterate(self, start_step: int) -> Iterator[dict]:
            return self.iterate_part(start_step, 0, 1)

    notes = Notes(_notes(Path(job["folder"]), host))
    notes.begins("joining")
    notes.follow()
    settings = tiny.settings(job["steps"], **{"eval_every": 7, **job.get("settings", {})})
    asleep, folder, mirror = threading.Event(), Path(job["folder"]), None
    if "remote" in job:
        from affinage.checkpoint.uploader import Uploader, download_newest

        mirror = Uploader(job["remote"], folder)
    hurt = job.get("hurt")
    hurts = bool(hurt) and hurt["host"] == host
    links = _links_made()
    joining._WHO_IT_WAS = 30.0  # on a busy machine the name of a dead host may come late
    _one_thread_asks_all_devices()
    if hurts:
        _hurt_in(hurt["phase"], hurt["by"], host, asleep, hurt.get("within", 0.02), hurt.get("passes", 0))

    def on_step(step: int, state: object) -> None:
        print("step", step, flush=True)
        if asleep.is_set():
            time.sleep(3600)

    try:
        runtime = RuntimeSettings.model_validate({"checkpoint": {"every_steps": 5}, **job.get("runtime", {})})
        with OwnProcess(), guarded("train", runtime), joined(runtime.heartbeat_timeout) as hosts:
            notes.begins("start")
            while hurts and hosts.count > 1 and not links[0]._links:  # before, nobody would hear of its end at once
                time.sleep(0.01)
            if mirror is not None and host == 0:
                download_newest(mirror.url, folder, print)
            train(
                TrainJob(
                    graph=tiny.graph(dropout=0.1, layers=1),
                    settings=settings,
                    runtime=runtime,
                    mesh=job.get("mesh", {"data": 2, "fsdp": 2}),
                    seed=1,
                    feed=SlowFeed(),
                    folder=folder,
                    uploader=mirror,
                    validation={"held out": tiny.HeldOut()},
                    on_step=(on_step,),
                )
            )
    except Preempted as stopped:
        print(stopped, flush=True)
        return EXIT_PREEMPTED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _one_thread_asks_all_devices() -> None:
    """Refuse what JAX asks the devices of all hosts outside of the main thread, beside whose programs it would wait."""
    from jax.experimental import multihost_utils

    def only_here(name: str) -> None:
        ask = getattr(multihost_utils, name)

        def asked(*given: object, **named: object) -> object:
            assert threading.current_thread() is threading.main_thread(), f"{name} beside the steps"
            return ask(*given, **named)

        setattr(multihost_utils, name, asked)

    for name in ("broadcast_one_to_all", "process_allgather", "sync_global_devices"):
        only_here(name)


def _refuse_saves() -> None:
    """Let Orbax find no room, at whatever it begins."""
    from affinage.checkpoint import CheckpointStore

    def refused(store: CheckpointStore, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.folder))

    CheckpointStore.save = refused  # type: ignore[assignment, method-assign]


def _hurt_in(phase: str, by: int | str, host: int, asleep: threading.Event, within: float, passes: int) -> None:
    """Make a call of a phase's function hurt this process, after some, at it or up to `within` seconds later."""
    from orbax.checkpoint._src.futures import future
    from phases import BEFORE_STEPS, in_phase

    if by == "refusal":
        _refuse_saves()
        return

    def hurt_now() -> None:
        if by == "disk" and host:  # its part of a save, which Orbax writes in threads of this class
            future._SignalingThread.run = disk_that_does_not_answer
            return
        if by == "disk":  # the seal, which the first host alone writes
            os.fsync = disk_that_does_not_answer
            return
        print(f"hurt in {phase}", flush=True)
        if by == "sleep":
            asleep.set()
        else:
            os.kill(os.getpid(), int(by))

    def disk_that_does_not_answer(file: object) -> None:
        print(f"hurt in {phase}", flush=True)
        time.sleep(3600)

    # Who is told to stop where there is nothing to save is not waited for.
    lasts = by == int(signal.SIGTERM) and phase in BEFORE_STEPS
    in_phase(phase, hurt_now, lasts=lasts, within=within, passes=passes)


def _links_made() -> list:
    """The links of this process, as soon as they are made."""
    from affinage.hardware import joining

    made: list = []
    make = joining.Links

    def remembered(*given: object) -> object:
        made.append(make(*given))
        return made[-1]

    joining.Links = remembered
    return made


if __name__ == "__main__":
    if sys.argv[1:]:
        _import_all()
        _be_host(json.loads(sys.argv[1]), int(sys.argv[2]))
    _main()

"""Kill, preempt, stop and corrupt small trainings, and check that they end with the same bits.

    python benchmarks/chaos.py [kill preempt stop corrupt ray] [--quick]

Every line counts the cases that ended right, with all cases as the peer; any other ends the benchmark with status 1.

kill: kill -9 at random moments, from the start to the last save, of one process and of one of two, 100 times; the run
ends with the weights and the curve of one that was left alone.
preempt: SIGTERM at random moments, up to 40 times; it exits with 75, and no step that it finished is made again.
stop: one of two processes is killed or stopped (SIGSTOP); the next step comes within 60 s by `affinage launch` alone.
corrupt: 300 faults in the newest of two checkpoints (a bit flipped, a file cut, swapped, deleted); what is restored has
the bits that were saved at that step.
ray: Ray's worker, a raylet and the driver are killed, three times each, on a cluster of two nodes on this machine.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from measuring import TESTS, finish, parts_of, result
from training_process import Training, ended_alike

from affinage.checkpoint import CheckpointStore
from affinage.cluster.launch import WorkerGroup, supervise

STEPS = 40
BACK_WITHIN = 60.0  # seconds

Outcomes = Iterator[tuple[str, bool]]  # of a part: the kind of each case, and whether it ended right


class Disturbed(Training):
    """A training whose first `signals` starts get a signal to one of their workers after a random time."""

    def __init__(self, folder: Path, workers: int, draw: random.Random, number: int, signals: int, lasts: float):
        super().__init__(folder, STEPS, workers)
        self._draw, self._number, self.left, self._lasts = draw, number, signals, lasts

    def start(self, command: object) -> WorkerGroup:
        """Start the workers, and the timer of the signal."""
        group = super().start([])
        if self.left:
            self.left -= 1
            pid, after = self._draw.choice(group.processes).pid, self._draw.uniform(0.0, self._lasts)
            timer = threading.Timer(after, lambda: psutil.pid_exists(pid) and os.kill(pid, self._number))
            timer.daemon = True
            timer.start()
        return group


def undisturbed(folder: Path, workers: int) -> tuple[Path, float]:
    """Return the folder of a run that is left alone, and the seconds that it takes."""
    training, began = Training(folder / f"alone-{workers}", STEPS, workers), time.monotonic()
    if training.run() != 0:
        raise SystemExit("\n".join(training.said))
    return training.folder, time.monotonic() - began


def kill(folder: Path, draw: random.Random, quick: bool) -> Outcomes:
    """Runs that are each killed up to ten times."""
    for workers in (1, 2):
        alone, lasts = undisturbed(folder, workers)
        kills = 2 if quick else 10
        for turn in range(1 if quick else 5):
            run = Disturbed(folder / f"kill-{workers}-{turn}", workers, draw, signal.SIGKILL, kills, lasts)
            ended = run.run(failures=kills + 2) == 0
            yield f"{kills} kills of one of {workers}", ended and ended_alike(run.folder, alone, STEPS)


def preempt(folder: Path, draw: random.Random, quick: bool) -> Outcomes:
    """Runs that are each preempted up to four times."""
    for workers in (1, 2):
        alone, lasts = undisturbed(folder, workers)
        for turn in range(1 if quick else 5):
            path, signals = folder / f"preempt-{workers}-{turn}", 2 if quick else 4
            run = Disturbed(path, workers, draw, signal.SIGTERM, signals, lasts)
            ended = run.run(failures=signals) == 0
            launched = [line for line in run.said if line.startswith("launch:")]
            stopped = all("preempted" in line or "SIGTERM" in line for line in launched)  # SIGTERM: it was importing
            steps = [step for start in range(run.starts) for step in steps_made(run, start)]
            yield f"{signals} signals to one of {workers}", ended and stopped and steps == sorted(set(steps))
            yield "runs after them", ended_alike(run.folder, alone, STEPS)


def steps_made(run: Training, start: int) -> list[int]:
    """Return the steps that the first process made in a start, which may have ended before the first one."""
    try:
        return run.made(start, 0)
    except FileNotFoundError:
        return []


class TimedLines(list[str]):
    """Lines of a training, and when those of steps came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, line: str) -> None:
        """Take a line."""
        super().append(line)
        if "train: step" in line:
            self.times.append(time.monotonic())


def stop(folder: Path, draw: random.Random, quick: bool) -> Outcomes:
    """Runs of which one process of two is lost in a step."""
    for number, process in ((signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0))[: 1 if quick else 3]:
        run = Training(folder / f"stop-{number}-{process}", STEPS, hurts=[(process, 12, int(number))])
        run.said = lines = TimedLines()
        status = run.run(failures=1)
        seconds = max(second - first for first, second in itertools.pairwise(lines.times))
        yield f"{number.name} of process {process}, {seconds:.0f} s", status == 0 and seconds <= BACK_WITHIN


def corrupt(folder: Path, draw: random.Random, quick: bool) -> Outcomes:
    """Checkpoints with one fault each."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"params": {"w": jax.ShapeDtypeStruct((600,), np.float32, sharding=here)}}
    whole = CheckpointStore(folder / "whole", keep_last=2)
    for step in (1, 2):
        whole.save(step, {"params": {"w": jnp.arange(600, dtype=jnp.float32) + step}}, {})
    whole.wait()
    warnings.simplefilter("ignore")
    for number in range(20 if quick else 300):
        kind = ("flip", "cut", "swap", "delete")[number % 4]
        shutil.rmtree(folder / "damaged", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "damaged")
        damage(folder / "damaged" / "2", kind, draw)
        restored = CheckpointStore(folder / "damaged").restore_newest(abstract)
        if restored is None:
            yield kind, False
        else:
            step, state, _ = restored
            yield kind, np.array_equal(state["params"]["w"], np.arange(600, dtype=np.float32) + step)


def damage(step: Path, kind: str, draw: random.Random) -> None:
    """Flip a bit of a file, cut off its end, swap it for one of the step before, or delete it."""
    path = draw.choice(sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    if kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        path.unlink()
        other = step.parent / "1" / path.relative_to(step)
        if kind == "swap" and other.is_file():
            shutil.copy(other, path)


def ray(folder: Path, draw: random.Random, quick: bool) -> Outcomes:
    """Runs on a Ray cluster of two nodes, of which one part is killed in a step."""
    from ray.cluster_utils import Cluster

    paths = [str(TESTS), str(TESTS / "cluster"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    alone, _ = undisturbed(folder, 2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    try:
        for turn, victim in itertools.product(range(1 if quick else 3), ("worker", "raylet", "driver")):
            run = folder / f"ray-{victim}-{turn}"
            command = [sys.executable, __file__, "--driver", cluster.address, str(run)]
            driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            log, until = run.with_name(f"{run.name}-0-1.steps"), time.monotonic() + 120
            while time.monotonic() < until and not (log.is_file() and len(log.read_text().split()) > 5):
                time.sleep(0.1)
            if victim == "driver":
                driver.kill()
                driver.wait()
                driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            elif victim == "raylet":
                cluster.remove_node(node, allow_graceful=False)
                node = cluster.add_node(num_cpus=1)
            else:
                started = psutil.Process().children(recursive=True)
                next(each for each in started if "ray::RemoteProcess" in " ".join(each.cmdline())).kill()
            yield f"{victim} killed", driver.wait(300) == 0 and ended_alike(run, alone, STEPS)
    finally:
        cluster.shutdown()


def drive(address: str, folder: str) -> int:
    """Be `affinage launch --on ray` of the small training."""
    from affinage.cluster.ray_launch import RayLauncher

    job = json.dumps({"folder": folder, "steps": STEPS, "hurt": None, "start": 0, "pause": 0.2})
    program = [sys.executable, "-m", "training_process"]
    launcher = RayLauncher(2, address=address, devices=2, program=program)
    try:
        return supervise(launcher.start, [job], max_failures=20)
    finally:
        launcher.close()


PARTS: dict[str, Callable[[Path, random.Random, bool], Outcomes]] = {
    part.__name__: part for part in (kill, preempt, stop, corrupt, ray)
}


def main() -> None:
    parts, quick = parts_of(__doc__, PARTS, list(PARTS))
    results = []
    for name, part in parts.items():
        cases, right = Counter[str](), Counter[str]()
        with tempfile.TemporaryDirectory(prefix="affinage-chaos-") as folder:
            for kind, ended_right in part(Path(folder), random.Random(0), quick):
                cases[kind] += 1
                right[kind] += ended_right
        results += [result(f"{name}: {kind}", right[kind], "cases right", count) for kind, count in cases.items()]
    finish("chaos", results)
    sys.exit(any(line["ratio"] != 1 for line in results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--driver"]:
        sys.exit(drive(*sys.argv[2:]))
    main()

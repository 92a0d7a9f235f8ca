# ruff: noqa: E402 -- the environment is set before JAX is imported
"""Kill, preempt, stop and corrupt small trainings, and check that they end with the same bits.

    python benchmarks/chaos.py [--quick] [--parts kill preempt stop corrupt ray] [--seed 0]

Each part counts what it did and what went wrong; the last line is JSON, and the exit status is 1 if anything did.

kill: kill -9 at random moments, from the start to the last save, of one process and of one of two, 100 times; the run
ends with the weights and the curve of one that was left alone.
preempt: SIGTERM at random moments, 40 times; the process exits with 75, and no step that it finished is lost.
stop: one of two processes is killed or stopped (SIGSTOP); the next step comes within 60 s by `affinage launch` alone.
corrupt: 300 faults in the newest of two checkpoints (a bit flipped, a file cut, swapped, deleted); what is restored has
the bits that were saved at that step.
ray: Ray's worker, a raylet and the driver are killed, three times each, on a cluster of two nodes on this machine.
"""

import argparse
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
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from training_process import Training, ended_alike

from affinage.checkpoint import CheckpointStore
from affinage.cluster.launch import FailureConfig, LocalGroup, supervise

STEPS = 40
KILLS_OF_A_RUN = 10
PYTHON = [sys.executable]
MANY = 10**6
BACK_WITHIN = 60.0  # seconds

Found = Counter[str]


class Disturbed(Training):
    """A training whose every start gets a signal to one of its workers after a random time, `signals` times."""

    def __init__(
        self, folder: Path, workers: int, draw: random.Random, number: int, signals: int, lasts: float
    ) -> None:
        super().__init__(PYTHON, folder, STEPS, workers)
        self._draw, self._number, self.left, self._lasts = draw, number, signals, lasts

    def start(self, command: object) -> LocalGroup:
        group = super().start([])
        if self.left:
            self.left -= 1
            pid, after = self._draw.choice(group.pids), self._draw.uniform(0.0, self._lasts)
            timer = threading.Timer(after, _send, (pid, self._number))
            timer.daemon = True
            timer.start()
        return group


def _send(pid: int, number: int) -> None:
    with_it = psutil.pid_exists(pid)
    if with_it:
        os.kill(pid, number)


def undisturbed(folder: Path, workers: int) -> tuple[Path, float]:
    """The folder of a run that is left alone, and how long it takes."""
    launcher, began = Training(PYTHON, folder / f"alone-{workers}", STEPS, workers), time.monotonic()
    assert launcher.run() == 0, "\n".join(launcher.said)
    return launcher.folder, time.monotonic() - began


def kill(folder: Path, draw: random.Random, quick: bool) -> Found:
    found: Found = Counter()
    for workers, count in ((1, 2 if quick else 50), (2, 2 if quick else 50)):
        alone, lasts = undisturbed(folder, workers)
        for turn in range(0, count, KILLS_OF_A_RUN):
            kills = min(KILLS_OF_A_RUN, count - turn)
            run = Disturbed(folder / f"kill-{workers}-{turn}", workers, draw, signal.SIGKILL, kills, lasts)
            status = run.run(failures=kills + 2)
            found[f"kills of one of {workers}"] += kills
            found["wrong: not at its end"] += status != 0
            found["wrong: other bits"] += status == 0 and not ended_alike(run.folder, alone, STEPS)
    return found


def preempt(folder: Path, draw: random.Random, quick: bool) -> Found:
    found: Found = Counter()
    for workers, count in ((1, 2 if quick else 20), (2, 2 if quick else 20)):
        alone, lasts = undisturbed(folder, workers)
        for turn in range(0, count, 4):
            times = min(4, count - turn)
            run = Disturbed(folder / f"preempt-{workers}-{turn}", workers, draw, signal.SIGTERM, times, lasts)
            while run.left:
                begun, starts, left = max([0, *run.saved()]), run.starts, run.left
                status = run.run()
                if status == 0:  # it was done before
                    found["signals after the end"] += 1
                    run.folder = run.folder.with_name(f"{run.folder.name}-{run.starts}")
                    run._job["folder"] = str(run.folder)
                    continue
                found[f"signals to one of {workers}"] += left - run.left
                killed = any("SIGTERM" in line for line in run.said if line.startswith("launch:"))
                found["before Python could hear"] += killed
                found["wrong: another status"] += status != 75 and not killed
                steps = max([begun, *_steps(run, starts)])
                found["steps lost"] += steps - max([0, *run.saved()])
            status = run.run()
            found["wrong: other bits"] += status != 0 or not ended_alike(run.folder, alone, STEPS)
    found["wrong: steps lost"] = found.pop("steps lost")
    return found


def _steps(run: Training, start: int) -> list[int]:
    try:
        return run.made(start, 0)
    except FileNotFoundError:
        return []


def stop(folder: Path, draw: random.Random, quick: bool) -> Found:
    """One process of two is lost in a step; the seconds until the next step are printed."""
    found: Found = Counter()
    for number, process in ((signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0))[: 1 if quick else 3]:
        run = Training(PYTHON, folder / f"stop-{number}-{process}", STEPS, hurts=[(process, 12, int(number))])
        when: list[float] = []
        run.said = _Timed(when)
        status = run.run(failures=1)
        seconds = max(second - first for first, second in itertools.pairwise(when))
        print(f"{number.name} of process {process}: {seconds:.0f} s between two lines", flush=True)
        found["processes lost"] += 1
        found["wrong: not at its end"] += status != 0
        found[f"wrong: over {BACK_WITHIN:.0f} s"] += seconds > BACK_WITHIN
    return found


class _Timed(list[str]):
    """Lines that note when a step was printed."""

    def __init__(self, when: list[float]) -> None:
        super().__init__()
        self._when = when

    def append(self, line: str) -> None:
        super().append(line)
        if "train: step" in line:
            self._when.append(time.monotonic())


def corrupt(folder: Path, draw: random.Random, quick: bool) -> Found:
    found: Found = Counter()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"params": {"w": jax.ShapeDtypeStruct((600,), np.float32, sharding=here)}}
    whole = CheckpointStore(folder / "whole", keep_last=2)
    for step in (1, 2):
        whole.save(step, {"params": {"w": jnp.arange(600, dtype=jnp.float32) + step}}, {})
    whole.wait()
    warnings.simplefilter("ignore")
    for number in range(20 if quick else 300):
        name, fault = list(FAULTS.items())[number % len(FAULTS)]
        shutil.rmtree(folder / "damaged", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "damaged")
        fault(folder / "damaged" / "2", draw)
        found[name] += 1
        restored = CheckpointStore(folder / "damaged").restore_newest(abstract)
        if restored is None:
            found["wrong: nothing restored"] += 1
            continue
        step, state, _ = restored
        right = np.asarray(state["params"]["w"]).tobytes() == (np.arange(600, dtype=np.float32) + step).tobytes()
        found["wrong: other bits"] += not right
    return found


def _file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))


def flip(step: Path, draw: random.Random) -> None:
    """Flip one bit of one file."""
    path = _file(step, draw)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(step: Path, draw: random.Random) -> None:
    """Lose the end of a file."""
    path = _file(step, draw)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def swap(step: Path, draw: random.Random) -> None:
    """Replace a file by one of the step before."""
    path = _file(step, draw)
    other = step.parent / "1" / path.relative_to(step)
    path.write_bytes((other if other.is_file() else _file(step.parent / "1", draw)).read_bytes())


def delete(step: Path, draw: random.Random) -> None:
    """Lose a file."""
    _file(step, draw).unlink()


FAULTS: dict[str, Callable[[Path, random.Random], None]] = {
    function.__name__: function for function in (flip, cut, swap, delete)
}


def ray(folder: Path, draw: random.Random, quick: bool) -> Found:
    """Kill parts of a Ray cluster of two nodes in a step; the driver is this file with --driver."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "cluster"), os.environ.get("PYTHONPATH", "")])
    found: Found = Counter()
    alone, _ = undisturbed(folder, 2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1)]
    try:
        for turn in range(1 if quick else 3):
            for victim in ("worker", "raylet", "driver"):
                run = folder / f"ray-{victim}-{turn}"
                command = [sys.executable, __file__, "--driver", cluster.address, str(run)]
                driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                log = run.with_name(f"{run.name}-0-1.steps")
                until = time.monotonic() + 120
                while time.monotonic() < until and not (log.is_file() and len(log.read_text().split()) > 5):
                    time.sleep(0.1)
                if victim == "driver":
                    driver.kill()
                    driver.wait()
                    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                elif victim == "raylet":
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                    nodes.append(cluster.add_node(num_cpus=1))
                else:
                    actors = [
                        p for p in psutil.process_iter(["cmdline"]) if "ray::Worker" in " ".join(p.info["cmdline"])
                    ]
                    actors[0].kill()
                began = time.monotonic()
                found[f"{victim} killed"] += 1
                found["wrong: not at its end"] += driver.wait(300) != 0
                found["wrong: other bits"] += not ended_alike(run, alone, STEPS)
                print(f"{victim}: at its end {time.monotonic() - began:.0f} s later", flush=True)
    finally:
        cluster.shutdown()
    return found


def drive(address: str, folder: str) -> int:
    """`affinage launch --on ray`, of the small training."""
    from affinage.cluster.ray_launch import RayLauncher

    job = json.dumps({"folder": folder, "steps": STEPS, "hurt": None, "start": 0, "pause": 0.2})
    program = [sys.executable, "-m", "training_process"]
    launcher = RayLauncher(2, address=address, devices=2, program=program)
    try:
        return supervise(launcher.start, [job], FailureConfig(MANY, 20))
    finally:
        launcher.close()


PARTS = {part.__name__: part for part in (kill, preempt, stop, corrupt, ray)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.driver:
        sys.exit(drive(*asked.driver))
    results: dict[str, dict[str, int]] = {}
    for part in asked.parts:
        with tempfile.TemporaryDirectory(prefix="affinage-chaos-") as folder:
            results[part] = dict(PARTS[part](Path(folder), random.Random(asked.seed), asked.quick))
        print(part, results[part], flush=True)
    wrong = sum(count for found in results.values() for name, count in found.items() if name.startswith("wrong"))
    print(json.dumps({"benchmark": "chaos", "wrong": wrong, "results": results}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

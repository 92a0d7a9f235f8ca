"""Kill, stop and damage small runs, and see what comes of it.

    python benchmarks/chaos.py [--quick] [--kills 500] [--stops 20] [--faults 10000]

Kill: kill -9 at random moments; the final weights must be those of an undisturbed run, bit for bit. Stop: SIGTERM in
each of six phases; status 75 and no finished step lost. Rot: damage of the newest checkpoint; it must not be taken, and
the one before must. The runs are the tests' own: one process with two devices.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "training"), str(TESTS / "checkpoint")]

import faults  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import runs  # noqa: E402

from affinage.checkpoint import CheckpointStore  # noqa: E402

STEPS = 60


def weights(folder: Path) -> list[bytes]:
    state = CheckpointStore(folder / "checkpoints").restore(STEPS, {"params": None})
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def newest(folder: Path) -> int:
    return max([0, *CheckpointStore(folder / "checkpoints").steps()])


def kill(folder: Path, nursery: runs.Nursery, kills: int) -> dict[str, float]:
    """Runs are killed until there were enough kills; each that comes to its end is compared."""
    nursery.finish(folder / "undisturbed", STEPS)
    expected, draw = weights(folder / "undisturbed"), random.Random(0)
    done = wrong = number = most_lost = 0
    while done < kills:
        run_folder, ended = folder / f"killed-{number}", False
        number += 1
        while not ended:
            run, reached = nursery.start(run_folder, STEPS), newest(run_folder)
            if done < kills:
                time.sleep(draw.uniform(0, 1.5))
                run.kill()
            status = run.wait()
            ended = status == 0
            done += status == -signal.SIGKILL
            if status not in (0, -signal.SIGKILL):
                raise SystemExit(run.said())
            if not ended:
                most_lost = max(most_lost, max([reached, *run.steps()]) - newest(run_folder))
        wrong += weights(run_folder) != expected
    return {"kills": done, "runs": number, "runs that ended with other bits": wrong, "most steps lost": most_lost}


def stop(folder: Path, nursery: runs.Nursery, each: int) -> dict[str, float]:
    """SIGTERM in each phase."""
    saved, lost, seconds = 0, 0, []
    for turn in range(each):
        run_folder = folder / f"stopped-{turn}"
        for phase in ("start", "compilation", "evaluation", "restore", "save", "step"):
            run = nursery.start(run_folder, STEPS, when=phase)
            while "signal in" not in run.said():
                time.sleep(0.005)
            told = time.monotonic()
            saved += run.wait() == 75
            seconds.append(time.monotonic() - told)
            lost += max([newest(run_folder), *run.steps()]) - newest(run_folder)
    took = {"median seconds": statistics.median(seconds), "most seconds": max(seconds)}
    return {"stops": 6 * each, "ended with 75": saved, "steps lost": lost, **took}


def rot(folder: Path, count: int) -> dict[str, float]:
    """Damage of every kind in turn."""
    sound, damaged = folder / "sound", folder / "damaged"
    store = CheckpointStore(sound, keep_last=2)
    for step in (1, 2):
        store.save(step, {"params": {"w": jnp.arange(600, dtype=jnp.float32) + step}}, {})
    store.wait()
    kinds, taken, lost, copy = list(faults.FAULTS.values()), 0, 0, CheckpointStore(damaged)
    for number in range(count):
        faults.place(sound, damaged)
        kinds[number % len(kinds)](damaged, random.Random(number))
        taken += 2 in copy.steps() and not copy.damage(2)
        lost += number % 100 == 0 and bool(copy.damage(1))
    return {"faults": count, "taken for whole": taken, "older ones not found": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each, for seconds")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--stops", type=int, default=20, help="of each phase")
    parser.add_argument("--faults", type=int, default=10_000)
    asked = parser.parse_args()
    kills, stops, count = (5, 1, 140) if asked.quick else (asked.kills, asked.stops, asked.faults)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root, runs.Nursery(Path(root) / "cache") as nursery:
        for name, work in (
            ("rot", lambda: rot(Path(root), count)),
            ("stop", lambda: stop(Path(root), nursery, stops)),
            ("kill", lambda: kill(Path(root), nursery, kills)),
        ):
            before = time.monotonic()
            found[name] = {**work(), "seconds": round(time.monotonic() - before, 1)}
            print(name, found[name], "load", [round(load, 1) for load in os.getloadavg()], flush=True)
    lines = [
        {"name": f"{part}: {name}", "ours": value, "peer": None, "unit": "", "ratio": None}
        for part, facts in found.items()
        for name, value in facts.items()
    ]
    print(json.dumps({"benchmark": "chaos", "results": lines}))


if __name__ == "__main__":
    main()

"""What share of the wall clock trains a model whose machines fail every three hours.

    python benchmarks/goodput.py [--quick] [--kills 5] [--mtbf-hours 3] [--every-minutes 5] [--restart SECONDS] ...

Measured first, with processes of their own: for how long a save stalls the loop, how long it takes until it is on disk,
and how long it takes from a kill -9 to the next step (Python, imports, compilation from the cache, restore). Then these
costs are replayed: failures come at random (exponentially distributed), every one throws away what was done since the
last save on disk and costs a restart. Time in which machines are waited for is not part of it; --restart stands in for
it. A program is compiled once. What is not modelled: failures while several hosts start, and slow machines.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TARGET = 97.0  # percent


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    stall: float  # of the loop, by a save
    durable: float  # from the beginning of a save until it would be gone on from
    restart: float  # from a failure to the next step
    compile: float  # once


def worker(folder: Path, steps: int, width: int) -> None:
    from affinage.hardware.devices import prepare

    prepare()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "training"))
    import tiny

    from affinage.config.runtime import CheckpointSettings, RuntimeSettings
    from affinage.model import parse
    from affinage.training import TrainJob, train

    told = tiny.graph().to_dict()
    told["nodes"]["embed"]["width"] = width
    told["nodes"]["blocks"]["ffn"]["width"] = 4 * width
    job = TrainJob(
        graph=parse(told), settings=tiny.settings(steps, eval_every=steps),
        runtime=RuntimeSettings(checkpoint=CheckpointSettings(every_steps=10)),
        mesh={"data": 1}, seed=0, feed=tiny.RandomFeed(), folder=folder,
        on_step=(lambda step, state: print("step", step, flush=True),),
    )  # fmt: skip
    train(job)


def start(folder: Path, steps: int, width: int) -> "subprocess.Popen[str]":
    words = [sys.executable, __file__, "--worker", str(folder), "--steps", str(steps), "--width", str(width)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def first_step(process: "subprocess.Popen[str]", wanted: int) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step ") and int(line.split()[1]) >= wanted:
            return int(line.split()[1])
    raise RuntimeError("the training ended before its time")


def measure(kills: int, width: int) -> tuple[Costs, dict[str, float]]:
    """Costs of a small training on this machine, and its ledger in percent."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        folder, restarts, wanted = Path(place) / "run", [], 25
        steps = wanted + 25 * kills
        process = start(folder, steps, width)
        first_step(process, wanted)
        for _ in range(kills):
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed = time.monotonic()
            process = start(folder, steps, width)
            wanted = first_step(process, 1) + 20
            restarts.append(time.monotonic() - killed)
            first_step(process, wanted)
        assert process.stdout is not None
        process.stdout.read()
        assert process.wait() == 0
        summary = json.loads((folder / "summary.json").read_text())
        durable = _durable(folder / "checkpoints")
        costs = Costs(
            stall=summary["saves"]["stall_mean"], durable=durable, restart=statistics.median(restarts),
            compile=summary["seconds"]["compile"],
        )  # fmt: skip
        return costs, summary["percent"]


def _durable(checkpoints: Path) -> float:
    """From the first file of the newest save to its commit, by the clock of the file system."""
    newest = max((path for path in checkpoints.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    committed = (newest / "commit_success.txt").stat().st_mtime
    return committed - min(path.stat().st_mtime for path in newest.rglob("*") if path.is_file())


def replay(costs: Costs, *, mtbf: float, every: float, days: float, seed: int) -> dict[str, float]:
    """Percent of the wall clock by account, over so many days.

    Args:
        costs: measured or assumed.
        mtbf: mean time between failures, seconds.
        every: between two saves, seconds of training.
        days: of wall clock.
        seed: of the failures.
    """
    draw, end = random.Random(seed), days * 86_400
    spent = dict.fromkeys(("compute", "compile", "save", "restart", "lost"), 0.0)
    clock = spent["compile"] = costs.compile
    while clock < end:
        fails = clock + draw.expovariate(1 / mtbf)
        kept = since = 0.0  # seconds of compute that are on disk, and those that are not
        pending: list[tuple[float, float]] = []  # saves under way: when they are on disk, and what they hold
        while True:
            ahead = min(every, fails - clock, end - clock)
            clock, since = clock + ahead, since + ahead
            for done, held in [each for each in pending if each[0] <= clock]:
                kept = max(kept, held)
                pending.remove((done, held))
            if clock >= min(fails, end):
                break
            pending.append((clock + costs.durable, since))
            stalled = min(costs.stall, max(fails - clock, 0.0))
            clock += stalled
            spent["save"] += stalled
        failed = clock >= fails and fails < end
        spent["compute"] += kept if failed else since
        if failed:
            spent["lost"] += since - kept
            again = costs.restart
            while (sooner := draw.expovariate(1 / mtbf)) < again:  # it fails while it starts
                clock, spent["restart"] = clock + sooner, spent["restart"] + sooner
            clock, spent["restart"] = clock + again, spent["restart"] + again
    return {name: 100 * seconds / clock for name, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--mtbf-hours", type=float, default=3.0)
    parser.add_argument("--every-minutes", type=float, default=None, help="default: that of a recipe")
    for name in ("stall", "durable", "restart"):
        parser.add_argument(f"--{name}", type=float, default=None, help="seconds, in place of what is measured")
    given = parser.parse_args()
    if given.worker is not None:
        worker(given.worker, given.steps, given.width)
        return
    from affinage.config.runtime import CheckpointSettings

    measured, percent = measure(1 if given.quick else given.kills, 64 if given.quick else given.width)
    own = {name: value for name in ("stall", "durable", "restart") if (value := getattr(given, name)) is not None}
    costs = Costs(**{**asdict(measured), **own})
    every = given.every_minutes or CheckpointSettings().every_minutes
    cases = [(f"these costs, a save every {every:g} min", costs, every)]
    cases += [(f"these costs, a save every {m} min", costs, m) for m in (1, 15)]
    slow = Costs(stall=1.0, durable=60.0, restart=120.0, compile=600.0)
    cases += [(f"assumed: 1 s stall, 60 s to disk, 2 min to restart, a save every {every:g} min", slow, every)]
    results = []
    for name, each, minutes in cases:
        runs = [
            replay(each, mtbf=3600 * given.mtbf_hours, every=60 * minutes, days=10 if given.quick else 100, seed=seed)
            for seed in range(3 if given.quick else 10)
        ]
        mean = {account: statistics.mean(run[account] for run in runs) for account in runs[0]}
        print(f"{name}: " + ", ".join(f"{account} {share:.2f} %" for account, share in mean.items()), file=sys.stderr)
        goodput = round(mean["compute"], 3)
        results.append({"name": name, "ours": goodput, "peer": TARGET, "unit": "%", "ratio": goodput / TARGET})
    print(json.dumps({"benchmark": "goodput", "costs": asdict(costs), "ledger": percent, "results": results}))


if __name__ == "__main__":
    main()

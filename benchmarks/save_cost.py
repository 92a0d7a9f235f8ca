"""What saving costs a training: the stall of the loop, seconds of CPU, and the most memory that the process had.

    python benchmarks/save_cost.py [--quick] [--saves 20]

A llama-like model with AdamW, a state of 500 MB, its own training step on one CPU device as the loop calls it, donating
the state, and a save every other step. The stall is the time until the save lets the loop go on, where the save before
is done; its CPU is that of all threads, which other work on the machine changes less. On a CPU that is not all: the
step after it finds the state in use and copies it first, while the save is written; by how much it is longer than one
without a save has a line of its own. CPU of a save is that of all threads while no step runs; its share is of the
default interval's steps.

Memory is the largest resident size of the process as a multiple of the state, Python and JAX in it: once with that
step, and once with a program in its place that needs no memory of its own, as only then it is saving that one sees.
Orbax used plainly (`Checkpointer` with its defaults, the newest two kept) does the same, each in a process of its own.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from twins import Size, graph_of, tokens_of

FULL = Size(width=512, ffn=1408, heads=8, layers=11, vocabulary=8192, context=64, batch=2)
QUICK = Size(width=256, ffn=704, heads=8, layers=4, vocabulary=2048, context=64, batch=2)
MODES = ("affinage", "orbax", "no saves")
LOOPS = ("training", "copies")

LINES = (  # name, fact, unit, loop
    ("stall of the loop, median", "stall", "ms", "training"),
    ("stall of the loop, most", "most stall", "ms", "training"),
    ("CPU of all threads in the stall, median", "own stall", "ms", "training"),
    ("the step after it, beyond one without a save, median", "step after", "ms", "training"),
    ("a save, until it is on disk", "save", "s", "training"),
    ("CPU of a save", "cpu", "s", "training"),
    ("CPU of a save, of the default interval's steps", "share", "%", "training"),
    ("the hash of it, of the same", "hash", "%", "training"),
    ("most resident memory, training", "most memory", "x state", "training"),
    ("most resident memory, copies", "most memory", "x state", "copies"),
)


def most_resident() -> int:
    """Bytes that this process had at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def saver(mode: str, folder: Path) -> tuple[Any, Any]:
    """(start a save of a step and a state, wait until all are on disk)."""
    if mode == "affinage":
        from affinage.checkpoint import CheckpointStore

        store = CheckpointStore(folder)
        return (lambda step, state: store.save(step, state, {"step": step})), store.wait
    if mode == "orbax":
        from orbax.checkpoint import v1 as ocp

        kept = ocp.training.preservation_policies.LatestN(2)
        plain = ocp.training.Checkpointer(folder, preservation_policy=kept)
        waiting: list[Any] = []

        def wait() -> None:
            while waiting:
                waiting.pop().result()

        def save(step: int, state: Any) -> None:
            wait()
            waiting.append(plain.save_checkpointables_async(step, state))

        return save, wait
    return (lambda step, state: None), (lambda: None)


def begin(loop: str, size: Size, steps: int, folder: Path) -> tuple[Any, Any]:
    """(state, program that moves it on)."""
    import jax

    from affinage.hardware.devices import acquire
    from affinage.model import parse
    from affinage.parallel import make_mesh
    from affinage.recipe.training import PretrainSettings
    from affinage.training import TrainJob
    from affinage.training.program import Program

    settings = {"steps": steps, "batch": size.batch, "schedule": {"peak": 1e-4, "floor": 1e-5}}
    job = TrainJob(
        graph=parse(graph_of("llama", size)),
        settings=PretrainSettings.model_validate(settings),
        mesh={"data": 1},
        seed=0,
        feed=Feed(size),
        folder=folder,
    )
    program = Program(job, make_mesh(job.mesh, acquire()[:1]), job.feed.batch())
    if loop == "copies":
        return program.begin(), jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    step, batch = program.compile_training(), program.put(program.batch)
    return program.begin(), lambda state: step(state, batch)[0]


class Feed:
    """The same batch every time."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def batch(self) -> dict[str, np.ndarray]:
        rows, tokens = np.arange(self._size.batch, dtype=np.int32), tokens_of(self._size)
        at = np.broadcast_to(np.arange(self._size.context, dtype=np.int32), tokens.shape)
        ones = np.ones(tokens.shape, np.float32)
        return {"tokens": tokens, "segment_ids": 0 * at, "positions": at, "rows": rows, "loss_mask": ones}

    def iterate(self, start_step: int) -> Any:
        while True:
            yield self.batch()


def work(mode: str, loop: str, size: Size, saves: int, folder: Path) -> dict[str, Any]:
    """The loop, in this process."""
    from affinage.hardware.collector import what_lives_is_left_alone
    from affinage.hardware.devices import prepare

    prepare()
    state, move = begin(loop, size, 100 + 2 * saves, folder)
    with what_lives_is_left_alone():  # as the loop does
        return measured(mode, state, move, saves, folder)


def measured(mode: str, state: Any, move: Any, saves: int, folder: Path) -> dict[str, Any]:
    """What steps and saves take, by fact."""
    import jax

    from affinage.hardware.allocator import give_back_freed_memory
    from affinage.recipe.training import CheckpointSettings

    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def advance(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state = move(state)
            jax.block_until_ready(state)

    for _ in range(4):  # as the loop does, before its first step and after the first ones
        give_back_freed_memory()
        advance(1)
    start, cpu = time.perf_counter(), time.process_time()
    advance(4)
    seconds_of_steps = (time.process_time() - cpu) / 4 * CheckpointSettings().every_steps
    alone = (time.perf_counter() - start) / 4

    save, wait = saver(mode, folder / "steps")
    stalls, own, whole, cpu_of_save, longer = [], [], [], [], []
    for number in range(saves + 1):
        start, cpu = time.perf_counter(), time.process_time()
        save(number, state.named())
        stalls.append(1e3 * (time.perf_counter() - start))
        own.append(1e3 * (time.process_time() - cpu))
        if number % 2:  # a save beside which no step runs
            wait()
            whole.append(time.perf_counter() - start)
            cpu_of_save.append(time.process_time() - cpu)
        start = time.perf_counter()
        advance(1)
        if number % 2 == 0:
            longer.append(1e3 * (time.perf_counter() - start - alone))
        advance(1)
        wait()
    return {
        "state": held,
        "stall": statistics.median(stalls[1:]),  # the first one imports, and makes threads
        "most stall": max(stalls[1:]),
        "own stall": statistics.median(own[1:]),
        "step after": statistics.median(longer[1:]),
        "save": statistics.median(whole),
        "cpu": statistics.median(cpu_of_save),
        "share": 100 * statistics.median(cpu_of_save) / seconds_of_steps,
        "hash": 100 * _seconds_of_hash(folder / "steps") / seconds_of_steps,
        "most memory": most_resident() / held,
    }


def _seconds_of_hash(folder: Path) -> float:
    """Seconds of CPU that the seal of the newest step takes."""
    from affinage.checkpoint.seal import seal

    steps = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if not steps:
        return 0.0
    before = time.process_time()
    seal(steps[-1])
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a state of 40 MB, few saves")
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--work", nargs=2, metavar=("MODE", "LOOP"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    size, saves = (QUICK, 6) if asked.quick else (FULL, asked.saves)
    if asked.work:
        print(json.dumps(work(*asked.work, size, saves, asked.folder)))
        return
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for loop, mode in itertools.product(LOOPS, MODES):
        folder = Path(tempfile.mkdtemp(prefix="affinage-bench-"))
        command = [sys.executable, __file__, "--work", mode, loop, "--folder", str(folder), "--saves", str(saves)]
        try:
            run = subprocess.run([*command, *(["--quick"] if asked.quick else [])], stdout=subprocess.PIPE, check=True)
        finally:
            shutil.rmtree(folder)
        found[loop, mode] = json.loads(run.stdout.splitlines()[-1])
        told = {name: round(value, 4) for name, value in found[loop, mode].items()}
        print(f"{loop}, {mode}:", told, "load", round(os.getloadavg()[0], 1), flush=True)
    results = []
    for name, key, unit, loop in LINES:
        ours, peer = found[loop, "affinage"][key], found[loop, "orbax"][key] if key != "hash" else None
        results.append({"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": peer and ours / peer})
    for loop in LOOPS:
        name, ours = f"most resident memory, {loop} without saves", found[loop, "no saves"]["most memory"]
        results.append({"name": name, "ours": ours, "peer": None, "unit": "x state", "ratio": None})
    print(json.dumps({"benchmark": "save_cost", "state_bytes": found["copies", "orbax"]["state"], "results": results}))


if __name__ == "__main__":
    main()

"""What saving costs a training: the stall of the loop, seconds of CPU, and the most memory that the process had.

    python benchmarks/save_cost.py [--quick] [--saves 20] [--hosts 2]

A llama-like model with AdamW, a state of 500 MB, its own training step on one CPU device as the loop calls it, donating
the state, and a save every other step. The stall is the time until the save lets the loop go on, where the save before
is done; its CPU is that of all threads, which other work on the machine changes less. On a CPU that is not all: the
step after it finds the state in use and copies it first, while the save is written; by how much it is longer than one
without a save has a line of its own. CPU of a save is that of all threads while no step runs. The wall clock that it
costs is the stall, two steps beside which it is written, and what is then left of it, less two steps without a save.
Their shares are of the steps between two saves by default: 1000, or those of 5 minutes where that is sooner. The first
save, which imports and makes threads, has a line of its own, and no part in the others.

Memory is the largest resident size of the process as a multiple of the state, Python and JAX in it: once with that
step, and once with a program in its place that needs no memory of its own, as only then it is saving that one sees.
Orbax used plainly (`Checkpointer` with its defaults, the newest two kept) does the same, each in a process of its own.

With `--hosts 2` it is the stall alone, of processes that have the state in equal parts and save it together: of each
save that of the host that stood still longest, the first save by itself. Once as it is; and once as on accelerators,
whose arrays cannot be held, so that the loop waits until Orbax has copied them, with what `prepare` does before.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from twins import Size, graph_of, tokens_of

FULL = Size(width=512, ffn=1408, heads=8, layers=11, vocabulary=8192, context=64, batch=2)
QUICK = Size(width=256, ffn=704, heads=8, layers=4, vocabulary=2048, context=64, batch=2)
MODES = ("affinage", "orbax", "no saves")
LOOPS = ("training", "copies")
ALONE = 8  # steps without a save
OF_HOSTS = ("affinage", "affinage, copied", "orbax")

LINES = (  # name, fact, unit, loop
    ("stall of the loop, first save", "first stall", "ms", "training"),
    ("stall of the loop, median", "stall", "ms", "training"),
    ("stall of the loop, most", "most stall", "ms", "training"),
    ("CPU of all threads in the stall, median", "own stall", "ms", "training"),
    ("the step after it, beyond one without a save, median", "step after", "ms", "training"),
    ("a save, until it is on disk", "save", "s", "training"),
    ("CPU of a save", "cpu", "s", "training"),
    ("wall clock that a save costs, median", "lost", "s", "training"),
    ("the default interval", "interval", "s", "training"),
    ("wall clock that a save costs, of the default interval", "lost share", "%", "training"),
    ("CPU of a save, of the default interval's steps", "share", "%", "training"),
    ("the hash of it, of the same", "hash", "%", "training"),
    ("most resident memory, training", "most memory", "x state", "training"),
    ("most resident memory, copies", "most memory", "x state", "copies"),
)


LINES_OF_HOSTS = (  # name, fact
    ("stall, first save", "first"),
    ("stall, median", "median"),
    ("stall, most", "most"),
)


def most_resident() -> int:
    """Bytes that this process had at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def saver(mode: str, folder: Path, state: Any) -> tuple[Any, Any]:
    """(start a save of a step and a state like this one, wait until all are on disk)."""
    if mode.startswith("affinage"):
        from affinage.checkpoint import CheckpointStore
        from affinage.checkpoint import store as of_store

        if mode == "affinage, copied":
            of_store.can_be_held, of_store.hold = (lambda state: False), (lambda state: None)
        store = CheckpointStore(folder)
        store.prepare(state.named())  # as the loop does, before its first step
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


def begin(loop: str, size: Size, steps: int, folder: Path, hosts: int = 1) -> tuple[Any, Any]:
    """(state, program that moves it on)."""
    import jax

    from affinage.config.training import PretrainSettings
    from affinage.hardware.devices import acquire
    from affinage.model import parse
    from affinage.parallel import make_mesh
    from affinage.training import TrainJob
    from affinage.training.program import Program

    settings = {"steps": steps, "batch_size": size.batch, "schedule": {"peak_lr": 1e-4, "min_lr": 1e-5}}
    job = TrainJob(
        graph=parse(graph_of("llama", size)),
        settings=PretrainSettings.model_validate(settings),
        mesh={"fsdp": hosts},
        seed=0,
        feed=Feed(size),
        folder=folder,
    )
    program = Program(job, make_mesh(job.mesh, acquire()[:hosts]), job.feed.batch())
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

    from affinage.hardware.devices import prepare

    prepare()
    state, move = begin(loop, size, 100 + 2 * saves, folder)
    gc.freeze()  # as the loop does
    return measured(mode, state, move, saves, folder)


def measured(mode: str, state: Any, move: Any, saves: int, folder: Path) -> dict[str, Any]:
    """What steps and saves take, by fact."""
    import jax

    from affinage.hardware.devices import give_back_freed_memory

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
    advance(ALONE)
    cpu_alone, alone = (time.process_time() - cpu) / ALONE, (time.perf_counter() - start) / ALONE
    steps_between = steps_between_saves(alone)
    cpu_between, between = cpu_alone * steps_between, alone * steps_between

    save, wait = saver(mode, folder / "steps", state)
    stalls, own, whole, cpu_of_save, longer, lost = [], [], [], [], [], []
    for number in range(saves + 1):
        start, cpu = time.perf_counter(), time.process_time()
        save(number, state.named())
        stalls.append(1e3 * (time.perf_counter() - start))
        own.append(1e3 * (time.process_time() - cpu))
        if number % 2:  # a save beside which no step runs
            wait()
            whole.append(time.perf_counter() - start)
            cpu_of_save.append(time.process_time() - cpu)
            advance(2)
            continue
        on = time.perf_counter()
        advance(1)
        longer.append(1e3 * (time.perf_counter() - on - alone))
        advance(1)
        wait()
        lost.append(time.perf_counter() - start - 2 * alone)
    return {
        "state": held,
        "first stall": stalls[0],
        "stall": statistics.median(stalls[1:]),
        "most stall": max(stalls[1:]),
        "own stall": statistics.median(own[1:]),
        "step after": statistics.median(longer[1:]),
        "save": statistics.median(whole),
        "cpu": statistics.median(cpu_of_save),
        "lost": statistics.median(lost[1:]),
        "interval": between,
        "lost share": 100 * statistics.median(lost[1:]) / between,
        "share": 100 * statistics.median(cpu_of_save) / cpu_between,
        "hash": 100 * _seconds_of_hash(folder / "steps") / cpu_between,
        "most memory": most_resident() / held,
    }


def steps_between_saves(seconds: float) -> float:
    """How many steps of so many seconds there are between two saves by default."""
    from affinage.config.runtime import CheckpointSettings

    default = CheckpointSettings()
    by_clock = math.inf if default.every_minutes is None else 60 * default.every_minutes / seconds
    return min(default.every_steps, by_clock)


def work_together(mode: str, size: Size, saves: int, folder: Path) -> dict[str, Any]:
    """One host's stalls of saves that all hosts make together, in ms."""
    from affinage.cluster.processes import init_distributed
    from affinage.hardware.devices import prepare

    prepare()
    with init_distributed() as processes, processes.all_at_work():
        import jax

        state, move = begin("copies", size, 100, folder, processes.count)
        save, wait = saver(mode, folder / "steps", state)
        stalls = []
        gc.freeze()
        for number in range(saves + 1):
            for _ in range(3):
                state = move(state)
                jax.block_until_ready(state)
            processes.barrier("a save that is measured")
            start = time.perf_counter()
            save(number, state.named())
            stalls.append(1e3 * (time.perf_counter() - start))
            state = move(state)
            jax.block_until_ready(state)
            wait()
        return {"state": sum(leaf.nbytes for leaf in jax.tree.leaves(state)), "stalls": stalls}


def of_hosts(mode: str, hosts: int, command: list[str]) -> dict[str, Any]:
    """What a save takes of the host that stood still longest, in ms."""
    from affinage.cluster.launch import reserved_port
    from affinage.cluster.processes import COORDINATOR, NUM_PROCESSES, PROCESS_ID

    port, address = reserved_port()
    with port:
        place = {COORDINATOR: address, NUM_PROCESSES: str(hosts)}
        runs = [
            subprocess.Popen(command, env={**os.environ, **place, PROCESS_ID: str(host)}, stdout=subprocess.PIPE)
            for host in range(hosts)
        ]
        said = [run.communicate()[0] for run in runs]
    if any(run.returncode for run in runs):
        raise SystemExit(f"{mode}: the hosts ended with {[run.returncode for run in runs]}")
    told = [json.loads(text.splitlines()[-1]) for text in said]
    stalls = [max(each) for each in zip(*(host["stalls"] for host in told), strict=True)]
    later = stalls[1:]
    return {"state": told[0]["state"], "first": stalls[0], "median": statistics.median(later), "most": max(later)}


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
    parser.add_argument("--hosts", type=int, default=1, help="processes that save together")
    parser.add_argument("--work", nargs=2, metavar=("MODE", "LOOP"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    size, saves = (QUICK, 6) if asked.quick else (FULL, asked.saves)
    if asked.work:
        mode, loop = asked.work
        found = work_together(mode, size, saves, asked.folder) if loop == "hosts" else None
        print(json.dumps(found or work(mode, loop, size, saves, asked.folder)))
        return
    results = one_host(asked, saves) if asked.hosts == 1 else many_hosts(asked, saves)
    print(json.dumps({"benchmark": "save_cost", **results}))


def one_host(asked: argparse.Namespace, saves: int) -> dict[str, Any]:
    """All lines of a host that is alone."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for loop, mode in itertools.product(LOOPS, MODES):
        with _command(asked, saves, mode, loop) as command:
            run = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found[loop, mode] = json.loads(run.stdout.splitlines()[-1])
        _say(f"{loop}, {mode}", found[loop, mode])
    results = []
    for name, key, unit, loop in LINES:
        ours, peer = found[loop, "affinage"][key], found[loop, "orbax"][key] if key != "hash" else None
        results.append({"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": peer and ours / peer})
    for loop in LOOPS:
        name, ours = f"most resident memory, {loop} without saves", found[loop, "no saves"]["most memory"]
        results.append({"name": name, "ours": ours, "peer": None, "unit": "x state", "ratio": None})
    return {"state_bytes": found["copies", "orbax"]["state"], "results": results}


def many_hosts(asked: argparse.Namespace, saves: int) -> dict[str, Any]:
    """The lines of hosts that save together."""
    found: dict[str, dict[str, Any]] = {}
    for mode in OF_HOSTS:
        with _command(asked, saves, mode, "hosts") as command:
            found[mode] = of_hosts(mode, asked.hosts, command)
        _say(f"{asked.hosts} hosts, {mode}", found[mode])
    results = []
    for mode, how in (("affinage", ""), ("affinage, copied", ", arrays copied as on accelerators")):
        for name, key in LINES_OF_HOSTS:
            ours, peer = found[mode][key], found["orbax"][key]
            name = f"{asked.hosts} hosts{how}: {name}"
            results.append({"name": name, "ours": ours, "peer": peer, "unit": "ms", "ratio": ours / peer})
    return {"state_bytes": found["orbax"]["state"], "results": results}


@contextlib.contextmanager
def _command(asked: argparse.Namespace, saves: int, mode: str, loop: str) -> Iterator[list[str]]:
    """What a process is told to do, in a folder that is gone afterwards."""
    folder = tempfile.mkdtemp(prefix="affinage-bench-")
    told = ["--work", mode, loop, "--folder", folder, "--saves", str(saves), *(["--quick"] if asked.quick else [])]
    try:
        yield [sys.executable, __file__, *told]
    finally:
        shutil.rmtree(folder)


def _say(what: str, found: dict[str, Any]) -> None:
    told = {name: round(value, 4) for name, value in found.items()}
    print(f"{what}:", told, "load", round(os.getloadavg()[0], 1), flush=True)


if __name__ == "__main__":
    main()

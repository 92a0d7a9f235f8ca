"""Runs the independent parts of a data stage on the cores of this machine; results never depend on how many."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from affinage.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[float], None]  # called with the share of the stage that is done, 0 to 1

POOL_BYTES = 48_000_000  # of text: below, starting processes (about a second) costs more than they gain


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def run_in_processes(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    bytes: int,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """`[function(task) for task in tasks]`, in new processes where `bytes` of text are worth their start.

    For work that holds the GIL. `function` must be importable by name, tasks and results picklable. Processes are
    spawned, not forked: JAX's threads do not survive a fork.
    """
    if workers is None:
        workers = cores() if bytes >= POOL_BYTES else 1
    workers = min(workers, len(tasks))
    if workers <= 1:
        return _collect(map(function, tasks), len(tasks), progress)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            return _collect(pool.map(function, tasks), len(tasks), progress)
        except BrokenProcessPool:
            raise UserError(
                "a worker process of the data stage ended without a result",
                fix="The usual cause is too little memory; run again with fewer cores (taskset -c 0 affinage ...).",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def run_in_threads(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """`[function(task) for task in tasks]` on threads: for kernels and Parquet work that release the GIL."""
    workers = min(cores() if workers is None else workers, len(tasks))
    if workers <= 1:
        return _collect(map(function, tasks), len(tasks), progress)
    with ThreadPoolExecutor(workers) as pool:
        return _collect(pool.map(function, tasks), len(tasks), progress)


def _collect(results: Iterable[Result], total: int, progress: Progress | None) -> list[Result]:
    done = []
    for result in results:
        done.append(result)
        if progress is not None:
            progress(len(done) / total)
    return done

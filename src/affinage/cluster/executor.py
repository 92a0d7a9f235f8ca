"""Run the tasks of a data step on the cores of this machine or on Ray. No result depends on which, or on how many."""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from affinage.config.data import DataSettings
from affinage.errors import UserError
from affinage.json_files import write_json
from affinage.network import with_retries

Task = TypeVar("Task")
Result = TypeVar("Result")
POOL_BYTES = 48_000_000  # of text: below, starting processes (about a second) costs more than they gain


class Executor:
    """Runs one function over many tasks, on the cores of this machine: in threads where they suffice, or processes."""

    def __init__(self, workers: int | None = None, progress: Callable[[str], None] = lambda message: None) -> None:
        """`workers` tasks run at the same time; by default one a core, where the work is worth starting processes."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or cores
        self._requested, self._progress = workers, progress  # which receives a message after every task
        self._processes: ProcessPoolExecutor | None = None  # of all of its maps: starting them takes a second

    def close(self) -> None:
        """End its processes once their tasks are done."""
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)
            self._processes = None

    def map(
        self,
        fn: Callable[[Task], Result],
        tasks: Sequence[Task],
        out: Path | None = None,
        *,
        bytes: int = POOL_BYTES,
        threads: bool = False,
        label: str = "",
    ) -> list[Result]:
        """Return `[fn(task) for task in tasks]`, in this order.

        With a folder `out` a complete task leaves `completions/<number>.json` in it with its result, which must be
        JSON, and is skipped the next time. `fn` must be importable by name, unless `threads`: for work in kernels and
        Parquet. Below `POOL_BYTES` (`bytes`) no processes are started. TransientError: the network keeps failing.
        """
        done, missing = dict[int, Result](), dict[int, tuple[Task, Path | None]]()
        for number, task in enumerate(tasks):
            place = None if out is None else out / f"completions/{number:05d}.json"
            completion = json.loads(place.read_text(encoding="utf-8")) if place and place.is_file() else {}
            if completion.get("task") == repr(task):
                done[number] = completion["result"]
            else:
                missing[number] = task, place
        workers = min(self.workers if self._requested or threads or bytes >= POOL_BYTES else 1, len(missing))
        with contextlib.closing(self._results(partial(_run, fn), [*missing.values()], workers, threads)) as results:
            for number, result in zip(missing, results):
                done[number] = result
                self._progress(f"{label} {len(done) / len(tasks):.0%}".strip())
        return [done[number] for number in range(len(tasks))]

    def _results(self, run: Callable[[Any], Any], todo: list[Any], workers: int, threads: bool) -> Generator[Any]:
        """The results in the order of the tasks."""
        if workers <= 1:
            yield from map(run, todo)
        elif threads:
            with ThreadPoolExecutor(workers) as pool:
                yield from pool.map(run, todo)
        else:
            if self._processes is None:  # not forked: JAX's threads do not survive a fork
                self._processes = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))
            try:
                yield from self._processes.map(run, todo)
            except BrokenExecutor:
                self.close()
                fix = "The usual cause is too little memory; run again with fewer: --set data.workers=1."
                raise UserError("a worker process of the data step ended without a result", fix=fix) from None


class RayExecutor(Executor):
    """The same on Ray's workers. On several machines the folder of runs must be one that all of them see."""

    def __init__(self, ray: Any, workers: int | None, progress: Callable[[str], None]) -> None:
        """`ray`: the module, connected."""
        super().__init__(workers or max(1, int(ray.cluster_resources().get("CPU", 1))), progress)
        self._ray = ray

    def _results(self, run: Callable[[Any], Any], todo: list[Any], workers: int, threads: bool) -> Generator[Any]:
        # As an object: Ray limits the size of functions, and closures hold tables, which workers of a machine share.
        shared = self._ray.put(run)
        remote = self._ray.remote(num_cpus=1, max_retries=3)(lambda run, task: run(task))
        ahead = 8 * self.workers  # tasks that Ray receives in advance
        waiting = [remote.remote(shared, task) for task in todo[:ahead]]
        for position in range(len(todo)):
            try:
                yield self._ray.get(waiting[position])
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, UserError) else error from None
            waiting[position] = None  # lets Ray forget the result
            waiting += [remote.remote(shared, task) for task in todo[position + ahead : position + ahead + 1]]


LOCAL = Executor()


@contextlib.contextmanager
def open_executor(settings: DataSettings, progress: Callable[[str], None] = lambda message: None) -> Iterator[Executor]:
    """The executor of a recipe."""
    workers = None if settings.workers == "auto" else settings.workers
    if settings.executor == "local":
        with contextlib.closing(Executor(workers, progress)) as executor:
            yield executor
        return
    from affinage.cluster.ray_cluster import connect  # Ray is an extra

    ours = "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    ray = connect(settings.ray_address, workers, where="data.ray_address")
    try:
        yield RayExecutor(ray, workers, progress)
    finally:
        if ours:
            ray.shutdown()


def clear_completions(out: Path) -> None:
    """Remove the completions of a step that is complete: they are no part of its result."""
    shutil.rmtree(out / "completions", ignore_errors=True)


def _run(fn: Callable[[Any], Any], work: tuple[Any, Path | None]) -> Any:
    """Run one task, again where the network fails for a while, and write its completion."""
    task, completion = work
    result = with_retries(partial(fn, task))
    if completion is not None:
        completion.parent.mkdir(parents=True, exist_ok=True)
        write_json(completion, {"task": repr(task), "result": result})
    return result

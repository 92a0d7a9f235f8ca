"""Who runs the independent parts of a data stage: this machine's cores, or a Ray cluster. No result depends on it."""

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from typing import TypeVar

from affinage.config.data import DataSettings
from affinage.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[float], None]  # called with the share of the stage that is done, 0 to 1

POOL_BYTES = 48_000_000  # of text: below, starting processes (about a second) costs more than they gain


class Engine(ABC):
    """Runs one function over many tasks.

    Tasks are read from and written to files that all workers see; what travels is small and picklable.
    """

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many tasks run at the same time."""

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        *,
        bytes: int = POOL_BYTES,
        releases_gil: bool = False,
        progress: Progress | None = None,
    ) -> list[Result]:
        """`[function(task) for task in tasks]`, in this order.

        `function` must be importable by name. `bytes` of text in all tasks: where they are few, no processes are
        started for them. `releases_gil`: the work is in kernels and Parquet, so that threads do, and a closure too.
        """
        done: list[Result] = []
        with closing(self._results(function, tasks, worth=bytes >= POOL_BYTES, releases_gil=releases_gil)) as results:
            for result in results:
                done.append(result)
                if progress is not None:
                    progress(len(done) / len(tasks))
        return done

    @abstractmethod
    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, worth: bool, releases_gil: bool
    ) -> Generator[Result]:
        """One after the other, in the order of the tasks; `worth`: starting processes for them is."""


class LocalEngine(Engine):
    """The cores of this machine: threads where they suffice, else processes."""

    def __init__(self, workers: int | None = None) -> None:
        """`workers`: None for all cores, where the work is worth starting processes; a number is taken as it is."""
        self._asked = workers

    @property
    def workers(self) -> int:
        """How many tasks run at the same time."""
        return cores() if self._asked is None else self._asked

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, worth: bool, releases_gil: bool
    ) -> Generator[Result]:
        workers = min(self._asked or (cores() if worth or releases_gil else 1), len(tasks))
        if workers <= 1:
            yield from map(function, tasks)
        elif releases_gil:
            with ThreadPoolExecutor(workers) as threads:
                yield from threads.map(function, tasks)
        else:
            yield from self._from_processes(function, tasks, workers)

    def _from_processes(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], workers: int
    ) -> Generator[Result]:
        # Spawned, not forked: JAX's threads do not survive a fork.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                yield from pool.map(function, tasks)
            except BrokenProcessPool:
                raise UserError(
                    "a worker process of the data stage ended without a result",
                    fix="The usual cause is too little memory; run again with fewer: --set data.workers=1.",
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)


LOCAL = LocalEngine()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@contextmanager
def open_engine(settings: DataSettings) -> Iterator[Engine]:
    """The engine that a recipe asks for (`data.executor`, `data.workers`), shut down afterwards."""
    workers = None if settings.workers == "auto" else settings.workers
    if settings.executor == "local":
        yield LocalEngine(workers)
        return
    from affinage.data.ray_engine import RayEngine  # Ray is an extra

    with RayEngine(workers, settings.ray_address, may_be_open=settings.ray_open_cluster) as engine:
        yield engine

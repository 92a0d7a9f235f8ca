"""The data stages on Ray: the same functions on the same files, in tasks of a cluster or of this machine."""

import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from affinage.cluster.ray_cluster import connect
from affinage.data.engine import Engine, Result, Task
from affinage.errors import UserError

_WAITING = 8  # tasks per worker that Ray is given in advance


def _applied(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)


class RayEngine(Engine):
    """Ray's workers. On several machines the folder of runs must be one that all of them see."""

    def __init__(
        self, workers: int | None = None, address: str = "", temporary: Path | None = None, may_be_open: bool = False
    ) -> None:
        """Use as a context manager.

        Args:
            workers: tasks at the same time; None for all CPUs that Ray has.
            address: of a running cluster (`auto`, `HOST:6379`, `ray://HOST:10001`); empty starts one on this machine,
                which listens on the loopback address only and ends with the context.
            temporary: where a Ray of our own keeps its sockets and logs; its path must be short.
            may_be_open: join also a cluster that asks for no token.
        """
        self._asked, self._address, self._temporary, self._may_be_open = workers, address, temporary, may_be_open
        self._ray: Any = None

    def __enter__(self) -> "RayEngine":
        ray = sys.modules.get("ray")
        self._ours = ray is None or not ray.is_initialized()
        self._ray = connect(
            self._address,
            self._asked,
            asked_by="data.executor",
            address_by="data.ray_address",
            open_by="data.ray_open_cluster: true",
            may_be_open=self._may_be_open,
            temporary=self._temporary,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            self._ray.shutdown()

    @property
    def workers(self) -> int:
        """How many tasks run at the same time."""
        return self._asked or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, worth: bool, releases_gil: bool
    ) -> Generator[Result]:
        # As an object and not as a function, for which Ray has a limit of size: closures hold indexes and tables, which
        # the workers of a machine then share.
        shared = self._ray.put(function)
        remote = self._ray.remote(num_cpus=1, max_retries=3)(_applied)
        ahead = _WAITING * self.workers
        waiting = [remote.remote(shared, task) for task in tasks[:ahead]]
        for position in range(len(tasks)):
            try:
                result = self._ray.get(waiting[position])
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise
            waiting[position] = None  # lets Ray forget the result
            if position + ahead < len(tasks):
                waiting.append(remote.remote(shared, tasks[position + ahead]))
            yield result

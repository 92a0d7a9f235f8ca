"""What stands on each machine of a Ray cluster: it starts a host's process there, and tells of it."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import affinage
from affinage.hardware.hosts import HOST
from affinage.launch.forked import ForkedProcess, Forks
from affinage.launch.process import reserved_port
from affinage.launch.remains import Remains

_NEWS = 0.5  # seconds that an agent waits for something to tell


class Job(NamedTuple):
    """What a host runs."""

    program: list[str]  # words of Python: -m MODULE or a script
    command: list[str]
    environment: dict[str, str]
    files: dict[str, bytes]
    modules: tuple[str, ...]  # imported once for all starts


class Agent:
    """On a machine of the cluster: starts a host's process, tells what it writes and how it ends.

    The process is forked from one that outlives the agent for a while, and is no child of either: Ray kills the
    children of a worker that it ends.

    Args:
        group: of the command, see `affinage.launch.remains`.
        launch: who started all this; another launcher has another one.
        host: the process's number.
        lasting: seconds in which an agent that Ray has started anew finds what was imported for the one before.
    """

    def __init__(self, group: str, launch: str, host: int, lasting: float) -> None:
        self._group, self._launch, self._host, self._lasting = group, launch, host, lasting
        self._process: ForkedProcess | None = None
        self._held: Any = None

    def where(self) -> str:
        """The machine's address."""
        import ray.util

        return str(ray.util.get_node_ip_address())

    def worker(self) -> int:
        """The number of Ray's process."""
        return os.getpid()

    def coordinator(self) -> str:
        """Where host 0 of the next start is to listen."""
        self._release()
        self._held, address = reserved_port(self.where())
        return address

    def start(self, start: str, job: Job, place: dict[str, str]) -> None:
        """Start the process, once none of earlier starts runs here."""
        remains = Remains(self._group, start)
        remains.end()
        at = _put(job.files, remains.folder / "files")
        words = [*(job.program or ["-m", "affinage"]), *(at.get(word, word) for word in job.command)]
        # The code that is here, which may be the one that Ray brought.
        code = str(Path(affinage.__file__).parents[1])
        environment = {
            **os.environ,
            **job.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")])),
        }
        own = {**environment, **place, HOST: str(self._host)}
        self._process = self._forks(environment, job.modules).start(words, own, [self._group, start])

    def news(self) -> tuple[list[str], int | None]:
        """See `affinage.launch.process.HostProcess.news`."""
        assert self._process is not None
        return self._process.news(_NEWS)

    def tell(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None:
            self._process.tell(signal.Signals(number))

    def end(self) -> None:
        """Kill the process, if it runs."""
        if self._process is not None:
            self._process.end()
        self._release()

    def finish(self) -> None:
        """Kill the process, and keep nothing for another one."""
        self.end()
        self._forks({}, ()).leave()

    def _forks(self, environment: Mapping[str, str], modules: Sequence[str]) -> Forks:
        at = Remains(self._group, "").folder / f"{self._launch}-{self._host}"
        return Forks(at, environment, signal.SIGTERM, self._lasting, modules)

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()


def _put(files: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Where each file is on this machine: at its own path if that holds the same, else below `folder`."""
    found = {}
    for path, content in files.items():
        own = Path(path)
        if own.is_file() and own.read_bytes() == content:
            found[path] = path
            continue
        put = folder / own.relative_to(own.anchor)
        put.parent.mkdir(parents=True, exist_ok=True)
        put.write_bytes(content)
        found[path] = str(put)
    return found

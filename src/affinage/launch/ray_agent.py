"""What stands on each machine of a Ray cluster: it starts a host's process there, and tells of it."""

import hashlib
import json
import os
import signal
import sys
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
    files: dict[str, bytes]


class Agent:
    """On a machine of the cluster: starts a host's process, tells what it writes and how it ends.

    The process is forked from one that outlives the agent for a while, and is no child of either: Ray kills the
    children of a worker that it ends.

    Args:
        group: of the command, see `affinage.launch.remains`.
        host: the process's number.
        environment: that the process has beside this one's.
        modules: imported once for all starts.
        lasting: seconds in which another agent finds what was imported for this one, be it another driver's.
    """

    def __init__(
        self, group: str, host: int, environment: Mapping[str, str], modules: Sequence[str], lasting: float
    ) -> None:
        self._group, self._host = group, host
        # The code that is here, which may be the one that Ray brought.
        code = Path(affinage.__file__).parent
        path = os.pathsep.join(filter(None, [str(code.parent), os.environ.get("PYTHONPATH")]))
        self._environment = {**os.environ, **environment, "PYTHONPATH": path}
        imported = Remains(group, "").folder / f"{_imports(code, self._environment, modules)}-{host}"
        self._forks = Forks(imported, self._environment, signal.SIGTERM, lasting, modules)
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
        own = {**self._environment, **place, HOST: str(self._host)}
        self._process = self._forks.start(words, own, [self._group, start])

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
        self._forks.leave()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()


def _imports(code: Path, environment: Mapping[str, str], modules: Sequence[str]) -> str:
    """A name for what is imported of modules: another one in another environment, of other code or packages."""
    told = {name: value for name, value in environment.items() if not name.startswith("RAY_")}  # of Ray's worker
    packages = [name for place in filter(os.path.isdir, sys.path) for name in os.listdir(place)]
    packages = [name for name in packages if name.endswith((".dist-info", ".egg-info"))]  # with their versions
    facts = [sys.executable, sys.path, sorted(packages), sorted(told.items()), list(modules)]
    found = hashlib.sha256(json.dumps(facts).encode())
    for file in sorted(code.rglob("*.py")):  # not when it was written: Ray brings it again and again
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


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

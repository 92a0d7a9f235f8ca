"""Hosts that are machines which ssh reaches: of a slice, or of one's own."""

import contextlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from affinage.errors import UserError
from affinage.hardware.hosts import COORDINATOR, HOST, HOSTS
from affinage.launch.gang import Ending
from affinage.launch.local import Watch
from affinage.launch.process import HostProcess, Say, of_cpu, status_of_shell

PORT = 8476  # where host 0 listens; JAX's own default on pods of TPUs
_LOST = 255  # exit status of ssh itself
_CONNECT = 20  # seconds
_OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    f"ConnectTimeout={_CONNECT}",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "LogLevel=ERROR",
)
_TELL = 30.0  # seconds for a signal to reach a host


class SshLauncher:
    """The same command on every machine, in the same folder, over one ssh connection each.

    A host's process has the terminal of its connection: when that is closed, or lost, it gets SIGHUP and ends.

    Args:
        addresses: of the machines, as ssh takes them; the first is host 0.
        folder: to work in on each of them, made if it is not there.
        program: how affinage is called there.
        prepare: a command that is run on each before the first start, such as an installation; "" for none.
        files: path here -> content, put below `folder` on each before the first start; words of the command that are
            such a path are replaced by where the file is there.
        coordinator: address of host 0 as the others reach it; default: the first of `addresses`, without a user's name.
        port: where host 0 listens.
        devices: of each host, played by its CPU; None: what JAX finds.
        ssh: the program and its options.
        say: takes the lines that the hosts write, each with the number of its host before it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        folder: str = "affinage",
        program: str = "affinage",
        prepare: str = "",
        files: Mapping[str, bytes] | None = None,
        coordinator: str = "",
        port: int = PORT,
        devices: int | None = None,
        ssh: Sequence[str] = ("ssh",),
        say: Say = print,
    ) -> None:
        if any(not address or address.startswith("-") for address in addresses):
            raise UserError(f"these are no addresses: {', '.join(addresses)}", where="--machines", fix="Say a,b,c.")
        self.hosts, self._addresses = len(addresses), list(addresses)
        self._folder, self._program, self._prepare = folder, program, prepare
        self._files, self._say, self._ssh = dict(files or {}), say, [*ssh, *_OPTIONS]
        address = coordinator or addresses[0].rpartition("@")[2]
        dumb = {"TERM": "dumb", "NO_COLOR": "1"}
        self._place = {COORDINATOR: f"{address}:{port}", HOSTS: str(self.hosts), **dumb, **of_cpu(devices)}
        self._prepared = False

    def start(self, command: Sequence[str]) -> "SshGang":
        """See `affinage.launch.gang.Launcher`."""
        if not self._prepared:
            self._prepare_all()
            self._prepared = True
        words = [_below(word) if word in self._files else word for word in command]
        line = f"{self._program} {shlex.join(words)}"
        lines = []
        for host in range(self.hosts):
            place = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**self._place, HOST: str(host)}.items())
            # The number of the process that `exec` turns into affinage, for those who send it signals.
            lines.append(f"cd {shlex.quote(self._folder)} && echo $$ > .host-{host} && exec env {place} {line}")
        return SshGang(self._ssh, self._addresses, self._folder, lines, self._say)

    def _prepare_all(self) -> None:
        """Make the folder, put the files, run the preparation; on all at the same time."""
        place = shlex.quote(self._folder)
        steps = [f"mkdir -p {place} && cd {place}"]
        for path, content in self._files.items():
            at = _below(path)
            steps.append(f"mkdir -p {shlex.quote(str(Path(at).parent))} && head -c {len(content)} > {shlex.quote(at)}")
        if self._prepare:
            steps.append(f"{{ {self._prepare}; }} < /dev/null")
        run = [
            subprocess.Popen(
                [*self._ssh, address, " && ".join(steps)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for address in self._addresses
        ]
        given = b"".join(self._files.values())
        for address, process in zip(self._addresses, run):
            said, _ = process.communicate(given)
            if process.returncode:
                for other in run:
                    other.kill()
                last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
                raise UserError(
                    f"host {address} cannot be prepared: {last[0]}",
                    where="ssh" if process.returncode == _LOST else "--prepare",
                    fix=f"Try it: {shlex.join([*self._ssh, address, 'true'])}",
                )


class SshGang:
    """See `affinage.launch.gang.Gang`."""

    def __init__(
        self, ssh: Sequence[str], addresses: Sequence[str], folder: str, lines: Sequence[str], say: Say
    ) -> None:
        self._ssh, self._addresses, self._folder = ssh, addresses, folder
        # A terminal is asked for so that the end of the connection is the host's; it is not one to draw on.
        self._processes = [HostProcess([*ssh, "-tt", address, line]) for address, line in zip(addresses, lines)]
        self._watch = Watch(self._processes, say, addresses)

    def ended(self, seconds: float) -> list[Ending]:
        """See `affinage.launch.gang.Gang`."""
        return [replace(ending, status=status_of_shell(ending.status)) for ending in self._watch.ended(seconds)]

    def tell(self, number: signal.Signals) -> None:
        """See `affinage.launch.gang.Gang`."""
        name = number.name.removeprefix("SIG")
        self._on_all(lambda host: f"kill -{name} $(cat .host-{host})")

    def end(self) -> None:
        """See `affinage.launch.gang.Gang`."""
        # With the whole session of the connection, in case that something started by the host does not heed its end.
        self._on_all(lambda host: f"read p < .host-{host}; rm .host-{host}; kill -KILL -- -$p $p")
        for process in self._processes:
            process.end()

    def _on_all(self, command: Callable[[int], str]) -> None:
        folder = shlex.quote(self._folder)
        asked = [
            subprocess.Popen(
                [*self._ssh, self._addresses[host], f"cd {folder} && test -e .host-{host} && {{ {command(host)}; }}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for host in self._watch.running()
        ]
        until = time.monotonic() + _TELL
        for process in asked:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()


def _below(path: str) -> str:
    """Where a file of this machine is put, relative to the folder there."""
    own = Path(path)
    return str(Path("files") / own.relative_to(own.anchor))

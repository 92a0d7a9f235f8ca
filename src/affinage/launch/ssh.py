"""Hosts that are machines which ssh reaches: of a slice, or of one's own."""

import contextlib
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from affinage.errors import EXIT_PREEMPTED, UserError
from affinage.hardware.hosts import COORDINATOR, HOST, HOSTS
from affinage.launch.gang import Ending
from affinage.launch.local import Watch
from affinage.launch.process import HostProcess, Say, of_cpu, start_all, status_of_shell
from affinage.launch.told import interruptible

PORT = 8476  # where host 0 listens; JAX's own default on pods of TPUs
_LOST = 255  # exit status of ssh itself
_SILENT = "it does not answer"
_CONNECT = 20  # seconds
_OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    f"ConnectTimeout={_CONNECT}",
    "-o",
    "ServerAliveInterval=5",  # a machine that is dead ends its connection after 15 to 20 s
    "-o",
    "ServerAliveCountMax=3",
    "-o",
    "LogLevel=ERROR",
)
_ANSWERS = 60.0  # seconds for a machine to make a folder and to take the files
_PREPARES = 3600.0  # seconds for the user's own command to prepare a machine
_TELL = 30.0  # seconds for a signal to reach a host
# What a host runs, with the command in place of the %s. A shell stays with the program, because ssh's own status for a
# connection that is lost, 255, is also what it makes of a signal's kill. When the connection is lost the shell gets
# SIGHUP, and tells the program to save by SIGTERM. A signal makes `wait` come back early.
_SHELL = """\
trap 'kill -TERM $! || exit' HUP TERM
(trap '' HUP; exec env %s) < /dev/null &
echo $! $$ > .host-$AFFINAGE_HOST
while wait $!; s=$?; kill -0 $! 2> /dev/null; do :; done
test $s -ne 255 || s=1
exit $s
"""


class SshLauncher:
    """The same command on every machine, in the same folder, over one ssh connection each.

    A host's process has the terminal of its connection: when that is closed, or lost, it is told to stop.

    Args:
        addresses: of the machines, as ssh takes them; the first is host 0.
        folder: to work in on each of them, made if it is not there.
        program: how affinage is called there.
        prepare: a command that is run on each before the first start, such as an installation; "" for none.
        files: path here -> content, put below `folder` on each before a start; words of the command that are such a
            path are replaced by where the file is there.
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
        place = {COORDINATOR: f"{address}:{port}", HOSTS: str(self.hosts)}
        self._place = {**place, "TERM": "dumb", "NO_COLOR": "1", **of_cpu(devices)}
        self._prepared = False

    def start(self, command: Sequence[str]) -> "SshGang":
        """See `affinage.launch.gang.Launcher`. A machine that is not reached is told before any other has begun."""
        self._prepare_all("" if self._prepared else self._prepare)
        self._prepared = True
        words = [_below(word) if word in self._files else word for word in command]
        lines = []
        for host in range(self.hosts):
            place = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**self._place, HOST: str(host)}.items())
            shell = _SHELL % f"{self._program} {shlex.join(words)}"
            lines.append(f"cd {shlex.quote(self._folder)} && exec env {place} sh -c {shlex.quote(shell)}")
        return SshGang(self._ssh, self._addresses, self._folder, lines, self._say)

    def finish(self) -> None:
        """See `affinage.launch.gang.Launcher`: nothing is kept."""

    def _prepare_all(self, prepare: str) -> None:
        """Make the folder, put the files, run a command; on all at the same time."""
        place = shlex.quote(self._folder)
        steps = [f"mkdir -p {place} && cd {place}"]
        for path, content in self._files.items():
            at = _below(path)
            steps.append(f"mkdir -p {shlex.quote(str(Path(at).parent))} && head -c {len(content)} > {shlex.quote(at)}")
        if prepare:
            steps.append(f"{{ {prepare}; }} < /dev/null")
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
        try:
            with interruptible():
                for address, process in zip(self._addresses, run):
                    try:
                        said, _ = process.communicate(given, timeout=_PREPARES if prepare else _ANSWERS)
                    except subprocess.TimeoutExpired:
                        raise _endless(address) if prepare else self._unprepared(address, _LOST, _SILENT) from None
                    if process.returncode:
                        raise self._unprepared(address, process.returncode, said.decode(errors="replace"))
        finally:
            for process in run:
                process.kill()

    def _unprepared(self, address: str, status: int, said: str) -> UserError:
        last = said.strip().splitlines()[-1:] or ["it says nothing"]
        return UserError(
            f"host {address} cannot be prepared: {last[0]}",
            where="ssh" if status == _LOST else "--prepare",
            fix=f"Try it: {shlex.join([*self._ssh, address, 'true'])}",
        )


def _endless(address: str) -> UserError:
    return UserError(
        f"host {address} cannot be prepared: the command has not ended within {_PREPARES / 60:g} minutes",
        where="--prepare",
        fix="A program that it leaves running must not hold its output: PROGRAM > /dev/null 2>&1 &",
    )


class SshGang:
    """See `affinage.launch.gang.Gang`."""

    def __init__(
        self, ssh: Sequence[str], addresses: Sequence[str], folder: str, lines: Sequence[str], say: Say
    ) -> None:
        self._ssh, self._addresses, self._folder = ssh, addresses, folder
        # A terminal is asked for so that the end of the connection is the host's; it is not one to draw on.
        self._processes = start_all(
            HostProcess([*ssh, "-tt", address, line]) for address, line in zip(addresses, lines)
        )
        self._out_of_sight: set[int] = set()
        self._watch = Watch(self._processes, say, addresses)

    def ended(self, seconds: float) -> list[Ending]:
        """See `affinage.launch.gang.Gang`."""
        return [self._seen(ending) for ending in self._watch.ended(seconds)]

    def _seen(self, ending: Ending) -> Ending:
        if ending.status != _LOST:
            return replace(ending, status=status_of_shell(ending.status))
        self._out_of_sight.add(ending.host)
        return replace(ending, status=EXIT_PREEMPTED, out_of_sight=True)

    def tell(self, number: signal.Signals) -> None:
        """See `affinage.launch.gang.Gang`."""
        kill = f"kill -{number.name.removeprefix('SIG')} $p"
        self._on_all([(host, kill) for host in self._watch.running()])

    def end(self) -> None:
        """See `affinage.launch.gang.Gang`."""
        # With the whole session of the connection, in case that something started by the host does not heed its end.
        kill = "rm $f; kill -s KILL -- -$s $p"
        # What was lost sight of may have ended: its number must not have become another's.
        lost = [(host, f"grep -q host- /proc/$s/cmdline && {{ {kill}; }}") for host in self._out_of_sight]
        self._on_all([*((host, kill) for host in self._watch.running()), *lost])
        self._out_of_sight.clear()
        for process in self._processes:
            process.end()

    def _on_all(self, commands: Sequence[tuple[int, str]]) -> None:
        """Run a command on each host that has begun; $p is its program, $s the shell, $f where that is written."""
        place = f"cd {shlex.quote(self._folder)} && f=.host-"
        asked = [
            subprocess.Popen(
                [*self._ssh, self._addresses[host], f"{place}{host} && test -e $f && {{ read p s < $f; {command}; }}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for host, command in commands
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

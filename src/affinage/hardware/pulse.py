"""Shows a small process beside this one that this one lives, as no thread of it can tell that all of them stand.

That process is `affinage.hardware.guard`.
"""

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from affinage.hardware.beats import SILENT_FOR_LONG
from affinage.hardware.hosts import COORDINATOR, Hosts, with_host
from affinage.hardware.stacks import say, where
from affinage.hardware.standstill import ELSEWHERE, patience_of, stays_when_stuck
from affinage.stopping import PARENT, OwnProcess

if TYPE_CHECKING:
    from affinage.config.runtime import RuntimeSettings

_EVERY = 1.0  # seconds
_TO_SPEAK = 4.0  # seconds in which other hosts, which see no sign either, tell their stacks and leave
_ENDED_WITHIN = 5.0  # seconds for the process, and for the thread; what hangs is not waited for


@contextlib.contextmanager
def guarded(name: str, settings: "RuntimeSettings") -> Iterator[None]:
    """Inside, another process tells when this one shows no sign of life for hang_timeout.

    That is one that is stopped (SIGSTOP), or whose threads native code lets none run, at whatever it is, also while it
    joins the others. Where it is started again it is killed, so that it is: soon if it is stopped, else late. Where
    nobody watches over it, it is killed as late as it would leave by itself, and not if it is stopped, which a user at
    a terminal may want (Ctrl-Z stops the other process, too).
    """
    if OwnProcess.current is None or sys.platform == "win32":
        yield
        return
    watched_over = PARENT in os.environ or COORDINATOR in os.environ
    patience, stays = max(patience_of(settings), SILENT_FOR_LONG), stays_when_stuck(settings, Hosts.current)
    stays = stays if os.path.exists("/proc/self/stat") else math.inf  # else nothing tells that a process is stopped
    stopped = patience + _TO_SPEAK if watched_over and stays < math.inf else math.inf
    longest = max(patience, ELSEWHERE * settings.hang_timeout, stays)
    words = [str(Path(__file__).with_name("guard.py")), *map(str, (os.getpid(), patience, stopped, longest))]
    try:
        guard = subprocess.Popen(
            [sys.executable, "-IS", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
        )
    except OSError as error:  # no process can be had; the run can do without
        say(f"{with_host(name)}: no process looks whether this one lives: {error}")
        yield
        return
    assert guard.stdin is not None
    os.set_blocking(guard.stdin.fileno(), False)
    _tell(name, guard.stdin)  # before anything can stop this one, so that it has a name
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(name, guard.stdin, ended), name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        guard.kill()  # not by the end of what it reads: a process that was forked meanwhile may hold that open
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_ENDED_WITHIN)
        thread.join(_ENDED_WITHIN)
        if not thread.is_alive():
            guard.stdin.close()


def _show(name: str, guard: IO[bytes], ended: threading.Event) -> None:
    while not ended.wait(_EVERY):
        _tell(name, guard)


def _tell(name: str, guard: IO[bytes]) -> None:
    try:
        said = f"{with_host(name)}\t{where()}\n"
    except Exception:  # a sign of life all the same
        said = f"{name}\tan unknown place\n"
    with contextlib.suppress(OSError):  # the other one is gone, or does not read
        guard.write(said.encode(errors="replace"))

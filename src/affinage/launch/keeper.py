"""Stands between a program that kills its children and the process of a host, which is to be asked to save.

    python -m affinage.launch.keeper GROUP START COMMAND...

runs the command, passes signals on to it, and ends as it does. When this process is killed, or the one that started it
ends, the command gets SIGTERM.
"""

import os
import signal
import subprocess
import sys

from affinage.launch.remains import Remains
from affinage.stopping import PARENT, PARENT_SIGNAL, die_with_parent

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(group: str, start: str, *command: str) -> int:
    """See the module; returns the exit status of the command, 128 + N if signal N killed it."""
    os.environ.pop(PARENT_SIGNAL, None)
    die_with_parent()
    environment = {**os.environ, PARENT: str(os.getpid()), PARENT_SIGNAL: str(int(signal.SIGTERM))}
    early: list[int] = []  # told before there is somebody to pass it on to
    for number in _PASSED_ON:
        signal.signal(number, lambda told, frame: early.append(told))
    process = subprocess.Popen(command, env=environment)
    for number in _PASSED_ON:
        signal.signal(number, lambda told, frame: process.send_signal(told))
    for told in early:
        process.send_signal(told)
    Remains(group, start).note(process.pid)
    status = process.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

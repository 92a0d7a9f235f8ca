"""A process beside a run that tells when the run shows no sign of life; `affinage.hardware.pulse` starts it.

    python guard.py PROCESS PATIENCE STOPPED LONGEST

reads a line from standard input for every sign of life of PROCESS: who it is, a tab, and where its main thread is.
After PATIENCE seconds without one it says so on standard error. It ends PROCESS after STOPPED seconds if that is
stopped, for it does not go on by itself; any other, which may wait for a disk in native code, after LONGEST; inf is
never. It leaves when PROCESS does. It imports nothing of ours, so that it starts at once and is small.
"""

import contextlib
import os
import select
import signal
import sys
import time

_LOOK_EVERY = 1.0  # seconds
_JUMP = 5.0  # seconds between two looks: this one was stopped, too, with all of the group (Ctrl-Z), or the machine


def main(process: int, patience: float, stopped: float, longest: float) -> None:
    """See the module."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the other's, with which this one ends
    heard = looked = time.monotonic()
    who, where, told, ended = f"process {process}", "its start", False, 0.0
    while os.getppid() == process:
        signs, _, _ = select.select([0], [], [], _LOOK_EVERY)
        now = time.monotonic()
        if signs:
            said = os.read(0, 65536).decode(errors="replace").splitlines()
            if not said:
                return
            who, _, where = said[-1].partition("\t")
        if signs or now - looked > _JUMP:
            if told:
                _say(f"{who} shows signs of life again")
            heard, told, ended = now, False, 0.0
        looked = now
        silent, state = now - heard, _state(process)
        if silent > patience and not told:
            told = True
            how = {"T": "it is stopped, as by SIGSTOP; ", "t": "a debugger has stopped it; "}.get(state, "")
            _say(f"{who} shows no sign of life for {silent:.0f} s: {how}it was last at {where}")
        if told and state != "t" and silent > (stopped if state == "T" else longest):
            if not ended:
                ended = now
                _say(f"{who} is ended")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            elif now - ended > _JUMP:
                _say(f"{who} cannot be ended from here, as the first process of a container cannot: end it by hand")
                return


def _state(process: int) -> str:
    """The letter that Linux has for what a process is at; "" where it does not tell."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody may read it any more
        os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))

"""Whether all processes of a run see one folder of runs, which they must."""

import secrets
import socket
import time
from pathlib import Path

from affinage.cluster.processes import Processes
from affinage.errors import UserError

_SHOWN_WITHIN = 20.0  # seconds: a network file system may be late to show what another machine wrote
_LOOK_EVERY = 0.1  # seconds


def check_same_folder(processes: Processes, folder: Path, *, within: float = _SHOWN_WITHIN) -> None:
    """Refuse to continue where a process does not see what the first one writes into the folder of runs.

    All processes call it and raise the same error; where the first one cannot write, it alone raises. A process that
    sees nothing for `within` seconds does not see it.

    Raises:
        UserError: naming these processes, their machines and folders; or why the first one cannot write there.
    """
    if processes.count == 1:
        return
    here = f"{folder.absolute()} on {socket.gethostname()}"
    mark = folder / f".seen-{secrets.token_hex(8)}"
    if processes.first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise UserError(
                f"process 0 cannot write there: {(error.strerror or str(error)).lower()}",
                where=f"the folder of runs, {here}",
                fix="Give all processes a --runs that can be written to, on a disk with room.",
            ) from error
    try:
        name = processes.broadcast("a file in the folder of runs", mark.name)
        seen = processes.all_gather("who sees the file", [_shows(folder / name, within), here], seconds=3 * within + 60)
    finally:
        if processes.first:
            mark.unlink(missing_ok=True)
    blind = [f"process {index} has {where}" for index, (shown, where) in enumerate(seen) if not shown]
    if blind:
        raise UserError(
            f"{' and '.join(blind)}: nothing is there of what process 0 writes",
            where=f"the folder of runs, in process 0 {seen[0][1]}",
            fix="Give all processes a --runs on a disk that all of them see, such as NFS; see docs/clusters.md.",
        )


def _shows(file: Path, within: float) -> bool:
    until = time.monotonic() + within
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY)
    return True

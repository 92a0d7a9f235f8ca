"""Whether the hosts of a run all see one folder of runs, which they must."""

import json
import secrets
import socket
import time
from pathlib import Path

from affinage.errors import UserError
from affinage.hardware.hosts import Hosts

_SHOWN_WITHIN = 20.0  # seconds: a network file system may be late to show what another machine wrote
_LOOK_EVERY = 0.1  # seconds


def check_same_folder(hosts: Hosts, folder: Path, *, within: float = _SHOWN_WITHIN) -> None:
    """Refuse to go on where a host does not see what the first one writes into the folder of runs.

    Every host calls it, and all raise the same; but where the first one cannot write, it alone raises. A host that
    sees nothing for `within` seconds does not see it.

    Raises:
        UserError: naming these hosts, their machines and folders; or why the first one cannot write there.
    """
    if hosts.count == 1:
        return
    mark = folder / f".seen-{secrets.token_hex(8)}"
    if hosts.first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise UserError(
                f"host 0 cannot write there: {(error.strerror or str(error)).lower()}",
                where=f"the folder of runs, {_here(folder)}",
                fix="Give all hosts a --runs that can be written to, on a disk with room.",
            ) from error
    try:
        name = hosts.share("a file in the folder of runs", mark.name)
        if not hosts.first:
            hosts.tell(f"affinage/{name}/{hosts.index}", json.dumps([_shows(folder / name, within), _here(folder)]))
        blind = hosts.share("who does not see it", _blind(hosts, name, within) if hosts.first else [])
    finally:
        if hosts.first:
            mark.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"{' and '.join(blind)}: nothing is there of what host 0 writes",
            where=f"the folder of runs, on host 0 {_here(folder)}" if hosts.first else str(folder),
            fix="Give all hosts a --runs on a disk that all of them see, such as one of NFS; see docs/clusters.md.",
        )


def _blind(hosts: Hosts, name: str, within: float) -> list[str]:
    """The hosts that did not see the file, each with its machine and folder."""
    answers = {
        host: json.loads(hosts.hear(f"affinage/{name}/{host}", 3 * within, said=f"host {host} did not look for a file"))
        for host in range(1, hosts.count)
    }
    return [f"host {host} has {here}" for host, (seen, here) in answers.items() if not seen]


def _shows(file: Path, within: float) -> bool:
    until = time.monotonic() + within
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY)
    return True


def _here(folder: Path) -> str:
    return f"{folder.absolute()} on {socket.gethostname()}"

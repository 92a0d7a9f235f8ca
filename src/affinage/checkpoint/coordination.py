"""What hosts tell each other in a save goes through JAX's coordinator, never through their devices.

A save runs beside the steps, and two programs on the devices of all hosts, which each host begins in its own order,
wait for each other for ever. All barriers of Orbax's saves and restores are the coordinator's, but before a save it
compares the hosts' words for the folder by two such programs.
"""

import importlib
from typing import Any, NoReturn

from orbax.checkpoint import v1 as ocp

from affinage.cluster.processes import Processes
from affinage.errors import UserError

_NEW, _OLD = "orbax.checkpoint.experimental.v1._src", "orbax.checkpoint._src"
_KNOWN = "hosts save together with orbax-checkpoint 0.12.8"
_FIX = "Run `pip install orbax-checkpoint==0.12.8`."


def by_coordinator(context: ocp.Context) -> None:
    """Let the hosts at this piece of work save and restore together in `context`, or this one alone.

    Of many hosts, who saves must have compared the folders: Orbax does not any more, in all of this process.

    Raises:
        UserError: this Orbax is not like the one that is known here.
    """
    processes, options = Processes.current, context.multiprocessing
    if processes.count == 1:
        return
    options.primary_host = 0 if processes.together else processes.index
    # All of them by name: with None the barriers of Orbax's older half are programs on the devices, too.
    options.active_processes = set(range(processes.count)) if processes.together else {processes.index}
    for module, name, ours in _REPLACED:  # there is no option for it
        try:
            theirs = importlib.import_module(module)
            getattr(theirs, name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{_KNOWN}; this one has no {module}.{name}", fix=_FIX) from error
        setattr(theirs, name, ours)


def _compared_before(directory: Any) -> None:
    """The hosts' words for the folder are the same."""


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"{_KNOWN}; this one would run a program on the devices of all beside their steps")


_BARRIERS = f"{_NEW}.synchronization.multihost"
_REPLACED = (
    (f"{_NEW}.saving.execution", "_check_directory_consistency", _compared_before),
    # Nothing else in a save or a restore calls these; an Orbax that does is to end with an error, not to stand still.
    (_BARRIERS, "broadcast_one_to_all", _refused),
    (_BARRIERS, "process_allgather", _refused),
    (f"{_OLD}.multihost.multihost", "broadcast_one_to_all", _refused),
)

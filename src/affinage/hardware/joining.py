"""How a process becomes one of the hosts of a run, and what it does when another one is gone."""

import atexit
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from affinage.errors import EXIT_USER_ERROR, Preempted, TransientError, UserError, of_the_machine
from affinage.hardware.hosts import COORDINATOR, JOIN, Hosts, Place, place
from affinage.hardware.links import Links, Why
from affinage.hardware.missed import gone
from affinage.hardware.silence import PATIENCE
from affinage.hardware.stacks import say
from affinage.stopping import GivenUp, OwnProcess, at_leaving, leave

# Seconds without a sign of life until JAX ends all hosts, without a word of ours: later than the watchdog of a training
# tells who stands still, and where all the others are.
_HEARTBEAT = 45
_LATER = 10  # seconds that JAX waits longer for all hosts than we do
_SHUTDOWN = 10  # seconds that a host waits for the others when it is done
_FIRST_DEATH = 0.5  # seconds: whoever watches the hosts shall see first the one that died by itself
_SAME_MISTAKE = 5.0  # seconds in which this host may find it, too
_WHO_IT_WAS = 3.0  # seconds to learn whose death has cut a collective, which may be known sooner than the death itself
_TO_FOLLOW = 3.0  # seconds for the others to leave, where the first host was told to stop
_TOLD_AT_ONCE = 1.0  # seconds for others that leave by themselves, as the first one does, such as all that were told
_LAST_WORK = 5.0  # seconds to end by itself for a host that has said goodbye; less than _SHUTDOWN


@contextlib.contextmanager
def joined(silence: float = PATIENCE) -> Iterator[Hosts]:
    """Inside, this process is one of the hosts that the environment names; alone if it names none.

    Enter it before JAX has computed anything. Only the coordinator's address is listened on, and on hosts that compute
    with their CPUs the address that leads to it.

    When another host dies, this process is left with status 1 within a second, whatever it waits for, or aborted by JAX
    where that was the first one and JAX is faster; when another one's machine does not answer, after `silence` seconds
    of that; with status 2 when another one has found a mistake of the user, unless this one finds it, too; with status
    75 when another one was told to stop, and left at once. One that has left otherwise with 75 is no dead one: where
    they do not stop together, JAX ends the others, after 45 s at most.

    Raises:
        TransientError: the others were not there in time.
    """
    found = place()
    if found is None or Hosts.current.count > 1:
        yield Hosts.current
        return
    where = _name(found.coordinator), _name(_bound_to(found))

    def lost(host: int, why: Why, leaving: threading.Event) -> None:
        _leave_without(host, why, leaving, f"its machine has not answered for {silence:g} s" if why == "silent" else "")

    before, links = Hosts.current, None
    try:
        _connect(found)
        Hosts.current = Hosts(found.host, found.hosts)
        links = Links(Hosts.current, *where, lost, silence, say)
        with at_leaving(partial(_part, links)):
            yield Hosts.current
        links.say_goodbye()
    except BaseException as error:
        _end_without_the_others(links, error)
        raise
    finally:
        Hosts.current = before


def _part(links: Links, told: bool) -> None:
    """Say goodbye; the first host, whose end aborts the others, waits a little for theirs, longer if they are to go."""
    links.say_goodbye("stopped" if told else "")
    if Hosts.current.first:
        links.wait_until_alone(_TO_FOLLOW if told else _TOLD_AT_ONCE)


def _end_without_the_others(links: Links | None, error: BaseException) -> None:
    """Have this process end as it is. The others are told, unless it is the machine's error, for which they leave, too.

    The first host, whose end aborts the others, waits for theirs where these were told, as long as they may take.
    """
    mistake = of_the_machine(error) if isinstance(error, OSError) else error
    wrong = isinstance(mistake, UserError) and not isinstance(mistake, TransientError)
    stopped = isinstance(error, Preempted)
    if links is not None and (stopped or wrong):
        links.say_goodbye("mistake" if wrong else "stopped" if isinstance(error, GivenUp) else "")
        if Hosts.current.first:
            atexit.register(links.wait_until_alone, _SAME_MISTAKE + 1.0 if wrong else _SHUTDOWN)
    elif isinstance(error, RuntimeError):  # JAX's, of a collective: left with a better word if a host has died
        time.sleep(_WHO_IT_WAS)
    if not (stopped and links is not None and links.failed):  # their end would not be seen
        _do_without_the_meeting()


def _do_without_the_meeting() -> None:
    """Keep JAX from waiting for all hosts at the end of this process.

    Where one of them does not come, as it was left by itself, that aborts this one after ten seconds, with a page of
    stacks.
    """
    jax_api = sys.modules.get("jax._src.api")
    clean_up = getattr(jax_api, "clean_up", None)  # None: it was not imported to its end
    if clean_up is not None:
        atexit.unregister(clean_up)


def _leave_without(host: int, why: Why, leaving: threading.Event, reason: str = "") -> None:
    """Leave this process, with the time to end by itself where it is leaving in good order."""
    if host == 0 and not (why or leaving.is_set()):
        say(gone(0))  # now: without it JAX may abort this process before it has left, and names nobody
    # A machine that is silent does not end where anybody could see it.
    left = leaving.wait({"mistake": _SAME_MISTAKE, "silent": 0.0}.get(why, _FIRST_DEATH))
    if why == "mistake":
        if left:
            return
        leave(f"host {host} has found a mistake, and tells of it", EXIT_USER_ERROR)
    if why == "stopped" and not left and OwnProcess.current is not None and OwnProcess.current.listened_to:
        os.kill(os.getpid(), signal.SIGTERM)  # it has something to save, for which it has its time
        return
    if left:
        time.sleep(_LAST_WORK)  # then JAX, which waits for the dead one at its shutdown, would abort the process
    if why == "stopped":
        leave(f"host {host} was told to stop", told=True)
    leave(gone(host, reason), 1)


def _bound_to(found: Place) -> str:
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", found.coordinator)


def _name(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _connect(found: Place) -> None:
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM to itself
    _listen_on(_address_towards(found.coordinator))
    what = f"host {found.host} of {found.hosts} did not meet the others within {JOIN} s"
    where = f"{COORDINATOR}={found.coordinator}"
    fix = "Start affinage on every host, each with its own number, and let the port through between them."
    # A machine may take longer to come back, and whoever starts the hosts tries it again. JAX would abort the process.
    too_late = threading.Timer(JOIN, leave, (f"{where}: {what}. {fix}", 1))
    too_late.daemon = True
    too_late.start()
    try:
        jax.distributed.initialize(
            found.coordinator,
            found.hosts,
            found.host,
            cluster_detection_method=None if found.detected else "deactivate",
            coordinator_bind_address=_bound_to(found),
            initialization_timeout=JOIN + _LATER,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
        too_late.cancel()
        jax.local_devices()  # now: the first question after devices waits until all hosts have asked it
    except RuntimeError as error:
        raise TransientError(f"{what}: {error}", where=where, fix=fix) from error
    finally:
        too_late.cancel()


def _address_towards(coordinator: str) -> str:
    """This machine's address as the coordinator sees it; nothing is sent."""
    port = int(coordinator.rpartition(":")[2])
    family, kind, _, _, address = socket.getaddrinfo(_name(coordinator), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _listen_on(address: str) -> None:
    """Make the collectives of CPUs listen on one address; by itself JAX takes that of the machine's name.

    And let all hosts find the programs in the cache of compilations that the first has put there: on CPUs each has a
    topology of its own in JAX's eyes, and would compile anew at every start. They are taken to be of one kind.
    """
    from jax._src import cache_key, distributed, xla_bridge
    from jax._src.lib import _jax

    def client() -> Any:
        cache_key._hash_accelerator_config = cache_key._hash_devices  # type: ignore[assignment]
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=address)
        return xla_bridge.make_cpu_client(gloo)

    factories = xla_bridge._backend_factories
    factories["cpu"] = dataclasses.replace(factories["cpu"], factory=client)

"""The hosts of a run: processes that compute one program together, how they find each other, and what they tell.

A host is a process with its devices; on a pod of TPUs that is one machine. All of them run the same code in the same
order. What they must agree on is decided by the first, and told through the key-value store of JAX's coordinator.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from affinage.errors import UserError
from affinage.hardware.movement import waits_for_others

COORDINATOR, HOSTS, HOST = "AFFINAGE_COORDINATOR", "AFFINAGE_HOSTS", "AFFINAGE_HOST"
DETECT = "auto"

JOIN = 300  # seconds until all hosts must be there
_SLICE = 0.5  # seconds of a wait during which Python does not hear of signals
_MEET = 300.0  # seconds: what is shared or met takes milliseconds, once all hosts are there


class HostLost(RuntimeError):
    """Another host did not answer in time, or is gone."""


@dataclass(frozen=True)
class Place:
    """Which of how many hosts this process is, and where they find each other."""

    coordinator: str  # host:port; the first host listens there
    hosts: int
    host: int
    detected: bool = False  # by JAX, which then also says which devices are this host's


@dataclass(eq=False)
class Hosts:
    """All hosts of the run that this process belongs to, as it sees them."""

    index: int = 0
    count: int = 1
    passed: int = 0  # moments that all hosts pass in the same order, by which one that is behind is known
    current: ClassVar["Hosts"]  # alone, until `affinage.hardware.joining.joined` is entered
    _asked: dict[str, int] = field(default_factory=dict)
    _together: bool = False

    @property
    def first(self) -> bool:
        """Whether this host is the one that writes and decides."""
        return self.index == 0

    @property
    def together(self) -> bool:
        """Whether all hosts are at the same piece of work; else each has only its own devices."""
        return self.count == 1 or self._together

    @staticmethod
    def at_work() -> "Hosts":
        """The hosts that share this piece of work: all of the run, or this one alone."""
        return Hosts.current if Hosts.current.together else Hosts()

    @contextlib.contextmanager
    def all_at_work(self) -> Iterator[None]:
        """Inside, the devices of all hosts compute one program; every host must enter it."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before

    def share(self, name: str, value: Any, *, seconds: float | None = _MEET) -> Any:
        """The first host's value, as JSON makes it; to be called by all hosts, equally often.

        Args:
            name: of what is shared.
            value: what the first host decides; that of others is not looked at.
            seconds: until the first host is given up; None: as long as it shows signs of life, after which
                `affinage.hardware.standstill` leaves this process.

        Raises:
            HostLost: the first host has not told it in time.
        """
        if self.count == 1:
            return value
        key = self._key("share", name)
        if self.first:
            self.tell(key, json.dumps(value))
            return json.loads(json.dumps(value))
        return json.loads(self.hear(key, seconds, said=f"host 0 has not said `{name}`"))

    def least(self, name: str, value: int, *, seconds: float = _MEET) -> int:
        """The smallest of what the hosts say; to be called by all hosts, equally often.

        Raises:
            HostLost: one of them has not said it in time.
        """
        if self.count == 1:
            return value
        key = self._key("least", name)
        self.tell(f"{key}/{self.index}", str(value))
        return min(
            int(self.hear(f"{key}/{host}", seconds, said=f"host {host} has not said `{name}`"))
            for host in range(self.count)
        )

    def meet(self, name: str, *, seconds: float = _MEET) -> None:
        """Wait until all hosts have come here.

        Raises:
            HostLost: naming those that did not.
        """
        if self.count == 1:
            return
        key, until = self._key("meet", name), time.monotonic() + seconds
        if not self.first:
            self.tell(f"{key}/{self.index}", "here")
            late = self.hear(f"{key}/all", seconds + 2 * _SLICE, said=f"host 0 did not come to `{name}`")
        else:
            missing = [host for host in range(1, self.count) if not self._is_here(f"{key}/{host}", until)]
            late = ", ".join(map(str, missing))
            self.tell(f"{key}/all", late)
        if late:
            raise HostLost(f"host {late} did not come to `{name}` within {seconds:g} s")

    def _is_here(self, key: str, until: float) -> bool:
        try:
            return bool(self.hear(key, max(until - time.monotonic(), 0.01), said=""))
        except HostLost:
            return False

    def tell(self, key: str, value: str, *, anew: bool = False) -> None:
        """Say something that any host may hear. If not `anew`, what was said first stays.

        Raises:
            HostLost: the first host cannot be reached.
        """
        from jax.errors import JaxRuntimeError

        try:
            _client().key_value_set(key, value, allow_overwrite=anew)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise HostLost(f"host 0 cannot be reached: {error}") from error

    def hear(self, key: str, seconds: float | None, *, said: str) -> str:
        """Wait until some host says `key`; None: as long as the first one shows signs of life, see `share`.

        Raises:
            HostLost: beginning with `said`, if nobody does.
        """
        from jax.errors import JaxRuntimeError

        until = None if seconds is None else time.monotonic() + seconds
        with waits_for_others():
            while True:
                left = _SLICE if until is None else min(_SLICE, until - time.monotonic())
                try:
                    return str(_client().blocking_key_value_get(key, max(1, int(1000 * left))))
                except JaxRuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise HostLost(f"host 0 cannot be reached: {error}") from error
                if until is not None and time.monotonic() >= until:
                    raise HostLost(f"{said} for {seconds:g} s")

    def told(self, folder: str) -> dict[str, str]:
        """What was said so far under `folder/`, by the rest of its key.

        Raises:
            HostLost: the first host cannot be reached.
        """
        from jax.errors import JaxRuntimeError

        try:
            return {key.removeprefix(f"{folder}/"): value for key, value in _client().key_value_dir_get(folder)}
        except JaxRuntimeError as error:
            raise HostLost(f"host 0 cannot be reached: {error}") from error

    def _key(self, kind: str, name: str) -> str:
        self.passed += 1
        number = self._asked[name] = self._asked.get(name, 0) + 1
        return f"affinage/{kind}/{name}/{number}"


Hosts.current = Hosts()


def place() -> Place | None:
    """What the environment says of this process; None if it is alone.

    AFFINAGE_COORDINATOR, AFFINAGE_HOSTS and AFFINAGE_HOST say it, or AFFINAGE_COORDINATOR=auto leaves it to JAX, which
    knows Slurm, Open MPI, Kubernetes and pods of TPUs.

    Raises:
        UserError: where it says too little, or what cannot be.
    """
    coordinator = os.environ.get(COORDINATOR, "")
    if not coordinator:
        return None
    if coordinator == DETECT:
        return _detected()
    fix = f"Give each host {COORDINATOR}=ADDRESS:PORT (of host 0), {HOSTS}=N and {HOST}=0..N-1."
    try:
        hosts, host = int(os.environ[HOSTS]), int(os.environ[HOST])
        valid = coordinator.rpartition(":")[2].isdigit() and ":" in coordinator and 0 <= host < hosts
    except (KeyError, ValueError):
        valid = False
    if not valid:
        said = ", ".join(f"{name}={os.environ.get(name, '')}" for name in (COORDINATOR, HOSTS, HOST))
        raise UserError("this does not say which of how many hosts this process is", where=said, fix=fix)
    return Place(coordinator, hosts, host)


def with_host(name: str) -> str:
    """What a message calls this process: a name, and its number where it is one of many hosts or is to join them."""
    hosts = Hosts.current
    if hosts.count > 1:
        return f"{name}, host {hosts.index}"
    return f"{name}, host {os.environ[HOST]}" if os.environ.get(HOSTS, "1") != "1" and HOST in os.environ else name


def _detected() -> Place:
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() asks; it does not tell the answer

    address, hosts, host, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, JOIN)
    if address is None or hosts is None or host is None:
        raise UserError(
            "JAX finds no cluster here", where=f"{COORDINATOR}={DETECT}", fix="Say it yourself; see docs/clusters.md."
        )
    return Place(address, hosts, host, detected=True)


def _client() -> Any:
    from jax._src import distributed  # the public surface has barriers and collectives, but no time limits

    return distributed.global_state.client

"""What a launcher is: the surface between those who start processes somewhere and those who watch over them."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from affinage.errors import EXIT_PREEMPTED, EXIT_USER_ERROR
from affinage.hardware.missed import Missed


@dataclass(frozen=True)
class Ending:
    """How the process of a host ended."""

    host: int
    status: int  # its exit status; negative: the number of the signal that killed it
    where: str = ""  # the machine, if it has a name
    out_of_sight: bool = False  # the process may still run: it was told to save, and the others are to do so with it
    missed: Missed | None = None  # the host for whose sake this one left, by its own words

    def __str__(self) -> str:
        place = f"host {self.host}" + (f" ({self.where})" if self.where else "")
        if self.out_of_sight:
            return f"{place} was lost sight of"
        if self.missed is not None and self.status != 0:
            if self.missed.host == self.host:
                return f"{place} {self.missed.how}"
            return f"host {self.missed.host} {self.missed.how}, says {place}"
        if self.status < 0:
            return f"{place} was killed by {signal.Signals(-self.status).name}"
        said = {0: "is done", EXIT_PREEMPTED: "was told to stop, or was stuck", EXIT_USER_ERROR: "was given a mistake"}
        return f"{place} {said.get(self.status, f'failed with status {self.status}')}"


class Gang(Protocol):
    """The processes of one start of a run, one for each host: they live and end together."""

    def ended(self, seconds: float) -> list[Ending]:
        """Wait until a process ends, at most so long; those that ended since the last call, in that order."""
        ...

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to every process that runs."""
        ...

    def end(self) -> None:
        """Kill what still runs, with all that it has started. Afterwards no host is left, and calling it again is fine.

        A process that does not answer must not keep it from returning.
        """
        ...


class Launcher(Protocol):
    """Starts the same command on all hosts, each with what `affinage.hardware.hosts.place` reads in its environment."""

    hosts: int

    def start(self, command: Sequence[str]) -> Gang:
        """Start the arguments of `affinage`, e.g. ["run", "recipe.yaml"], on every host.

        Where it raises nothing is left of what it began.

        Raises:
            UserError: where there are not so many hosts.
        """
        ...

    def finish(self) -> None:
        """No start follows, for now: end what was kept for a next one. Calling it again is fine."""
        ...


@runtime_checkable
class Elastic(Launcher, Protocol):
    """A launcher that starts fewer hosts where no more are there; `hosts` is how many the last start has."""

    def has_room(self) -> bool:
        """Whether a start would now have more hosts than the last one has. Asked now and then while these run."""
        ...


@dataclass(frozen=True)
class Restarts:
    """How often a run is started again before it is given up."""

    preemptions: int = 1000  # a host was told to stop, and left with status 75
    failures: int = 10  # a host was killed, or failed, or the hosts could not be started again
    lasting: float = 3600.0  # seconds: both are counted anew after a start that lasted so long

"""Hosts of a slice that is rented for the run, and rented again when it is taken back."""

from collections.abc import Callable, Sequence

from affinage.hardware.acquisition import Hardware
from affinage.hardware.cloud import Host
from affinage.launch.gang import Gang, Launcher
from affinage.launch.told import interruptible


class RentedLauncher:
    """Asks for the slice before a start, unless it is there, and starts the hosts on its machines.

    Args:
        slice: of the cloud, or other machines that can be asked for; released by whoever made it.
        hosts: machines of the slice.
        on: a launcher for machines of these addresses, inside of the cloud's network.
    """

    def __init__(self, slice: Hardware[Host], hosts: int, on: Callable[[Sequence[str]], Launcher]) -> None:
        self.hosts = hosts
        self._slice, self._on = slice, on
        self._addresses: list[str] = []
        self._launcher: Launcher | None = None

    def start(self, command: Sequence[str]) -> Gang:
        """See `affinage.launch.gang.Launcher`. Waits for the slice, which may take hours."""
        with interruptible():
            hosts = self._slice.acquire()
        found = [host.internal for host in hosts]
        if self._launcher is None or found != self._addresses:  # other machines, on which nothing is prepared
            self.finish()
            self._addresses, self._launcher = found, self._on(found)
        return self._launcher.start(command)

    def finish(self) -> None:
        """See `affinage.launch.gang.Launcher`."""
        if self._launcher is not None:
            self._launcher.finish()

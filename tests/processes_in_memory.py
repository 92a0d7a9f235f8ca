"""Processes of one process: a dictionary stands for JAX's coordination service."""

import dataclasses
import threading
from typing import Any

from jax.errors import JaxRuntimeError

from affinage.cluster.processes import Processes


class Service:
    """The calls of the service's client that are used; every wait ends, as nobody here is lost."""

    def __init__(self, count: int) -> None:
        self._count, self._changed = count, threading.Condition()
        self.values: dict[str, str] = {}
        self._arrived: dict[str, int] = {}

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [item for item in self.values.items() if item[0].startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {k: v for k, v in self.values.items() if k != key and not k.startswith(f"{key}/")}

    def wait_at_barrier(self, barrier: str, milliseconds: int) -> None:
        with self._changed:
            self._arrived[barrier] = self._arrived.get(barrier, 0) + 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._arrived[barrier] >= self._count, milliseconds / 1000):
                raise JaxRuntimeError("DEADLINE_EXCEEDED")


@dataclasses.dataclass(eq=False)
class ProcessInMemory(Processes):
    """One of them, in a thread of its own."""

    service: Any = None

    @property
    def _client(self) -> Any:
        return self.service


def in_memory(count: int) -> list[ProcessInMemory]:
    """Return processes that know each other."""
    service = Service(count)
    return [ProcessInMemory(index, count, service=service) for index in range(count)]

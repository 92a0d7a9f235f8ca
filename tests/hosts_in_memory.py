"""Hosts of one process: a dictionary stands for the coordinator that keeps what they say."""

import dataclasses
import threading
import time

from affinage.hardware.hosts import HostLost, Hosts

_PATIENCE = 120  # seconds at least: on a busy machine whoever is to speak may be late


def _answering() -> threading.Event:
    answers = threading.Event()
    answers.set()
    return answers


@dataclasses.dataclass
class Coordinator:
    """What was said, told as long as `answers` is set."""

    words: dict[str, str] = dataclasses.field(default_factory=dict)
    answers: threading.Event = dataclasses.field(default_factory=_answering)


@dataclasses.dataclass(eq=False)
class HostInMemory(Hosts):
    """One of them, in a thread of its own."""

    coordinator: Coordinator = dataclasses.field(default_factory=Coordinator)

    def tell(self, key: str, value: str, *, anew: bool = False) -> None:
        self.coordinator.answers.wait()
        if anew or key not in self.coordinator.words:
            self.coordinator.words[key] = value

    def hear(self, key: str, seconds: float | None, *, said: str) -> str:
        until = time.monotonic() + max(seconds or 3600, _PATIENCE)
        while key not in self.coordinator.words:
            if time.monotonic() > until:
                raise HostLost(said)
            time.sleep(0.01)
        return self.coordinator.words[key]

    def told(self, folder: str) -> dict[str, str]:
        self.coordinator.answers.wait()
        words = self.coordinator.words.copy().items()  # the other hosts go on to tell
        return {key.removeprefix(f"{folder}/"): value for key, value in words if key.startswith(f"{folder}/")}

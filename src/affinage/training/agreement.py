"""Hosts that stop together: one is told to, and all do so between the same two steps."""

import threading
import time
from collections.abc import Callable

from affinage.hardware.hosts import HostLost, Hosts

_NOTHING_TO_SAVE = -1  # told in place of a point by a host that has left
_PATIENCE = 10.0  # seconds for the other hosts to say how far they are
_GOODBYE = 0.3  # seconds that the first host still answers after it has said that it leaves
_AGREED = 60.0  # seconds to agree on a point: longer than it takes to find that a host does not answer
_ASK_EVERY = 3600.0  # seconds; the wait for a word begins anew


class Agreement:
    """The point of a training, counted alike on all hosts, at which all of them stop.

    A point is a moment at which the loop could stop: between two steps, or two batches of a validation. Whoever is told
    to stop says so; each host then says how far it is, and does not pass its next point before all have: the last of
    those points plus one is where they stop. As long as nobody was told, a point costs no talk between hosts.

    Args:
        hosts: of the run.
        name: of the training.
        on_word: called once, in a thread, with who was told what, before the point is agreed.
        on_left: called in that thread where another host has left before the first step.
    """

    def __init__(self, hosts: Hosts, name: str, on_word: Callable[[str], None], on_left: Callable[[], None]) -> None:
        self._hosts, self._on_word, self._on_left = hosts, on_word, on_left
        self._key = f"affinage/stop/{name}"
        self._lock = threading.Condition()
        self._point = 0
        self._held = False  # a word was heard, the point is not agreed yet
        self._stop_at: int | None = None
        self._error: HostLost | None = None
        threading.Thread(target=self._listen, name="agreement", daemon=True).start()

    def ask(self, why: str) -> None:
        """Ask all hosts to stop; returns at once."""
        threading.Thread(target=self._say, args=("word", why), daemon=True).start()

    def nothing_to_save(self, why: str) -> None:
        """Tell the others that this host leaves before its first step. Gives up after a second."""
        saying = threading.Thread(target=self._say_goodbye, args=(why,), daemon=True)
        saying.start()
        saying.join(1.0)

    def _say_goodbye(self, why: str) -> None:
        self._say("word", why)
        self._say(f"at/{self._hosts.index}", str(_NOTHING_TO_SAVE))
        if self._hosts.first:
            time.sleep(_GOODBYE)

    def reached(self) -> bool:
        """Pass the next point; whether it is the one to stop at. All hosts must pass the same points.

        Raises:
            HostLost: the others did not say in time how far they are.
        """
        with self._lock:
            self._point += 1
            agreed = self._lock.wait_for(lambda: not self._held or self._stop_at is not None or self._error, _AGREED)
            if not agreed:
                raise HostLost(f"the hosts have not agreed within {_AGREED:g} s where to stop")
            if self._error is not None:
                raise self._error
            return self._stop_at is not None and self._point >= self._stop_at

    def _listen(self) -> None:
        try:
            why = ""
            while not why:
                try:
                    why = self._hosts.hear(f"{self._key}/word", _ASK_EVERY, said="")
                except HostLost as lost:
                    if "cannot be reached" in str(lost):
                        return  # JAX ends this process, or the run is over
            with self._lock:
                self._held = True
                mine = self._point
            self._on_word(why)
            self._say(f"at/{self._hosts.index}", str(mine))
            points = self._points()
            if _NOTHING_TO_SAVE in points:
                self._on_left()  # no other host can have made a step without it
                raise HostLost("another host has left before its first step")
            with self._lock:
                self._stop_at = max(points) + 1
                self._lock.notify_all()
        except HostLost as lost:
            with self._lock:
                self._error = lost
                self._lock.notify_all()

    def _points(self) -> list[int]:
        until = time.monotonic() + _PATIENCE
        return [
            int(
                self._hosts.hear(
                    f"{self._key}/at/{host}",
                    max(until - time.monotonic(), 0.01),
                    said=f"host {host} has not said how far it is",
                )
            )
            for host in range(self._hosts.count)
        ]

    def _say(self, what: str, value: str) -> None:
        try:
            self._hosts.tell(f"{self._key}/{what}", value)
        except HostLost as lost:
            with self._lock:
                self._error = lost
                self._lock.notify_all()

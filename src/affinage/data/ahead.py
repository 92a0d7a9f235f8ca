"""What is made in threads before it is asked for, in order."""

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class _Failed(NamedTuple):
    error: BaseException


def made_ahead(make: Callable[[int], T], start: int, *, ahead: int, threads: int) -> Iterator[T]:
    """`make(start)`, `make(start + 1)`, ... for ever, `ahead` of them made ahead by `threads` threads.

    Closing the iterator, or dropping it, ends the threads. An error of `make` is raised when its turn comes.

    Where steps take milliseconds this shows: a thread that wakes for a single batch takes twice as long for it as one
    that makes four, because its memory is cold, and the futures of an executor take three times as long as queues.
    """
    wanted: SimpleQueue[int | None] = SimpleQueue()
    places: list[SimpleQueue[T | _Failed]] = [SimpleQueue() for _ in range(ahead)]  # each holds one thing at most
    several = max(ahead // 2, 1)
    ended = threading.Event()

    def work() -> None:
        for number in iter(wanted.get, None):
            if ended.is_set():
                continue
            try:
                places[number % ahead].put(make(number))
            except BaseException as error:
                places[number % ahead].put(_Failed(error))

    workers = [threading.Thread(target=work, name=f"ahead_{n}", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for number in range(start, start + ahead):
            wanted.put(number)
        for first in itertools.count(start, several):
            for number in range(first, first + several):
                made = places[number % ahead].get()
                if isinstance(made, _Failed):
                    raise made.error
                yield made
            for number in range(first + ahead, first + ahead + several):
                wanted.put(number)
    finally:
        ended.set()
        for _ in workers:
            wanted.put(None)
        for worker in workers:
            worker.join()

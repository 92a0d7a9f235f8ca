"""Memory that goes back to the kernel while a state is saved, and after it."""

import contextlib
import threading
from collections.abc import Iterator

from affinage.hardware.devices import give_back_freed_memory

_GIVE_EVERY = 0.05  # seconds; at 0.2 a step that ends beside a save leaves half a block more


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """At the end, what is free goes back to the kernel; inside too, where the heap keeps it otherwise.

    Copies of the state lie there where a step had its buffers, which then takes others: save after save the holes would
    add up to several states.
    """

    def give() -> None:
        give_back_freed_memory()
        while not done.wait(_GIVE_EVERY):
            give_back_freed_memory()

    done = threading.Event()
    giving = threading.Thread(target=give, name="memory", daemon=True)
    giving.start()
    try:
        yield
    finally:
        done.set()
        giving.join()
        give_back_freed_memory()

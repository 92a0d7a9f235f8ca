"""Keep Python's garbage collector from looking through what is no garbage, in the midst of a training or evaluation."""

import contextlib
import gc
from collections.abc import Iterator

_OBJECTS = 100_000  # Python's own number is 700; of garbage in knots, some tens of MB may wait


@contextlib.contextmanager
def what_lives_is_left_alone() -> Iterator[None]:
    """Inside, collections look only at objects made since: what is there now is taken to live until the end.

    JAX, Orbax and a compiled model are some 200,000 objects; a full collection looks at each of them, which takes 0.1 s
    now and then, in whichever thread made the object too many, and all others wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Inside, a collection comes with every 100,000th object that is made and kept.

    Requests and answers are millions of objects that live until the end of an evaluation: to look for garbage among
    them as often as Python does takes up to a quarter of what the host does altogether.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

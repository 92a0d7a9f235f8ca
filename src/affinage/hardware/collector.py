"""Keep Python's garbage collector from looking through all of JAX in the midst of a training."""

import contextlib
import gc
from collections.abc import Iterator


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

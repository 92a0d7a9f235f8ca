"""The phases of a training in which tests hurt it, or tell it to stop."""

import random
import threading
import time
from collections.abc import Callable

BEFORE_STEPS = ("start", "compilation", "restore")  # there is nothing to save


def in_phase(phase: str, act: Callable[[], None], *, lasts: bool = False) -> None:
    """Make the first call of a phase's function call `act`, in a thread, at once or a moment later.

    The phase is not over before, however late the thread comes; `lasts`: nor is it afterwards, until the process ends.
    """
    from affinage.checkpoint import CheckpointStore
    from affinage.training import examination, loop
    from affinage.training.program import Program
    from affinage.training.reporter import Reporter

    place, name = {
        "start": (loop, "acquire"),
        "compilation": (Program, "compile_training"),
        "restore": (CheckpointStore, "restore_newest"),
        "step": (Reporter, "training"),
        "evaluation": (examination, "validate"),
        "save": (CheckpointStore, "save"),
    }[phase]
    function, begun = getattr(place, name), threading.Event()

    def acting(*given: object, **named: object) -> object:
        if begun.is_set():
            return function(*given, **named)
        begun.set()
        thread = threading.Timer(random.uniform(0.0, 0.02), act)
        thread.start()
        found = function(*given, **named)
        thread.join()
        if lasts:
            time.sleep(3600)
        return found

    setattr(place, name, acting)

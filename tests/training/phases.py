"""The phases of a training in which tests hurt it, or tell it to stop."""

import random
import threading
import time
from collections.abc import Callable

BEFORE_STEPS = ("start", "first batch", "compilation", "restore")  # there is nothing to save


def in_phase(
    phase: str, act: Callable[[], None], *, lasts: bool = False, within: float = 0.02, passes: int = 0
) -> None:
    """Make the first call of a phase's function call `act`, in a thread, at once or up to `within` seconds later.

    `passes`: so many calls come and go before. The phase is not over before, however late the thread comes; `lasts`:
    nor is it afterwards, until the process ends. A line says that its own work is done, where it is done before.
    """
    import jax
    from tiny import RandomFeed

    from affinage.checkpoint import CheckpointStore
    from affinage.hardware.devices import LocalDevices
    from affinage.training.evaluator import Evaluator
    from affinage.training.metrics import MetricLogger
    from affinage.training.trainer import Trainer

    place, name = {
        "joining": (jax.distributed, "initialize"),
        "start": (LocalDevices, "acquire"),
        "first batch": (RandomFeed, "batch"),
        "compilation": (Trainer, "compile_training"),
        "restore": (CheckpointStore, "restore_newest"),
        "step": (MetricLogger, "log"),
        "evaluation": (Evaluator, "validate"),
        "save": (CheckpointStore, "save"),
        "writing": (CheckpointStore, "wait"),  # for a save
        "going back": (CheckpointStore, "forget_after"),
    }[phase]
    function, begun, left = getattr(place, name), threading.Event(), [passes]

    def acting(*given: object, **named: object) -> object:
        if begun.is_set():
            return function(*given, **named)
        if left[0]:
            left[0] -= 1
            return function(*given, **named)
        begun.set()
        thread = threading.Timer(random.uniform(0.0, within), act)
        thread.start()
        found = function(*given, **named)
        if lasts or thread.is_alive():
            print(f"{phase} done", flush=True)
        thread.join()
        if lasts:
            time.sleep(3600)
        return found

    setattr(place, name, acting)

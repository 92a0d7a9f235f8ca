"""The process of one tracker: answers every JSON line on standard input by one on standard output."""

import json
import os
import queue
import sys
import threading
from typing import Any

from affinage.secrets import masked
from affinage.tracking.libraries import LIBRARIES
from affinage.tracking.tracker import TrackedRun, Tracker

_AFTER_THE_END = 30.0  # seconds for what is still under way when the training is gone
_NICE = 5  # behind the training


def main() -> None:
    """Serve until standard input ends."""
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is no answer
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    tracker: Tracker | None = None
    while (line := lines.get()) is not None:
        question, answer = json.loads(line), {}
        try:
            if tracker is None:
                tracker = LIBRARIES[question["tracker"]](**question["settings"])
                answer = {"id": tracker.start(TrackedRun(**question["run"]))}
            elif "ending" in question:
                finishing, tracker = tracker, None
                finishing.finish(question["ending"])
            else:
                tracker.log(question["step"], question["values"])
        except BaseException as error:
            answer = {"failed": masked(f"{type(error).__name__}: {error}")[:1000]}
        answers.write(json.dumps(answer) + "\n")
    if tracker is not None:
        tracker.finish("stopped")  # the training was killed


def _read(lines: "queue.Queue[Any]") -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)
    timer = threading.Timer(_AFTER_THE_END, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()

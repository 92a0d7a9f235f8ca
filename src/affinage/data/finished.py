"""Which tasks of a stage are done, so that a stage that was killed goes on instead of starting anew."""

import json
import shutil
from pathlib import Path
from typing import Any

from affinage.data.atomic import write_json

_FOLDER = "finished"


class Finished:
    """Notes in a stage's folder, one per finished task, each with the task's counts.

    A note is written after the files of its task, whole or not at all; a stage's folder is addressed by all that its
    result depends on, so a note that is there is true. `clear` when all is done: the notes are no part of the result.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER

    def get(self, task: str) -> dict[str, Any] | None:
        """What was noted of a task; None if it is not finished."""
        try:
            found: dict[str, Any] = json.loads((self._folder / f"{task}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def put(self, task: str, facts: dict[str, Any]) -> None:
        """Note that a task is finished."""
        self._folder.mkdir(exist_ok=True)
        write_json(self._folder / f"{task}.json", facts)

    def clear(self) -> None:
        """Forget all tasks."""
        shutil.rmtree(self._folder, ignore_errors=True)

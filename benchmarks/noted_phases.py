"""What a host of a training is at, written where it can be read when the host has been killed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PHASES = ("boot", "joining", "start", "compilation", "restore", "step", "save", "finalise", "evaluation", "going back")
_BESIDE = 32  # bytes before the mark of a save that runs beside the steps
# Of what a training says that it begins; the rest is its start, or what comes after its last save.
_BEGUN = {
    "the compilation": "compilation",
    "the end of the compilation": "compilation",
    "the restore": "restore",
    "the validation": "evaluation",
    "a batch of the validation": "evaluation",
    "a look at the benchmarks": "evaluation",
    "a batch of the benchmarks": "evaluation",
    "the save": "save",
    "the last save": "finalise",  # which is waited for
    "going back": "going back",
}


class Notes:
    """A file with the phase that a process is in: what it has written is there whatever becomes of it."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)

    def begins(self, phase: str) -> None:
        os.pwrite(self._file, phase.encode().ljust(_BESIDE), 0)

    def beside(self, saves: bool) -> None:
        os.pwrite(self._file, b"*" if saves else b" ", _BESIDE)

    def follow(self) -> None:
        """Note the phases of this process's training from now on."""
        from affinage.checkpoint import store
        from affinage.training.watchdog import Watchdog

        begins, step_begins, written = Watchdog.begins, Watchdog.step_begins, store.memory_given_back

        def noted_begin(watchdog: Watchdog, what: str, **times: float) -> None:
            self.begins(_BEGUN.get(what, "start"))
            begins(watchdog, what, **times)

        def noted_step(watchdog: Watchdog, step: int) -> None:
            self.begins("step")
            step_begins(watchdog, step)

        @contextlib.contextmanager
        def noted_writing() -> Iterator[None]:
            self.beside(True)
            try:
                with written():
                    yield
            finally:
                self.beside(False)

        Watchdog.begins, Watchdog.step_begins = noted_begin, noted_step  # type: ignore[method-assign]
        store.memory_given_back = noted_writing  # type: ignore[assignment]


def first_note(file: Path, phase: str) -> None:
    """Whoever starts the process says what it is at until it notes it itself."""
    file.write_text(phase.ljust(_BESIDE) + " ")


def noted(file: Path) -> str:
    """The phase of the process that wrote the file; a step beside which a save ends is called after the save."""
    text = file.read_text()
    phase, beside = text[:_BESIDE].strip(), text[_BESIDE:].strip()
    return "finalise" if beside and phase in ("step", "save") else phase

"""What a run knows of its sick steps: which updates were left out, where it went back, and when it must stop."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from affinage.config.training import HealthSettings
from affinage.errors import UserError
from affinage.training.metrics import finite

FILE = "health.jsonl"
_REWINDS = 10  # of a run, after which going back again will not help


class Health:
    """Looks at the metrics of every sick step, in order. Its `facts` are part of every checkpoint.

    Every sick step has a line in health.jsonl: step, cause, done, loss, spike_score, grad_norm, learning_rate, the
    batches left out, and what `documents` knows of the batch.

    Args:
        settings: policies and limits.
        folder: of the run; None: nothing is written, as on all hosts but the first.
        start: the step it goes on from; later lines of the file are dropped, unless `facts` know of them.
        facts: of the checkpoint that it goes on from; {} at the beginning.
        documents: what the batch of a step, counted from 1, was made of.
        say: is told in a line what is done about a sick step that the run goes back from, or no longer does.
    """

    def __init__(
        self,
        settings: HealthSettings,
        folder: Path | None,
        start: int,
        facts: Mapping[str, Any],
        documents: Callable[[int], Any] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings, self._documents, self._say = settings, documents, say
        self._path = None if folder is None else folder / FILE
        if self._path is not None:
            _cut(self._path, start, facts.get("rewinds", []))
        self.sick: list[int] = list(facts.get("sick", []))  # the latest steps whose update was left out
        self.left_out: list[int] = list(facts.get("left_out", []))  # steps whose batch is not trained on
        self.rewinds: list[list[int]] = list(facts.get("rewinds", []))  # [seen at, back to]
        self.spikes = int(facts.get("spikes", 0))
        self.rewind_from: int | None = None  # set when the run must go back; then nothing more is looked at
        self._seen: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        """JSON-able: what a resumed run must know."""
        return {"sick": self.sick, "left_out": self.left_out, "rewinds": self.rewinds, "spikes": self.spikes}

    @property
    def last_sound(self) -> int:
        """The step before the batches that are to be left out, when the run must go back."""
        assert self.rewind_from is not None
        return max(0, self.rewind_from - self._settings.rollback_batches)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at a step that is done, and whose update was left out or whose loss is a spike.

        Raises:
            Incurable: the updates of too many steps were left out.
        """
        spike, skipped = bool(metrics.get("spike")), bool(metrics["skipped"])
        self.spikes += spike
        if self.rewind_from is not None or not (spike or skipped):
            return
        # A loss that stands out is often one whose gradient overflows: that is no spike to be noted only.
        in_numbers = all(math.isfinite(metrics.get(name, 0.0)) for name in ("loss", "grad_norm"))
        cause = "spike" if spike and in_numbers else "not finite"
        policy = self._settings.on_spike if cause == "spike" else self._settings.on_nonfinite
        torn = bool(metrics.get("torn"))
        if torn:  # left out of some layers only, so that there is nothing but to go back
            policy = "rollback"
        shown = {name: metrics.get(name) for name in ("loss", "spike_score", "grad_norm", "learning_rate")}
        self._seen = {"step": step, "cause": cause, **shown}
        if policy == "log":
            self._write({**self._seen, "done": "noted"})
            return
        self.sick = sorted({*(s for s in self.sick if s > step - self._settings.window), step})
        if policy == "rollback" and len(self.rewinds) < _REWINDS:
            self.rewind_from = step
        elif torn:
            self._stop(step, cause, f"after {_REWINDS} ways back an update is left out of some layers, not of others")
        self._break(step, cause)
        if self.rewind_from is None:
            if policy == "rollback":
                self._say(f"step {step:,} was not sound, and is left out: it has gone back {_REWINDS} times already")
            self._write({**self._seen, "done": "skipped", "documents": self._batch(step)})

    def rewound(self, to: int) -> None:
        """The run is back at a checkpoint, and will leave out the batches that led away from it."""
        seen_at, sound = self.rewind_from, self.last_sound
        assert seen_at is not None
        self.rewind_from = None
        batches = list(range(max(sound, to) + 1, seen_at + 1))
        stay = f", the first one there is: batches {sound + 1:,} to {to:,} stay in" if to > sound else ""
        self._say(f"step {seen_at:,} was not sound: back to step {to:,}{stay}")
        self.left_out = sorted({*self.left_out, *batches})
        self.rewinds.append([seen_at, to])
        documents = {step: self._batch(step) for step in batches}
        self._write({**self._seen, "done": f"rewound to {to}", "left_out": batches, "documents": documents})

    def _break(self, step: int, cause: str) -> None:
        in_a_row = 0
        while step - in_a_row in self.sick or step - in_a_row in self.left_out:
            in_a_row += 1
        limits = self._settings
        if in_a_row < limits.max_consecutive_skips and len(self.sick) < limits.max_skips:
            return
        how = (
            f"{in_a_row} updates in a row" if in_a_row >= limits.max_consecutive_skips
            else f"{len(self.sick)} updates within {limits.window} steps"
        )  # fmt: skip
        self._stop(step, cause, f"{how} had to be left out")

    def _stop(self, step: int, cause: str, why: str) -> NoReturn:
        self._write({**self._seen, "done": "stopped", "documents": self._batch(step)})
        raise Incurable(step, f"{why}, the last at step {step}: its loss was {self._told(cause)}")

    def _told(self, cause: str) -> str:
        if cause == "spike":
            return f"{self._seen['loss']:.4g}, {self._seen['spike_score']:.1f} deviations above those before"
        return f"{self._seen['loss']}, the norm of its gradient {self._seen['grad_norm']}"

    def _batch(self, step: int) -> Any:
        return None if self._documents is None else self._documents(step)

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(event)) + "\n")


class Incurable(Exception):
    """Too many updates were left out; the run stops at `step`."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(what)
        self.step = step

    def told(self, folder: Path, diagnosis: Mapping[str, Any]) -> UserError:
        """What the user is told."""
        lines = [f"{name}: {diagnosis[name]}" for name in ("first", "learning_rate", "gradient_norms", "documents")]
        listed = "".join(f"\n    {line[:300]}" for line in lines)
        return UserError(
            f"{self}{listed}",
            where=str(folder / "diagnosis.json"),
            fix="Look at the documents and the curve of grad_norm before it. A lower schedule.peak_lr, more warm-up or "
            "a smaller optimizer.max_grad_norm help against divergence; health.on_spike: rollback against bad batches.",
        )


def _cut(path: Path, start: int, rewinds: Sequence[Sequence[int]]) -> None:
    """Drop the lines of later steps, but not those of `rewinds`, whose sick step is after where they went back to."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {(seen_at, f"rewound to {to}") for seen_at, to in rewinds}
    kept = [line for line in lines if (seen := _seen(line))[0] <= start or seen in known]
    if len(kept) < len(lines):
        part = path.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(part, path)


def _seen(line: str) -> tuple[int, str]:
    """The step of a line, and what was done."""
    try:
        event = json.loads(line)
        return int(event["step"]), str(event["done"])
    except (ValueError, KeyError, TypeError):
        return 2**62, ""  # the line that a kill cut in two

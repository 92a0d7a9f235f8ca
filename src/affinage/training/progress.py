"""What a person sees while a run trains: a live bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import rich
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from affinage.durations import duration

# Where nobody watches a line comes after so many seconds, or this share of the steps; metrics.jsonl has them all.
_SECONDS_BETWEEN_LINES = 10.0
_SHARE_BETWEEN_LINES = 0.2


class _BarWithFacts(Progress):
    """A progress bar with a line of facts below it, which needs 75 columns."""

    facts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.facts, overflow="ellipsis", no_wrap=True)


class StepDisplay:
    """Shows training and validation lines of metrics. Use it as a context manager."""

    def __init__(self, name: str, steps: int, start: int, *, shown: bool = True) -> None:
        self._name, self._steps, self._shown = name, steps, shown
        self._console = rich.get_console()
        self._last_line, self._last_step = -_SECONDS_BETWEEN_LINES, start
        self._bar = _BarWithFacts(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task(name, total=steps, completed=start)

    def __enter__(self) -> "StepDisplay":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def training(self, row: Mapping[str, Any]) -> None:
        """Show a training line."""
        now, last = time.monotonic(), row["step"] == self._steps
        if self._console.is_terminal:
            self._bar.facts = step_line(row, self._steps)
            self._bar.update(self._task, completed=row["step"])
        elif last or now - self._last_line >= _SECONDS_BETWEEN_LINES or self._steps_since(row["step"]):
            self._last_line, self._last_step = now, row["step"]
            self.say(f"step {row['step']:,}/{self._steps:,}  {step_line(row, self._steps)}")

    def _steps_since(self, step: int) -> bool:
        """Whether enough steps were made since the last line."""
        return step - self._last_step >= _SHARE_BETWEEN_LINES * self._steps

    def validation(self, step: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Show a validation line."""
        said = [f"{name} loss {s['loss']:.4f}{_also(s)}" for name, s in scores.items()]
        self.say(f"step {step:,}/{self._steps:,}  validation: {', '.join(said)}")

    def say(self, message: str) -> None:
        """Show a message above the bar."""
        if self._shown:
            self._console.print(f"{self._name}: {message}", highlight=False, markup=False, soft_wrap=True)


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """Loss, tokens/s or images/s, MFU where the peak is known, gradient norm, learning rate, time left, for people."""
    unit, short = ("images", "images") if "images" in row else ("tokens", "tok")
    speed = row[f"{unit}_per_second"]
    parts = [f"loss {_number(row['loss'], '.4f')}", f"{_number(speed, ',.0f')} {short}/s"]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts.append(f"grad {_number(row['grad_norm'], '.2f')}")
    parts.append(f"lr {row['learning_rate']:.2e}")
    if row.get("skipped"):
        spike = row.get("spike") and row["grad_norm"] is not None
        parts.append(f"UPDATE SKIPPED: {'a spike of the loss' if spike else 'loss or gradient not finite'}")
    if speed and row["step"] < steps:
        parts.append(f"ETA {duration((steps - row['step']) * row[unit] / row['step'] / speed)}")
    return "  ".join(parts)


def _also(score: Mapping[str, float]) -> str:
    if "bits_per_byte" in score:
        return f" ({score['bits_per_byte']:.3f} bits/byte)"
    return f" (right of the pairs {score['rewards/accuracies']:.1%})" if "rewards/accuracies" in score else ""


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)

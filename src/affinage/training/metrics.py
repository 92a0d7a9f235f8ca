"""The curve of a run on disk: one JSON object per line, in which no step appears twice."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

# What the clock and the machine say: other in every run of the same.
MEASURED = frozenset(
    "tokens_per_second images_per_second mfu data_wait seconds memory_gigabytes memory_share utilisation".split()
)


def curve(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training's `metrics.jsonl` without what was measured: equal where two computed the same."""
    rows = _read(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


class MetricsLog:
    """Append-only `metrics.jsonl`, cut back to the step that a run resumes from.

    Training lines have `step, loss, spike_score, spike, grad_norm, learning_rate, loss_tokens, skipped, torn, tokens,
    tokens_per_second, mfu, data_wait, seconds` and what the graph reports: cross_entropy and accuracy, and of a
    mixture of experts
    load_balance, router_z, expert_load_max (the fullest expert's share over the even one, mean of the layers) and
    dropped_share (of the choices of experts). `data_wait` is for how many seconds a step waited for the next batch,
    which costs nothing as long as the devices compute longer. `memory_gigabytes`, `memory_share` and `utilisation` are
    those of `affinage.training.readings`. A model of images has `images, images_per_second` and a loss per image.
    Validation lines have `step, validation: {name: {loss, bits_per_byte}}`, lines of benchmarks
    `step, evaluation: {tasks: {task: {metric: {value, stderr}}}, bits_per_byte: {language: bits}}`. A number that is
    not finite is written as null.
    """

    def __init__(self, path: Path | None, resume_step: int) -> None:
        """`path`: of the file; None: the lines are only kept, as on all hosts but the first."""
        self._path = path
        self._file: TextIO | None = None
        self._keep([] if path is None else _read(path), resume_step)

    def cut(self, step: int) -> None:
        """Drop all lines of later steps."""
        self.close()
        self._keep(self.rows, step)

    def _keep(self, rows: list[dict[str, Any]], last: int) -> None:
        self.rows = [row for row in rows if row["step"] <= last]
        if self._path is None:
            return
        kept = self._path.with_suffix(".kept")
        kept.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        kept.replace(self._path)
        self._file = self._path.open("a", buffering=1)  # a line is with the kernel once written, so a kill keeps it

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one line."""
        clean = {key: finite(value) for key, value in row.items()}
        self.rows.append(clean)
        if self._file is not None:
            self._file.write(json.dumps(clean) + "\n")

    def training(self) -> list[dict[str, Any]]:
        """The training lines so far, of all starts."""
        return [row for row in self.rows if "loss" in row]

    def validation(self, step: int | None = None) -> dict[str, dict[str, float]] | None:
        """The validation at a step, or the last one; None if there was none."""
        found = [row for row in self.rows if "validation" in row and step in (None, row["step"])]
        return found[-1]["validation"] if found else None

    def evaluated(self, step: int) -> bool:
        """Whether benchmarks were scored at a step."""
        return any("evaluation" in row and row["step"] == step for row in self.rows)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _read(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the line that a kill cut in two, and whatever a damaged disk made of the rest
    return rows


def finite(value: Any) -> Any:
    """A value, or those of a mapping, as JSON has it: what is not finite is None."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

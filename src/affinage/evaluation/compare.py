"""Two models on the same items: the difference of their scores, and how sure it is."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from affinage.errors import UserError

_CONFIDENCE = 1.959964  # standard errors of a 95 % interval of a normal distribution


@dataclass(frozen=True)
class Difference:
    """Score of `b` minus score of `a`, over the items that both have answered.

    The interval is that of the mean of paired differences, 95 %: mean ± 1.96 standard errors, the standard error
    being the sample standard deviation of the differences over the square root of their number.
    """

    task: str
    metric: str
    items: int
    unmatched: int  # items that only one of the two has
    a: float
    b: float
    difference: float
    stderr: float
    low: float
    high: float

    @property
    def is_real(self) -> bool:
        """Whether the interval excludes no difference."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"is_real": self.is_real}


def compare(a: Path, b: Path) -> list[Difference]:
    """The differences of all metrics of all tasks that two folders of results have in common.

    Args:
        a: a folder that an evaluation wrote, with `items/TASK.jsonl`.
        b: another.

    Raises:
        UserError: a folder has no results, or they have no item in common (items are the same if their hashes are).
    """
    differences = []
    ours, theirs = _tasks(a), _tasks(b)
    for task in ours:
        if task in theirs:
            differences += _of_task(task, _items(ours[task]), _items(theirs[task]))
    if not differences:
        raise UserError(
            "these two have no item of a benchmark in common",
            where=f"{a}, {b}",
            fix="Evaluate both on the same task and data.",
        )
    return differences


def _tasks(folder: Path) -> dict[str, Path]:
    found = {file.stem: file for file in sorted((folder / "items").glob("*.jsonl"))}
    if not found:
        raise UserError("holds no results of an evaluation", where=str(folder), fix="Run `affinage eval` first.")
    return found


def _items(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Items by their hash; equal ones are told apart by their order."""
    items: dict[tuple[str, int], dict[str, Any]] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            count = 0
            while (item["hash"], count) in items:
                count += 1
            items[item["hash"], count] = item
    except (ValueError, KeyError, TypeError) as error:
        fix = "Judge the model again: what this file said is computed anew."
        raise UserError("these answers are damaged", where=str(file), fix=fix) from error
    return items


def _of_task(
    task: str, ours: Mapping[tuple[str, int], dict[str, Any]], theirs: Mapping[tuple[str, int], dict[str, Any]]
) -> list[Difference]:
    common = [key for key in ours if key in theirs]
    differences = []
    for metric in dict.fromkeys(name for key in common for name in ours[key] if name not in ("id", "hash")):
        pairs = [(ours[key].get(metric), theirs[key].get(metric)) for key in common]
        values = np.array([pair for pair in pairs if None not in pair], np.float64)
        if len(values) < 2:
            continue
        first, second = values.mean(axis=0)
        change = values[:, 1] - values[:, 0]
        error = float(change.std(ddof=1) / math.sqrt(len(change)))
        mean = float(change.mean())
        differences.append(
            Difference(
                task=task,
                metric=metric,
                items=len(values),
                unmatched=len(ours) + len(theirs) - 2 * len(common),
                a=float(first),
                b=float(second),
                difference=mean,
                stderr=error,
                low=mean - _CONFIDENCE * error,
                high=mean + _CONFIDENCE * error,
            )
        )
    return differences

"""Two models on the same items: the difference of their scores, and how sure it is."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from affinage.errors import UserError
from affinage.evaluation.item_lines import BITS_PER_BYTE, BYTES, LOG_LIKELIHOOD, label, scores_of
from affinage.evaluation.result_folder import ITEMS, read_results

# Lines by the item's hash; equal ones are told apart by their order.
_Items = dict[tuple[str, int], dict[str, Any]]
_ALPHA = 0.05  # a smaller p is a real difference


@dataclass(frozen=True)
class Difference:
    """Score of `b` minus score of `a`, over the items that both have answered.

    The interval is Student's of the mean of paired differences, 95 %, whose standard error is the sample standard
    deviation of the differences over the square root of their number. Of whole texts it is that of their bits per
    byte, to which each adds by its length. `p` is how often models that are alike would differ as much: by the exact
    sign test where all differences are of one size, as of right and wrong answers (McNemar's), else by the t test.
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
    p: float

    @property
    def is_real(self) -> bool:
        """Whether so large a difference is unlikely by chance."""
        return self.p < _ALPHA

    @property
    def is_none(self) -> bool:
        """Whether both have the same score on every item."""
        return self.difference == 0 and self.stderr == 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"is_real": self.is_real}


@dataclass(frozen=True)
class Unlike:
    """A task that was not asked alike of both, so that what differs is not the models alone."""

    task: str
    questions: int  # items in common whose prompt or right answer differs
    versions: tuple[str, str] | None  # of the task, if they differ

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Answers:
    """What a folder of results has on single items, for as many comparisons as there are: every file is read once."""

    def __init__(self, folder: Path) -> None:
        """`folder` is one that an evaluation wrote, with `items/TASK.jsonl`. Raises UserError if it has no results."""
        self.folder = folder
        self._files = {file.stem: file for file in sorted((folder / ITEMS).glob("*.jsonl"))}
        self._read: dict[str, dict[str | None, _Items]] = {}
        if not self._files:
            raise UserError("holds no results of an evaluation", where=str(folder), fix="Run `affinage eval` first.")

    @property
    def tasks(self) -> list[str]:
        """The tasks that were answered."""
        return list(self._files)

    @cached_property
    def versions(self) -> Mapping[str, Any]:
        """Of the tasks, as far as the results tell them."""
        return {task: entry.get("version") for task, entry in read_results(self.folder).get("tasks", {}).items()}

    def of(self, task: str) -> Mapping[str | None, _Items]:
        """The items of a task by the filter of their answers, None where the lines name none.

        Raises UserError if the file is damaged.
        """
        if task not in self._read:
            self._read[task] = _by_filter(self._files[task])
        return self._read[task]


def compare(a: Answers, b: Answers) -> list[Difference]:
    """The differences of all metrics of all tasks that two folders of results have in common.

    Where answers were read by several filters, each is compared by itself: they are of the same items.
    Raises UserError if they have no item in common, or no score of any; items are the same if their hashes are.
    """
    differences = [
        one for task, filtered, ours, theirs in _in_common(a, b) for one in _of_task(task, filtered, ours, theirs)
    ]
    if not differences:
        if shared := {task: n for task, _, ours, theirs in _in_common(a, b) if (n := len(ours.keys() & theirs.keys()))}:
            told = ", ".join(f"{items} of {task}" for task, items in shared.items())
            raise UserError(
                f"these two have items in common ({told}), but not two of them have a score that can be compared",
                where=f"{a.folder}, {b.folder}",
                fix="Judge both again where another version has judged them, on more items, or on another task.",
            )
        raise UserError(
            "these two have no item of a benchmark in common",
            where=f"{a.folder}, {b.folder}",
            fix=f"Evaluate both on the same task and data; they have {', '.join(a.tasks)}, and {', '.join(b.tasks)}.",
        )
    return differences


def unlike(a: Answers, b: Answers) -> list[Unlike]:
    """The tasks in common whose prompts, right answers or versions differ, as far as the results tell them."""
    found: dict[str, Unlike] = {}
    for task, _, ours, theirs in _in_common(a, b):
        questions = sum(_asked_otherwise(ours[key], theirs[key]) for key in ours if key in theirs)
        old, new = a.versions.get(task), b.versions.get(task)
        changed = None if old == new or None in (old, new) else (str(old), str(new))
        if (questions or changed) and task not in found:
            found[task] = Unlike(task, questions, changed)
    return list(found.values())


def _asked_otherwise(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return any(ours[key] != theirs[key] for key in ("prompt_hash", "target_hash") if key in ours and key in theirs)


def _in_common(a: Answers, b: Answers) -> Iterator[tuple[str, str | None, _Items, _Items]]:
    """(task, filter, items of a, items of b) of every task and filter that both folders have."""
    for task in a.tasks:
        if task not in b.tasks:
            continue
        mine, others = a.of(task), b.of(task)
        if len(mine) == len(others) == 1 and (None in mine or None in others):  # of a version that did not name it
            (first,), (second,) = mine, others
            yield task, first or second, mine[first], others[second]
            continue
        for filtered in mine:
            if filtered in others:
                yield task, filtered, mine[filtered], others[filtered]


def _by_filter(file: Path) -> dict[str | None, _Items]:
    found: dict[str | None, _Items] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            items, count = found.setdefault(item.get("filter"), {}), 0
            while (item["hash"], count) in items:
                count += 1
            items[item["hash"], count] = item
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "Evaluate the model again: the answers in this file are computed again."
        raise UserError("these answers are damaged", where=str(file), fix=fix) from error
    return found


def _of_task(task: str, filtered: str | None, ours: _Items, theirs: _Items) -> list[Difference]:
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    common = [(scores_of(mine), scores_of(other)) for mine, other in both]
    sizes = [mine.get(BYTES) for mine, _ in both]
    differences = []
    for metric in dict.fromkeys(name for first, _ in common for name in first):
        pairs = [(first.get(metric), second.get(metric)) for first, second in common]
        known = [place for place, pair in enumerate(pairs) if None not in pair]
        if len(known) < 2:
            continue
        values = np.array([pairs[place] for place in known], np.float64)
        weights = np.ones(len(known))
        if metric == LOG_LIKELIHOOD and all(sizes[place] for place in known):  # of whole texts, of which each counts
            metric, values = BITS_PER_BYTE, -values / math.log(2)
            weights = np.array([sizes[place] for place in known], np.float64)
        first, second = values.sum(axis=0) / weights.sum()
        apart = values[:, 1] - values[:, 0]
        mean, error = _ratio(apart, weights)
        reach = float(stats.t.ppf(1 - _ALPHA / 2, len(values) - 1)) * error
        differences.append(
            Difference(
                task=task,
                metric=label(metric, filtered),
                items=len(values),
                unmatched=len(ours) + len(theirs) - 2 * len(common),
                a=float(first),
                b=float(second),
                difference=mean,
                stderr=error,
                low=mean - reach,
                high=mean + reach,
                p=_chance(apart, mean, error),
            )
        )
    return differences


def _chance(apart: Float[np.ndarray, " items"], mean: float, error: float) -> float:
    """The two-sided p of no difference."""
    changed = apart[apart != 0]
    if not len(changed):
        return 1.0
    if np.ptp(np.abs(changed)) < 1e-12:
        return float(stats.binomtest(int((changed > 0).sum()), len(changed)).pvalue)
    return float(2 * stats.t.sf(abs(mean / error), len(apart) - 1))


def _ratio(values: Float[np.ndarray, " items"], weights: Float[np.ndarray, " items"]) -> tuple[float, float]:
    """The sum of values over that of weights, and its standard error by linearisation: a mean's where all weigh one.

    Cochran, Sampling Techniques (1977), section 6.3, the ratio estimator.
    """
    ratio = values.sum() / weights.sum()
    apart = values - ratio * weights
    return float(ratio), float(apart.std(ddof=1) * math.sqrt(len(values)) / weights.sum())

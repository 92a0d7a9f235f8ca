"""Two models on the same items: the difference of their scores, and how certain it is."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from affinage.errors import UserError
from affinage.evaluation.results import BITS_PER_BYTE, BYTES, ITEMS, LOG_LIKELIHOOD, label, scores_of

# Lines by the item's hash; equal items are told apart by their order.
_Items = dict[tuple[str, int], dict[str, Any]]
_ALPHA = 0.05  # a smaller p is a real difference


@dataclass(frozen=True)
class Difference:
    """Score of `b` minus score of `a`, over the items that both have.

    The 95 % interval is Student's of the mean of paired differences. For whole texts it is that of their bits per byte,
    to which each contributes by its length. `p` is the probability of such a difference between equal models: by the
    exact sign test if all differences are of one size, as of right and wrong answers (McNemar's), else by the t test.
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
        """Return it as JSON."""
        return asdict(self) | {"is_real": self.is_real}


@dataclass(frozen=True)
class Unlike:
    """A task in which `questions` items in common had another prompt or right answer: more than the models differs."""

    task: str
    questions: int


class Answers:
    """What a folder of results has on single items; every file is read once."""

    def __init__(self, folder: Path) -> None:
        """`folder` is one that an evaluation wrote, with `items/TASK.jsonl`. Raises UserError if it has no results."""
        self.folder = folder
        self._read: dict[str, dict[str | None, _Items]] = {}
        self.tasks = [file.stem for file in sorted((folder / ITEMS).glob("*.jsonl"))]
        if not self.tasks:
            raise UserError("holds no results of an evaluation", where=str(folder), fix="Run `affinage eval` first.")

    def of(self, task: str) -> Mapping[str | None, _Items]:
        """Return the items of a task by the filter of their answers. Raises UserError if the file is damaged."""
        if task not in self._read:
            items: dict[str | None, _Items] = {}
            file = self.folder / ITEMS / f"{task}.jsonl"
            try:
                for item in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                    of_filter = items.setdefault(item.get("filter"), {})
                    count = next(n for n in itertools.count() if (item["hash"], n) not in of_filter)
                    of_filter[item["hash"], count] = item
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                fix = "Evaluate the model again."
                raise UserError("these answers are damaged", where=str(file), fix=fix) from error
            self._read[task] = items
        return self._read[task]


def compare(a: Answers, b: Answers) -> list[Difference]:
    """Return the differences of all metrics of all tasks that two folders of results have in common.

    Answers of several filters are compared filter by filter. Items are the same if their hashes are. Raises UserError
    if the two have no item with a score in common.
    """
    differences = [difference for common in _in_common(a, b) for difference in _of_task(*common)]
    if not differences:
        what = "these two have no benchmark with at least two items in common that both have a score of"
        fix = f"Evaluate both on the same task and data; they have {', '.join(a.tasks)}, and {', '.join(b.tasks)}."
        raise UserError(what, where=f"{a.folder}, {b.folder}", fix=fix)
    return differences


def unlike(a: Answers, b: Answers) -> list[Unlike]:
    """Return the tasks in common whose prompts or right answers differ, as far as the results have them."""

    def question(line: Mapping[str, Any]) -> tuple[Any, Any]:
        return line.get("prompt_hash"), line.get("target_hash")

    differ: dict[str, Unlike] = {}
    for task, _, ours, theirs in _in_common(a, b):
        if questions := sum(question(ours[key]) != question(theirs[key]) for key in ours.keys() & theirs.keys()):
            differ.setdefault(task, Unlike(task, questions))
    return list(differ.values())


def _in_common(a: Answers, b: Answers) -> Iterator[tuple[str, str | None, _Items, _Items]]:
    """(task, filter, items of a, items of b) of every task and filter that both folders have."""
    for task in a.tasks:
        if task in b.tasks:
            mine, others = a.of(task), b.of(task)
            yield from ((task, filtered, mine[filtered], others[filtered]) for filtered in mine if filtered in others)


def _of_task(task: str, filtered: str | None, ours: _Items, theirs: _Items) -> Iterator[Difference]:
    keys = [key for key in ours if key in theirs]
    pairs = [(scores_of(ours[key]), scores_of(theirs[key]), ours[key].get(BYTES)) for key in keys]
    for metric in dict.fromkeys(name for first, _, _ in pairs for name in first):
        scored = [(first[metric], other[metric], size) for first, other, size in pairs if metric in other]
        scored = [entry for entry in scored if None not in entry[:2]]
        if len(scored) < 2:
            continue
        values, weights = np.array([entry[:2] for entry in scored], np.float64), np.ones(len(scored))
        if metric == LOG_LIKELIHOOD and all(size for *_, size in scored):  # of whole texts
            metric, values = BITS_PER_BYTE, -values / math.log(2)
            weights = np.array([size for *_, size in scored], np.float64)
        a, b = (float(score) for score in values.sum(axis=0) / weights.sum())
        apart = values[:, 1] - values[:, 0]
        # By linearization, a mean's standard error if all weigh one: Cochran, Sampling Techniques (1977), section 6.3.
        spread = (apart - (b - a) * weights).std(ddof=1)
        error = float(spread * math.sqrt(len(values)) / weights.sum())
        reach = float(stats.t.ppf(1 - _ALPHA / 2, len(values) - 1)) * error
        changed = apart[apart != 0]
        if not len(changed):
            p = 1.0
        elif np.ptp(np.abs(changed)) < 1e-12:
            p = float(stats.binomtest(int((changed > 0).sum()), len(changed)).pvalue)
        else:
            p = float(2 * stats.t.sf(abs((b - a) / error), len(apart) - 1))
        unmatched, name = len(ours) + len(theirs) - 2 * len(pairs), label(metric, filtered)
        low, high = b - a - reach, b - a + reach
        yield Difference(task, name, len(values), unmatched, a, b, b - a, error, low, high, p)

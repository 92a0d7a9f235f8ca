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

_Items = dict[tuple[str, int], dict[str, Any]]  # lines by the item's hash; equal items are told apart by their order
Answers = dict[tuple[str, str | None], _Items]  # by task and filter of its answers
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

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self) | {"is_real": self.is_real}


def read_answers(folder: Path) -> Answers:
    """Return what an evaluation wrote into `items/TASK.jsonl` of a folder.

    Raises UserError if there are no such files, or a file is damaged.
    """
    answers: Answers = {}
    for file in sorted((folder / ITEMS).glob("*.jsonl")):
        try:
            for item in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                items = answers.setdefault((file.stem, item.get("filter")), {})
                count = next(n for n in itertools.count() if (item["hash"], n) not in items)
                items[item["hash"], count] = item
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError("these answers are damaged", where=str(file), fix="Evaluate the model again.") from error
    if not answers:
        raise UserError("holds no results of an evaluation", where=str(folder), fix="Run `affinage eval` first.")
    return answers


def compare(a: Answers, b: Answers) -> list[Difference]:
    """Return the differences of all metrics of all tasks that two models have answered.

    Answers of several filters are compared filter by filter. Items are the same if their hashes are. Raises UserError
    if the two have no item with a score in common.
    """
    common = (each for each in a if each in b)
    differences = [difference for each in common for difference in _differences(*each, a[each], b[each])]
    if not differences:
        what = "these two have no benchmark with at least two items in common that both have a score of"
        tasks = (", ".join(dict.fromkeys(task for task, _ in answers)) for answers in (a, b))
        raise UserError(what, fix=f"Evaluate both on the same task and data; they have {'; and '.join(tasks)}.")
    return differences


def asked_otherwise(a: Answers, b: Answers) -> dict[str, int]:
    """Return the tasks in common with items of another prompt or right answer, and the number of these items."""
    found: dict[str, int] = {}
    for each in (each for each in a if each in b):
        ours, theirs = a[each], b[each]
        hashes = ("prompt_hash", "target_hash")
        count = sum(any(ours[k].get(h) != theirs[k].get(h) for h in hashes) for k in ours.keys() & theirs.keys())
        if count:
            found.setdefault(each[0], count)
    return found


def _differences(task: str, filtered: str | None, ours: _Items, theirs: _Items) -> Iterator[Difference]:
    keys = [key for key in ours if key in theirs]
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any], float | None]]
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

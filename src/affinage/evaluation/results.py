"""What evaluations leave in a folder, results.json and items/TASK.jsonl; and two such folders compared."""

import hashlib
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from affinage.checkpoint.store import checksums
from affinage.data.decontaminate import BenchmarkItem, Contamination
from affinage.data.tokenizer import FILE
from affinage.errors import UserError
from affinage.generation.engine import LoadedModel
from affinage.json_files import finite, write_atomically, write_json
from affinage.results import read_json

RESULTS = "results.json"
ITEMS = "items"
_FACTS = ("id", "hash", "prompt_hash", "target_hash", "filter")  # of a line, besides scores
# Of a single item the harness has the log-likelihood, in nats.
_OF_LIKELIHOOD = ("perplexity", "byte_perplexity", "bits_per_byte", "word_perplexity")
_UNFILTERED = ",none"  # the harness writes METRIC,FILTER
Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # the harness's, by task
Lines = Mapping[str, Sequence[dict[str, Any]]]  # by task, see `line_of`
# By task and filter of its answers: lines by the hash of the item and its number among equal ones.
Answers = dict[tuple[str, str | None], dict[tuple[str, int], dict[str, Any]]]
Search = Callable[[Iterable[BenchmarkItem]], Contamination]  # which items stand in the text that a model was trained on
_ALPHA = 0.05  # a smaller p is a real difference


def result_of(
    name: str, raw: Mapping[str, Any], exceeds: Callable[[Sequence[Any]], bool], chat_template: bool
) -> dict[str, Any]:
    """Return the harness's results of a task as {metrics: {metric: {value, stderr}}, items, num_fewshot, version, ...}.

    `chance` is what guessing scores, if known; `truncated` counts the items with a request that `exceeds` the context.
    """
    scores, metrics, samples = raw["results"][name], {}, raw["samples"][name]
    for key, value in scores.items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr"):
            stderr = finite(scores.get(f"{metric}_stderr,{filtered}"))
            metrics[key.removesuffix(_UNFILTERED)] = {"value": finite(value), "stderr": stderr}
    result = {
        "metrics": metrics,
        "items": raw["n-samples"][name]["effective"],
        "truncated": len({item["doc_id"] for item in samples if any(map(exceeds, item["arguments"]))}),
        "num_fewshot": raw["n-shot"].get(name, 0),
        "chat_template": chat_template,
        "version": raw["versions"].get(name),
    }
    if raw["configs"][name].get("output_type") == "multiple_choice":
        # For `acc_mutual_info` the harness requests each choice without the question as well.
        twice = 2 if any(metric.startswith("acc_mutual_info") for metric in metrics) else 1
        result["chance"] = sum(twice / len(item["arguments"]) for item in samples) / len(samples)
    return result


def line_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of one of the harness's samples, of which an item has one for every filter of its answers."""
    line = {"id": sample["doc_id"], "hash": sample["doc_hash"]}
    line |= {name: sample[name] for name in ("prompt_hash", "target_hash", "filter")}
    for metric in sample["metrics"]:
        value = sample[metric]
        if metric in _OF_LIKELIHOOD:  # of a whole text also its length in bytes or words
            line["log_likelihood"] = finite(value[0] if isinstance(value, list | tuple) else value)
        else:
            line[metric] = finite(value)
    return line


def fingerprint(model: LoadedModel) -> str:
    """Return a hash of a model: graph, precision, context, checksums of all weights, tokenizer, template, prompt."""
    tokenizer = model.tokenizer
    parts = [model.graph.to_dict(), model.compute_dtype, model.context, checksums({"params": model.params})]
    parts += [hashlib.sha256((tokenizer.folder / FILE).read_bytes()).hexdigest(), tokenizer.opening, tokenizer.stops]
    parts += [tokenizer.template and tokenizer.template.source, model.system_prompt]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def write_results(results: Mapping[str, Any], lines: Lines, folder: Path) -> None:
    """Write results and lines of items beside those of other tasks; what is there of another model is removed first."""
    earlier = read_json(folder / RESULTS)
    if earlier.get("fingerprint") != results["fingerprint"]:
        earlier = {}
        (folder / RESULTS).unlink(missing_ok=True)  # first: items without it belong to no model
        if (folder / ITEMS).exists():
            shutil.rmtree(folder / ITEMS)
    (folder / ITEMS).mkdir(parents=True, exist_ok=True)
    for name, of_task in lines.items():
        write_atomically(folder / ITEMS / f"{name}.jsonl", *(f"{json.dumps(line)}\n".encode() for line in of_task))
    merged = {**earlier, **results, **{key: earlier.get(key, {}) | results[key] for key in ("tasks", "samples")}}
    if before := earlier.get("contamination"):
        now = results.get("contamination", {})
        kept = {name: entry for name, entry in before["tasks"].items() if name not in results["tasks"]}
        merged["contamination"] = {**before, **now, "tasks": kept | now.get("tasks", {})}
    write_json(folder / RESULTS, merged)


def contamination_of(seen: Contamination, tasks: Mapping[str, Any], samples: Samples) -> dict[str, Any]:
    """Return which items of the evaluated ones were found in the training text, and the scores of the others.

    `seen` is of all items of the `tasks`, {task: {metrics: {metric: {value, stderr}}}}. Returns {texts: their number,
    ngram, tasks: {task: {items, found: [numbers], common: [numbers: in more texts than count as a match], without:
    {metric: {value, stderr}}}}}, without metrics that are no mean over items.
    """
    entries = {}
    for name in samples.keys() & seen.benchmarks:
        numbers = {str(sample["doc_id"]) for sample in samples[name]}
        in_text, common = (
            sorted(int(item) for task, item in items if task == name and item in numbers)
            for items in (seen.found, seen.common)
        )
        without, left_out = {}, {*in_text, *common}
        for metric, reported in tasks[name]["metrics"].items():
            key, _, filtered = metric.partition(",")
            chosen = [each for each in samples[name] if each.get("filter", "none") == (filtered or "none")]
            scores = {each["doc_id"]: finite(each.get(key)) for each in chosen}
            values, value = [score for score in scores.values() if score is not None], reported["value"]
            if value is None or not values or not math.isclose(statistics.fmean(values), value, abs_tol=1e-9):
                continue
            rest = [score for item, score in scores.items() if score is not None and item not in left_out]
            stderr = statistics.stdev(rest) / math.sqrt(len(rest)) if len(rest) > 1 else None
            without[metric] = {"value": statistics.fmean(rest) if rest else None, "stderr": stderr}
        entries[name] = {"items": len(numbers), "found": in_text, "common": common, "without": without}
    return {"texts": seen.texts, "ngram": seen.n_grams, "tasks": entries}


@dataclass(frozen=True)
class Difference:
    """Score of `b` minus score of `a`, over the items that both have.

    The 95 % interval is Student's of the mean of paired differences. `p` is the probability of such a difference by
    chance: by the exact sign test if all differences are of one size (McNemar's), else by the t test.
    """

    task: str
    metric: str
    items: int
    unmatched: int  # items that only one of the two has
    asked_otherwise: int  # of the task's items in common, those with another prompt or right answer
    a: float
    b: float
    difference: float
    stderr: float
    low: float
    high: float
    p: float
    is_real: bool  # unlikely by chance


def read_answers(folder: Path) -> Answers:
    """Return what an evaluation wrote into `items/TASK.jsonl` of a folder. UserError: no file, or a damaged one."""
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
    """Return the differences of all metrics, by filter, over items of equal hash. UserError: no score in common."""
    from scipy import stats  # seconds

    differences = []
    for task, filtered in (each for each in a if each in b):
        ours, theirs = a[task, filtered], b[task, filtered]
        pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
        hashes = ("prompt_hash", "target_hash")
        otherwise = sum(any(first.get(name) != other.get(name) for name in hashes) for first, other in pairs)
        unmatched = len(ours) + len(theirs) - 2 * len(pairs)
        for metric in dict.fromkeys(name for first, _ in pairs for name in first if name not in _FACTS):
            values = np.array([(first.get(metric), other.get(metric)) for first, other in pairs], np.float64)
            values = values[~np.isnan(values).any(axis=1)]  # from None: the harness has no score of the item
            if len(values) < 2:
                continue
            before, after = map(float, values.mean(axis=0))
            apart = values[:, 1] - values[:, 0]
            error = float(apart.std(ddof=1) / math.sqrt(len(apart)))
            reach = float(stats.t.ppf(1 - _ALPHA / 2, len(apart) - 1)) * error
            changed = apart[apart != 0]
            if not len(changed):
                p = 1.0
            elif np.ptp(np.abs(changed)) < 1e-12:
                p = float(stats.binomtest(int((changed > 0).sum()), len(changed)).pvalue)
            else:
                p = float(2 * stats.t.sf(abs((after - before) / error), len(apart) - 1))
            change, counts = after - before, (len(apart), unmatched, otherwise)
            scores = (before, after, change, error, change - reach, change + reach, p)
            name = metric if filtered is None else f"{metric},{filtered}".removesuffix(_UNFILTERED)
            differences.append(Difference(task, name, *counts, *scores, is_real=p < _ALPHA))
    if not differences:
        what = "these two have no benchmark with at least two items in common that both have a score of"
        raise UserError(what, fix="Evaluate both on the same task and data.")
    return differences

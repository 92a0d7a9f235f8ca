"""What evaluations leave in a folder: results.json and items/TASK.jsonl, all of one model."""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from affinage.checkpoint.metadata import checksums
from affinage.data.decontaminate import Contamination
from affinage.data.json_files import write_atomically, write_json
from affinage.data.tokenizer import FILE
from affinage.generation.model import LoadedModel

RESULTS = "results.json"
ITEMS = "items"
STATE = "state"  # key of what the model was that no recipe evaluated; see `affinage.pipeline.eval_results`
LOG_LIKELIHOOD = "log_likelihood"
BITS_PER_BYTE = "bits_per_byte"
BYTES = "bytes"
_FACTS = ("id", "hash", "prompt_hash", "target_hash", "filter", BYTES)  # of a line, besides scores
# Metrics of all texts together. Of a single one the harness has its log-likelihood, and its length in bytes or words.
_OF_TEXTS = {"byte_perplexity": True, BITS_PER_BYTE: True, "word_perplexity": False}  # whether in bytes
Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # the harness's, by task

# ---- lines of items ----


def line_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of one of the harness's samples, of which an item has one for every filter of its answers."""
    line = {"id": sample["doc_id"], "hash": sample["doc_hash"]}
    line |= {name: sample[name] for name in ("prompt_hash", "target_hash", "filter")}
    for metric in sample["metrics"]:
        value = sample[metric]
        if metric in _OF_TEXTS and isinstance(value, Sequence) and len(value) == 2:
            line[LOG_LIKELIHOOD] = finite(value[0])
            line |= {BYTES: int(value[1])} if _OF_TEXTS[metric] else {}
        else:
            line[of_item(metric)] = finite(value)
    return line


def scores_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores in a line by metric, None for what no single item has."""
    return {of_item(name): value for name, value in line.items() if name not in _FACTS}


def of_item(metric: str) -> str:
    """Return what a metric is for a single item: for `perplexity` the harness has the log-likelihood, in nats."""
    return LOG_LIKELIHOOD if metric == "perplexity" else metric


def label(metric: str, filtered: str | None) -> str:
    """Return the name in results of a metric of filtered answers: the harness names all filters but `none`."""
    return metric if filtered in (None, "none") else f"{metric},{filtered}"


def finite(value: Any) -> float | None:
    """Return a finite float, or None for what the harness calls "N/A"."""
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None


# ---- the folder ----


def fingerprint(model: LoadedModel) -> str:
    """Return a hash of a model: graph, precision, context, checksums of all weights, tokenizer, template, prompt."""
    tokenizer = model.tokenizer
    template = None if tokenizer.template is None else tokenizer.template.source
    vocabulary = hashlib.sha256((tokenizer.folder / FILE).read_bytes()).hexdigest()
    parts = [model.graph.to_dict(), model.compute_dtype, model.context, checksums({"params": model.params})]
    parts += [vocabulary, tokenizer.opening, tokenizer.stops, template, model.system_prompt]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def write_results(results: Mapping[str, Any], samples: Samples, folder: Path) -> None:
    """Write results and the lines of each task's samples, beside those of other tasks of the same model.

    What the folder has of a model with another fingerprint is removed. Killed at any moment, it leaves no two models
    that would be taken for one.
    """
    earlier = read_results(folder)
    if earlier.get("fingerprint") != results["fingerprint"]:
        earlier = {}
        (folder / RESULTS).unlink(missing_ok=True)  # first: items without it belong to no model
        for file in (folder / ITEMS).glob("*.jsonl"):
            file.unlink()
    for name, of_task in samples.items():
        lines = "".join(json.dumps(line_of(sample)) + "\n" for sample in of_task)
        (folder / ITEMS).mkdir(parents=True, exist_ok=True)
        write_atomically(folder / ITEMS / f"{name}.jsonl", lines.encode())
    merged = {**earlier, **results}
    if earlier:
        merged |= {key: earlier[key] | results[key] for key in ("tasks", "samples")}
    if before := earlier.get("contamination"):
        now = results.get("contamination", {})
        kept = {name: entry for name, entry in before["tasks"].items() if name not in results["tasks"]}
        merged["contamination"] = {**before, **now, "tasks": kept | now.get("tasks", {})}
    write_json(folder / RESULTS, merged)


def read_results(folder: Path) -> dict[str, Any]:
    """Return results.json; {} if there is none that can be read."""
    try:
        results: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return results


# ---- scores without the items that are in the training text ----


def contamination_of(seen: Contamination, tasks: Mapping[str, Any], samples: Samples) -> dict[str, Any]:
    """Return which items of the evaluated ones were found, and the scores of the others.

    Args:
        seen: of all items of the tasks.
        tasks: results, {task: {metrics: {metric: {value, stderr}}}}.
        samples: of every task; an item has the number of its place in the task.

    Returns:
        {texts: number of them, ngram: as decontamination's, tasks: {task: {items, too_short, too_short_of,
        found: [numbers], common: [numbers], without: {metric: {value, stderr}}}}}. common: found in more texts than
        count as a match; the scores are without these as well. too_short counts all `too_short_of` items of the
        task, the other numbers those that were evaluated. Metrics that are not a mean over items are left out.
    """
    entries = {}
    for name in samples.keys() & seen.items.keys():
        numbers = {str(sample["doc_id"]) for sample in samples[name]}
        found, common = (
            sorted(int(item) for task, item in items if task == name and item in numbers)
            for items in (seen.found, seen.common)
        )
        scores = tasks[name]["metrics"].items()
        rest = {metric: _without(samples[name], metric, score["value"], {*found, *common}) for metric, score in scores}
        entries[name] = {
            "items": len(numbers),
            "too_short": seen.too_short.get(name, 0),
            "too_short_of": seen.items[name],
            "found": found,
            "common": common,
            "without": {metric: without for metric, without in rest.items() if without is not None},
        }
    return {"texts": seen.texts, "ngram": seen.n_grams, "tasks": entries}


def _without(
    samples: Sequence[Mapping[str, Any]], metric: str, reported: float | None, found: set[int]
) -> dict[str, float | None] | None:
    name, _, filtered = metric.partition(",")
    chosen = [each for each in samples if each.get("filter", "none") == (filtered or "none") and name in each]
    values = [each[name] for each in chosen]
    if reported is None or not values or not all(isinstance(value, int | float) for value in values):
        return None
    if not math.isclose(statistics.fmean(values), reported, rel_tol=1e-9, abs_tol=1e-9):
        return None  # the harness aggregates otherwise
    rest = [float(each[name]) for each in chosen if each["doc_id"] not in found]
    stderr = statistics.stdev(rest) / math.sqrt(len(rest)) if len(rest) > 1 else None
    return {"value": statistics.fmean(rest) if rest else None, "stderr": stderr}

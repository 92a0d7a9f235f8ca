"""A model's scores: lm-evaluation-harness's own evaluator over our backend, and its results in our form."""

import contextlib
import gzip
import lzma
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import numpy as np

from affinage import __version__
from affinage.cluster.processes import Processes
from affinage.errors import UserError
from affinage.evaluation.backend import JaxLM
from affinage.evaluation.harness import cached, load_tasks, quiet
from affinage.evaluation.results import (
    Lines,
    Search,
    contamination_of,
    fingerprint,
    finite,
    label,
    line_of,
    of_item,
    write_results,
)
from affinage.evaluation.scoring import rows_that_fit
from affinage.evaluation.tasks import CORE, CORE_SHOTS, ChatTemplateUse, find_tasks, is_chat, items_of, of_pocket_world
from affinage.generation.model import LoadedModel

_BOOTSTRAP = 1000  # resamples for the standard errors that have no closed form (perplexity, F1)
_SAMPLES = 3  # items per task in the results for people to read
_NORMALIZED = ("hellaswag", "arc_challenge", "arc_easy", "piqa", "openbookqa", "agieval_lsat_ar")  # by length


def evaluate(
    model: LoadedModel,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,  # for results.json and items/TASK.jsonl; see `write_results`
    keep: Path | None = None,  # file of the harness's cache: answers of this model in it are not computed again
    world: Path | None = None,  # of the pocket world's benchmarks, whose facts are the training text
    data_dir: str | Path | None = None,
    apply_chat_template: ChatTemplateUse = "auto",  # to all tasks, or none; auto: to those for chat models
    limit: int | None = None,  # items per task: the first ones or, with a `sample_seed`, those that it draws
    sample_seed: int | None = None,
    num_fewshot: int | None = None,  # examples before each question; None: as many as the task says
    batch_size: int | None = None,  # rows of the context at once; None: as many as fit
    texts: Mapping[str, Sequence[str]] | None = None,  # by name, to measure bits per byte beside those of gzip and xz
    seen: Search | None = None,  # searches the training text for items; the results have the scores without those found
    answered: Callable[[Lines], None] = lambda _: None,  # gets the lines of all items
    progress: Callable[[str], None] = lambda _: None,  # gets a line about what is done
) -> dict[str, Any]:
    """Return the scores of a model on the `tasks` (names for `find_tasks`), with standard errors.

    Hosts that work together all call it with the same tasks and the same model, sharded over the devices of all. Each
    gets the scores; the first one alone searches the training text, compresses, and has the file `keep`.

    Raises UserError for tasks that cannot be found or scored, and for a model without a chat template that
    `apply_chat_template` wants.
    """
    if apply_chat_template is True and not has_chat_template(model):
        fix = "Evaluate a model that was trained to chat, or set it to `auto` or `false`."
        raise UserError(f"{model.name} has no chat template", where="evaluate.apply_chat_template", fix=fix)
    started, processes = time.monotonic(), Processes.at_work()
    chosen, unavailable = find_tasks(tasks, data_dir, world)
    of_chat, skipped = [task for task in chosen if is_chat(task)], []
    rounds = {apply_chat_template: chosen}  # by whether they are put in the chat template
    if apply_chat_template == "auto":
        rounds = {False: [task for task in chosen if not is_chat(task)], True: of_chat if model.chat else []}
        skipped = [] if model.chat else [task["task"] for task in of_chat]
    identity = fingerprint(model) if keep is not None or folder is not None else ""
    lm = JaxLM(model, batch_size or rows_that_fit(model), progress=progress)
    outcome, items, loaded = dict[str, Any](), dict[str, list[dict[str, Any]]](), dict[str, Any]()
    contamination = None
    with contextlib.ExitStack() as stack:
        caching: Any = lm
        if keep is not None:
            caching = cached(lm, keep, identity)
            stack.callback(caching.dbdict.close)
        stack.enter_context(quiet())
        for templated, specs in rounds.items():
            if not specs:
                continue
            lm.in_chat_template = bool(templated)
            of_round = load_tasks(specs, num_fewshot, CORE_SHOTS if CORE in tasks else {})
            drawn: dict[str, list[int]] = {}  # the places of items, ascending, whatever the other tasks are
            for name, task in of_round.items():
                if sample_seed is not None and limit is not None:
                    random, count = np.random.default_rng([sample_seed, *name.encode()]), len(task.eval_docs)
                    drawn[name] = sorted(map(int, random.choice(count, min(limit, count), replace=False)))
            raw = lm_eval.evaluator.evaluate(
                caching,
                {"tasks": of_round, "groups": {}, "group_map": {}},
                limit=None if drawn else limit,
                samples=drawn or None,
                bootstrap_iters=_BOOTSTRAP,
                apply_chat_template=bool(templated),
                fewshot_as_multiturn=bool(templated),
            )
            assert raw is not None
            loaded |= of_round
            outcome |= {name: _result(name, dict(raw), lm) for name in raw["n-samples"]}
            items |= raw["samples"]
        if seen is not None:
            progress("searching the training text for the items")
            searched = {name: task for name, task in loaded.items() if not of_pocket_world(name)}
            contamination = seen(items_of(searched)) if searched and processes.first else None
            processes.broadcast("the end of the search", None, seconds=None)
    results = {
        "model": model.name,
        "context": model.context,
        "tasks": outcome,
        "unavailable": unavailable,
        "skipped": skipped,
        "seconds": time.monotonic() - started,
        # Nothing is asked where all answers are in the file `keep`.
        "items_per_second": sum(task["items"] for task in outcome.values()) / lm.seconds if lm.requests else None,
        "requests": lm.requests,
        "versions": {"affinage": __version__, "jax": version("jax"), "lm_eval": version("lm_eval")},
        "samples": {name: [_readable(item) for item in of_task[:_SAMPLES]] for name, of_task in items.items()},
    }
    if CORE in tasks:
        results["core"] = _centered_mean(outcome)
    if contamination is not None:
        results["contamination"] = contamination_of(contamination, outcome, items)
    if texts:
        progress("measuring bits per byte")
        results["bits_per_byte"] = bits = {name: {"model": lm.bits_per_byte(each)} for name, each in texts.items()}
        for name, of_name in texts.items() if processes.first else ():
            bits[name] |= compressor_bits_per_byte(of_name)
        processes.broadcast("the end of the compression", None, seconds=None)
    lines = {name: [line_of(item) for item in of_task] for name, of_task in items.items()}
    answered(lines)
    if folder is not None:
        results |= {"fingerprint": identity}
        write_results(results, lines, folder)
    return results


def has_chat_template(model: LoadedModel) -> bool:
    """Return whether a model has learned a template: its tokenizer's, or ours if it was trained to chat."""
    return model.chat or model.tokenizer.template is not None


def compressor_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Return what `gzip -9` and `xz -9` need for the texts, a line each, in bits per byte: {"gzip": ..., "xz": ...}.

    What is common to several texts is compressed once; a model does not see the texts before.
    """
    encoded = [text.encode() for text in texts]
    whole, bits = b"\n".join(encoded), sum(map(len, encoded)) / 8
    return {"gzip": len(gzip.compress(whole, 9)) / bits, "xz": len(lzma.compress(whole, preset=9)) / bits}


def _result(name: str, raw: Mapping[str, Any], lm: JaxLM) -> dict[str, Any]:
    """The harness's results of a task as {metrics: {metric: {value, stderr}}, items, num_fewshot, version, ...}.

    `chat_template` is whether it was put in that, `chance` what guessing scores, if known, and `truncated` the number
    of items that did not fit the model's context.
    """
    scores, metrics = raw["results"][name], {}
    for key, value in scores.items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr"):
            stderr = finite(scores.get(f"{metric}_stderr,{filtered}"))
            metrics[label(metric, filtered)] = {"value": finite(value), "stderr": stderr}
    samples = raw["samples"][name]
    result = {
        "metrics": metrics,
        "items": raw["n-samples"][name]["effective"],
        "truncated": len({item["doc_id"] for item in samples if any(map(lm.was_truncated, item["arguments"]))}),
        "num_fewshot": raw["n-shot"].get(name, 0),
        "chat_template": lm.in_chat_template,
        "version": raw["versions"].get(name),
    }
    if raw["configs"][name].get("output_type") == "multiple_choice":
        # For `acc_mutual_info` the harness requests each choice without the question as well.
        twice = 2 if any(metric.startswith("acc_mutual_info") for metric in metrics) else 1
        result["chance"] = sum(twice / len(item["arguments"]) for item in samples) / len(samples)
    return result


def _centered_mean(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The mean over CORE's tasks of (score - chance) / (1 - chance), by the metrics of its authors."""
    centered = []
    for name in CORE_SHOTS:
        metrics = outcome.get(name, {}).get("metrics", {})
        score = metrics.get("acc_norm" if name in _NORMALIZED else "acc", {}).get("value")
        if score is not None:
            chance = outcome[name].get("chance", 0.0)
            centered.append((score - chance) / (1 - chance))
    return {"centered_mean": sum(centered) / len(centered) if centered else None, "tasks": len(centered)}


def _readable(item: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wants to see of an item: the question, the choices or the answer, what was right, how it scored."""
    arguments = [list(arguments) for arguments in item["arguments"]]
    shown: dict[str, Any] = {"prompt": arguments[0][0], "target": item["target"]}
    shown |= {of_item(name): value for name in item["metrics"] if (value := finite(item[name])) is not None}
    if isinstance(arguments[0][-1], dict):
        return shown | {"answer": item["filtered_resps"][0]}
    if len(arguments) == 1:
        return shown | {"continuation": arguments[0][-1]}
    scores = [response[0] for response in item["filtered_resps"]]
    shown["chosen"] = max(range(len(scores)), key=scores.__getitem__)
    if all(prompt == arguments[0][0] for prompt, _ in arguments):
        return shown | {"choices": [continuation for _, continuation in arguments]}
    return shown | {"prompt": "", "choices": ["".join(both) for both in arguments]}  # such as winogrande's

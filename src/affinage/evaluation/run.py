"""A model's scores: lm-evaluation-harness's own evaluator over our backend, and its results in our form."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lm_eval.evaluator
import numpy as np
from lm_eval.api.model import LM
from lm_eval.api.task import Task

from affinage import __version__
from affinage.cluster.processes import Processes
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.contamination import Contamination
from affinage.errors import UserError
from affinage.evaluation.backend import JaxLM
from affinage.evaluation.batch_size import rows_that_fit
from affinage.evaluation.benchmarks import CORE, CORE_SHOTS
from affinage.evaluation.compression import compressor_bits_per_byte, model_bits_per_byte
from affinage.evaluation.contaminated import contamination_of
from affinage.evaluation.harness import cached, load_tasks, quiet, reachable_data
from affinage.evaluation.item_lines import finite, label, line_of, of_item
from affinage.evaluation.result_folder import STATE, fingerprint, identity, write_results
from affinage.evaluation.tasks import ChatTemplateUse, find_tasks, items_of
from affinage.generation.model import LoadedModel

_BOOTSTRAP = 1000  # resamples for the standard errors that have no closed form (perplexity, F1)
Seen = Callable[[Iterable[BenchmarkItem]], Contamination]  # which items stand in the text that a model was trained on
Answered = Callable[[str, dict[str, Any]], None]  # the task, and what items/TASK.jsonl has of an item
_NORMALIZED = ("hellaswag", "arc_challenge", "arc_easy", "piqa", "openbookqa", "agieval_lsat_ar")  # by length
_VERSIONS_OF = ("jax", "lm_eval", "datasets")


def evaluate(
    model: LoadedModel,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    state: str | None = None,
    training: Mapping[str, Any] | None = None,
    keep: Path | None = None,
    task_folders: Mapping[str, Path] | None = None,
    data_dir: str | Path | None = None,
    chat: bool = False,
    apply_chat_template: ChatTemplateUse = "auto",
    limit: int | None = None,
    draw: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    max_new_tokens: int = 64,
    texts: Mapping[str, Sequence[str]] | None = None,
    compressors: bool = False,
    samples: int = 3,
    seen: Seen | None = None,
    answered: Answered | None = None,
    progress: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Scores of a model on benchmarks, with standard errors.

    `tasks` are looked up by `find_tasks` with `task_folders` and `data_dir`. Tasks that ask for generated text in the
    chat template are put to chat models only (`chat`); all others are asked without it, of base and chat models alike,
    so that their scores can be compared. By `apply_chat_template` all tasks are asked in it (true), or none (false).
    `limit` is items per task, the first ones or, with `draw`, those that the seed draws; `num_fewshot` examples before
    each question (None: as many as the task says, which is none for most), `batch_size` rows of the context at once
    (auto: as many as fit), `samples` items per task in the results for people to read. Of `texts` (validation texts by
    name) the bits per byte are measured, beside those of gzip and xz if `compressors`.

    `seen` finds items in the text that the model was trained on: those found are listed, and scores given without them.
    Tasks of `task_folders` are not looked for: they are of closed worlds, whose facts are their text.

    Answers are kept in the file `keep` as they come (the harness's cache, of this model alone), and those that it has
    are not computed again; `generation` in the results is of the texts that were.
    With a `folder`, writes results.json, and items/TASK.jsonl with the metrics of every single item, beside what it has
    of other tasks of this model; what it has of another model is removed, which `say` is told in a line. Only then do
    the results hold the model's `fingerprint`: it takes writing the tokenizer; `state`, what the caller tells a model
    from its earlier selves by, without its weights; and `training`, which one made it. `answered` is told of each item
    in turn.

    Hosts that work together all call it with the same model, sharded over the devices of all, and tasks. Each gets the
    scores; the first one alone looks for items in the text, compresses, and has the file `keep`.
    Raises UserError for tasks that cannot be found or scored, and for a model that has no chat template to be asked in
    always.
    """
    if apply_chat_template is True and not has_chat_template(model, chat):
        fix = "Ask a model that was trained to chat, or say `auto` or `false`."
        raise UserError(f"{model.name} has no chat template", where="evaluate.apply_chat_template", fix=fix)
    started, contamination, processes = time.monotonic(), None, Processes.at_work()
    found = find_tasks(tasks, task_folders or {}, data_dir)
    weights = fingerprint(model) if keep is not None or folder is not None else ""
    rows = rows_that_fit(model) if batch_size == "auto" else batch_size
    lm = JaxLM(model, batch=rows, max_new_tokens=max_new_tokens, progress=progress)
    keeping = None if keep is None else cached(lm, keep, f"{weights} {max_new_tokens}")
    outcome: dict[str, Any] = {}
    items: dict[str, list[dict[str, Any]]] = {}
    loaded: dict[str, Task] = {}
    try:
        with reachable_data(found.fetched), quiet(), _rare_collections():
            for chosen, templated in found.rounds(chat, apply_chat_template):
                if chosen:
                    lm.in_chat_template = templated
                    of_round = load_tasks(chosen, num_fewshot, CORE_SHOTS if CORE in tasks else {})
                    drawn = None if draw is None or limit is None else _drawn(of_round, limit, draw)
                    raw = _run(keeping or lm, of_round, limit=limit, drawn=drawn, templated=templated)
                    loaded |= of_round
                    outcome |= _by_task(raw, templated, lm)
                    items |= raw["samples"]
            if seen is not None:
                progress("searching the training text for the items")
                contamination = _look(seen, loaded, task_folders or {}) if processes.first else None
                processes.broadcast("the end of the search", None, seconds=None)
    finally:
        if keeping is not None:
            keeping.dbdict.close()
            if not processes.first:  # its copy of the answers
                Path(keeping.cache_db).unlink(missing_ok=True)
    results = {
        "model": model.name,
        "context": model.context,
        "tasks": outcome,
        "missing": list(found.missing),
        "skipped": [] if chat or apply_chat_template != "auto" else [str(task["task"]) for task in found.chat()],
        "seconds": time.monotonic() - started,
        "items_per_second": sum(task["items"] for task in outcome.values()) / max(lm.seconds, 1e-9),
        "requests": lm.requests,
        "versions": {"affinage": __version__} | {package: version(package) for package in _VERSIONS_OF},
        "samples": {name: [_readable(one) for one in of_task[:samples]] for name, of_task in items.items()},
    }
    if CORE in tasks:
        results["core"] = _centered_mean(outcome)
    if contamination is not None:
        results["contamination"] = contamination_of(contamination, outcome, items)
    if lm.answers:
        results["generation"] = _generation(lm)
    if texts:
        progress("measuring bits per byte")
        bits = {name: {"model": model_bits_per_byte(lm, some)} for name, some in texts.items()}
        for name, some in texts.items() if compressors and processes.first else ():
            bits[name] |= compressor_bits_per_byte(some)
        processes.broadcast("the end of the compression", None, seconds=None)
        results["bits_per_byte"] = bits
    if answered is not None:
        for name, of_task in items.items():
            for one in of_task:
                answered(name, line_of(one))
    if folder is not None:
        results |= {"fingerprint": identity(model, weights)} | ({} if state is None else {STATE: state})
        results |= {"training": dict(training)} if training else {}
        write_results(results, items, folder, say)
    return results


def has_chat_template(model: LoadedModel, chat: bool) -> bool:
    """Whether there is a template that a model has learned: its tokenizer's, or ours if it was trained to chat."""
    return chat or model.tokenizer.template is not None


def _look(seen: Seen, loaded: Mapping[str, Task], closed: Mapping[str, Path]) -> Contamination | None:
    """Which items stand in the training text; None if all tasks are of closed worlds."""
    left_out = {task["task"] for task in find_tasks(list(closed), closed).local}
    tasks = {name: task for name, task in loaded.items() if name not in left_out}
    return seen(items_of(tasks)) if tasks else None


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


def _drawn(tasks: Mapping[str, Task], count: int, seed: int) -> dict[str, list[int]]:
    """For every task the places of `count` of its items. What is drawn of a task does not depend on the others."""
    return {name: drawn_places(name, len(task.eval_docs), count, seed) for name, task in tasks.items()}


def drawn_places(task: str, items: int, count: int, seed: int) -> list[int]:
    """The places of `count` of a task's items that a seed draws, ascending."""
    random = np.random.default_rng([seed, *task.encode()])
    return sorted(map(int, random.choice(items, min(count, items), replace=False)))


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Inside, Python collects garbage with every 100,000th new object: millions of requests and answers live on."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(
    lm: LM, tasks: dict[str, Task], *, limit: int | None, drawn: dict[str, list[int]] | None, templated: bool
) -> dict[str, Any]:
    results = lm_eval.evaluator.evaluate(
        lm,
        {"tasks": tasks, "groups": {}, "group_map": {}},
        limit=None if drawn else limit,
        samples=drawn,
        bootstrap_iters=_BOOTSTRAP,
        apply_chat_template=templated,
        fewshot_as_multiturn=templated,
    )
    assert results is not None
    return dict(results)


def _by_task(raw: Mapping[str, Any], templated: bool, lm: JaxLM) -> dict[str, Any]:
    """The harness's results as {task: {metrics: {metric: {value, stderr}}, items, shots, version, ...}}.

    `chat_template` is whether it was asked in that, and `chance`, where that is known, what guessing scores; `longer`
    is how many of the items did not fit the model's context.
    """
    tasks: dict[str, Any] = {}
    for name, measured in raw["results"].items():
        if name not in raw["n-samples"]:
            continue  # a group; its members are there
        metrics: dict[str, Any] = {}
        for key, value in measured.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            stderr = finite(measured.get(f"{metric}_stderr,{filtered}"))
            metrics[label(metric, filtered)] = {"value": finite(value), "stderr": stderr}
        tasks[name] = {
            "metrics": metrics,
            "items": raw["n-samples"][name]["effective"],
            "longer": len({one["doc_id"] for one in raw["samples"][name] if any(map(lm.was_longer, one["arguments"]))}),
            "shots": raw["n-shot"].get(name, 0),
            "chat_template": templated,
            "version": raw["versions"].get(name),
        }
        if raw["configs"][name].get("output_type") == "multiple_choice":
            # Of each choice the harness asks for the probability without the question, too, for `acc_mutual_info`.
            twice = 2 if any(metric.startswith("acc_mutual_info") for metric in metrics) else 1
            choices = [len(item["arguments"]) // twice for item in raw["samples"][name]]
            tasks[name]["chance"] = sum(1 / count for count in choices) / len(choices)
    return tasks


def _generation(lm: JaxLM) -> dict[str, Any]:
    """How many generated texts ended by a control token before their length ran out, as a share with standard error."""
    count = len(lm.answers)
    stopped = sum(answer.generation.finish_reason == "eos" for answer in lm.answers) / count
    return {
        "texts": count,
        "stopped": {"value": stopped, "stderr": math.sqrt(stopped * (1 - stopped) / max(1, count - 1))},
    }


def _readable(item: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wants to see of an item: the question, the choices or the answer, what was right, how it scored."""
    arguments = [list(one) for one in item["arguments"]]
    shown: dict[str, Any] = {"prompt": arguments[0][0], "target": item["target"]}
    shown |= {of_item(name): value for name in item["metrics"] if (value := finite(item[name])) is not None}
    if isinstance(arguments[0][-1], dict):
        return shown | {"answer": item["filtered_resps"][0]}
    if len(arguments) > 1:
        scores = [response[0] for response in item["filtered_resps"]]
        same_prompt = all(one[0] == arguments[0][0] for one in arguments)
        choices = [one[-1] if same_prompt else "".join(one) for one in arguments]
        shown |= {"choices": choices, "chosen": max(range(len(scores)), key=scores.__getitem__)}
        return shown if same_prompt else shown | {"prompt": ""}
    return shown | {"continuation": arguments[0][-1]}

"""lm-evaluation-harness by its public interface: tasks are loaded and checked, templates sandboxed, answers cached."""

import io
import itertools
import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

# Read when the library `evaluate` is imported, which otherwise downloads programs to compute metrics, and runs them.
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")
# The harness's bootstrap forks a pool of processes, which may deadlock once JAX's threads run.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

import huggingface_hub
import jinja2
import lm_eval.tasks
import lm_eval.utils
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.model import LM, CachingLM
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from sqlitedict import SqliteDict

from affinage.cluster.processes import Processes
from affinage.errors import UserError, did_you_mean, first_line, is_of_network, of_the_machine
from affinage.evaluation.tasks import BENCHMARKS, GROUPS, is_offline
from affinage.network import limit_requests

DEFINITIONS = Path(lm_eval.tasks.__file__).parent
_BROADCAST = 1000  # answers in a message to the other hosts

# The harness's templates reach no object of Python, and are compiled once.
_sandbox = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_sandbox.filters |= lm_eval.utils.env.filters
_sandbox.from_string = lru_cache(maxsize=None)(_sandbox.from_string)  # type: ignore[assignment, method-assign]
lm_eval.utils.env = _sandbox


@contextmanager
def quiet() -> Iterator[None]:
    """While entered, the harness and its libraries print nothing but errors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:  # it prints that it resamples, and shows progress bars
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def load_tasks(
    tasks: Sequence[Mapping[str, Any]], num_fewshot: int | None = None, shots_of: Mapping[str, int] | None = None
) -> dict[str, Task]:
    """Return the harness's tasks by name, ready to be evaluated, for those that `find_tasks` returns.

    `num_fewshot` replaces a task's own number, unless that is 0; if it is None, `shots_of` does by the task's name. No
    example before a question is the item itself. Raises UserError for a name that the harness does not have, for
    whatever is wrong with a task or its data, and if the Hub, which some of the data come from, does not answer.
    """
    random.seed(0)  # tasks may shuffle as they are loaded; these are the harness's own seeds
    np.random.seed(1234)
    limit_requests()
    manager = task_manager([task["task"] for task in tasks if len(task) == 1 or is_offline(task)])
    loaded: dict[str, Task] = {}
    for spec in map(dict, tasks):
        name, where = spec["task"], str(spec.pop("where", spec["task"]))
        is_own = len(spec) > 1 and not is_offline(spec)  # a task file defines it
        has_files = "custom_dataset" in spec or "data_files" in spec.get("dataset_kwargs", {})
        is_remote = not has_files and not os.path.exists(str(spec.get("dataset_path")))
        try:
            if is_own:
                _check_metrics(spec)
            if is_remote and not huggingface_hub.constants.HF_HUB_OFFLINE:
                huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=5)  # is it there at all?
            # A name alone, a whole configuration, or in a group what overrides the data of the harness's own task.
            whole: Any = name if len(spec) == 1 else spec if is_own else {"group": "of this machine", "task": [spec]}
            if not (tasks_made := manager.load([whole])["tasks"]):
                raise UserError(f"`{name}` is a group, without tasks of its own", fix="Leave out `group`.")
            for own_name, made in tasks_made.items():
                if isinstance(made, ConfigurableTask):
                    _set_examples(made, num_fewshot if num_fewshot is not None else (shots_of or {}).get(own_name))
                if is_own:
                    _check_items(made)
                    _check_scores(made)
                loaded[own_name] = made
        except UserError as error:
            error.where = error.where or where
            raise
        except (Exception, SystemExit) as error:
            unreachable = is_remote and is_of_network(error)
            if isinstance(error, OSError) and not unreachable and of_the_machine(error) is not None:  # a full disk
                raise
            what = f"the task `{name}` cannot be used: {type(error).__name__}: {first_line(error)}"
            fix = "Mend it, or install what it needs, or leave it out."
            if unreachable or (is_remote and isinstance(error, OSError)):
                fix = f"{huggingface_hub.constants.ENDPOINT} must be reached, or HF_HUB_OFFLINE=1 set to use what was "
                fix += "fetched before, or a folder named: --data-dir."
            raise UserError(what, where=where, fix=fix) from error
    return loaded


def task_manager(names: Sequence[str], where: str = "evaluate.tasks") -> TaskManager:
    """Return the harness's index of no more tasks than these names need: all take seconds. UserError: unknown names."""
    if all(name in BENCHMARKS for name in names):
        folders = sorted({str((DEFINITIONS / BENCHMARKS[name]["definition"]).parent) for name in names})
        return TaskManager(include_path=folders, include_defaults=False)
    manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks and name not in BENCHMARKS:
            fix = did_you_mean(name, [*manager.all_tasks, *GROUPS, *BENCHMARKS]) or "Names of tasks: lm-eval ls tasks"
            raise UserError(f"there is no task `{name}`, nor a file of that name", where=where, fix=fix)
    return manager


def _check_metrics(task: Mapping[str, Any]) -> None:
    """Raise UserError for what a task file may not have: code of others, and metrics that are downloaded programs."""
    if foreign := task.keys() & {"use_prompt", "unsafe_code"}:
        raise UserError(f"`{min(foreign)}` of a task runs code of others", fix="Leave it out.")
    for metric in task.get("metric_list") or ():
        name = metric.get("metric") if isinstance(metric, Mapping) and not metric.get("hf_evaluate") else None
        if name not in metric_registry:
            fix = did_you_mean(str(name), metric_registry) or f"Write `- metric: NAME`: {', '.join(metric_registry)}."
            raise UserError(f"the harness computes no metric {name or metric}", fix=fix)


def _set_examples(task: ConfigurableTask, num_fewshot: int | None) -> None:
    """Set the number of examples, and keep the item itself out of them."""
    config, examples = task.config, task.fewshot_cfg
    if config.num_fewshot is None or (num_fewshot is not None and config.num_fewshot != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    if type(config.num_fewshot) is not int or config.num_fewshot < 0:
        raise UserError(f"`num_fewshot: {config.num_fewshot}` is no number of examples", fix="Write 0 or more.")
    task.set_fewshot_seed(seed=1234)  # the harness's own default
    if examples.samples is not None:  # they are written in the task file
        return
    # The harness leaves the item out where both splits have the same name, of `test_split` only.
    evaluated = config.test_split or config.validation_split
    if (examples.split or config.training_split or config.validation_split or config.test_split) == evaluated:
        task.set_config(key="test_split", value=evaluated)
        examples.split = evaluated
    if shots := config.num_fewshot:
        pool = len(list(task.fewshot_docs() or ())) - (examples.split == evaluated)
        if shots > pool:
            fix = "Use fewer with --num-fewshot, or give the task more items in `fewshot_split`."
            raise UserError(f"{shots} examples cannot be shown of the {pool} items beside the one asked", fix=fix)


def _check_items(task: Task) -> None:
    """Raise UserError for the first item that cannot be scored, or is among the examples of another split."""
    examples = list(task.fewshot_docs() or ()) if task.config.num_fewshot else []
    known = set(map(repr, examples if task.fewshot_cfg.split != task.config.test_split else ()))
    for example in examples:
        task.doc_to_text(example, task.fewshot_cfg.doc_to_text)
        task.doc_to_target(example, task.fewshot_cfg.doc_to_target)
    if task.OUTPUT_TYPE == "multiple_choice" and task.config.doc_to_choice is None:
        raise UserError("a `multiple_choice` task needs `doc_to_choice`", fix='Write one: doc_to_choice: "{{choices}}"')
    for number, item in enumerate(task.eval_docs, 1):
        try:
            for template in filter(None, (task.config.description, task.config.gen_prefix)):
                lm_eval.utils.apply_template(template, item)
            if repr(item) in known:
                raise ValueError("it is one of the examples, too, with its answer")
            question, answer = task.doc_to_text(item), task.doc_to_target(item)
            if question in (None, "None") or answer in (None, "None", []):
                raise ValueError("no question in `doc_to_text`, or no answer in `doc_to_target`")
            if task.OUTPUT_TYPE != "multiple_choice":
                continue
            choices, right = task.doc_to_choice(item), question if isinstance(question, int) else answer
            if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
                raise ValueError(f"`doc_to_choice` gives no list of choices but {choices!r}")
            for each in right if isinstance(right, list) else [right]:
                if each not in choices and not (isinstance(each, int) and 0 <= each < len(choices)):
                    raise ValueError(f"`doc_to_target` names {each!r} as right, of {len(choices)} choices")
        except Exception as error:  # also of its templates
            fix = f"Mend the item in the data of {task.config.task}, or the task file."
            raise UserError(f"item {number} cannot be scored: {first_line(error)}", fix=fix) from error


def _check_scores(task: ConfigurableTask) -> None:
    """Raise UserError for filters and metrics that cannot be computed, by those of made-up answers to a few items."""
    task.build_all_requests(limit=20, rank=0, world_size=1)
    task.set_fewshot_seed(seed=1234)
    made_up: Any = {"loglikelihood_rolling": -1.0, "generate_until": "1"}.get(task.OUTPUT_TYPE, (-1.0, True))
    scores, wrong = list[Mapping[str, Any]](), "filter_list"
    try:
        for request in task.instances:
            request.resps = [made_up] * task.config.repeats
        task.apply_filters()
        for of_item in (list(group) for _, group in itertools.groupby(task.instances, lambda each: each.doc_id)):
            answers = ([each.filtered_resps[name] for each in of_item] for name in of_item[0].filtered_resps)
            scores += [task.process_results(of_item[0].doc, each) for each in answers]
        metrics = [each["metric"] for each in task.config.metric_list or ()] or [*scores[0]]
        for wrong in metrics or ["metric_list"]:
            task.aggregation()[wrong]([each[wrong] for each in scores])
        if task.OUTPUT_TYPE == "generate_until":
            wrong, told = "generation_kwargs", normalize_gen_kwargs(dict(task.config.generation_kwargs or {}), 1)
            "".join(handle_stop_sequences(told.get("until"), eos=None)) + str(int(told["max_gen_toks"]))
    except Exception as error:  # of the harness and its libraries
        what = f"`{wrong}` cannot be computed of answers of `{task.OUTPUT_TYPE}`: {type(error).__name__}"
        raise UserError(f"{what}: {first_line(error)}", fix="Name one that fits the `output_type`.") from error


@contextmanager
def cached(lm: LM, path: Path | None, model: str) -> Iterator[Any]:
    """While entered, the backend with the harness's own cache of answers: JSON in a file, not pickles, of one model.

    Without a path it is temporary. Of hosts that evaluate together the first one has it, and broadcasts what it holds.
    """
    processes, file = Processes.at_work(), None
    if path is not None and processes.first:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = str(path)
    with SqliteDict(file, encode=json.dumps, decode=json.loads, autocommit=True, outer_stack=False) as answers:
        if answers.get("model") != model:
            answers.clear()
            answers["model"] = model
        known = list(answers.items()) if processes.count > 1 and processes.first else []
        for start in range(0, processes.broadcast("how many answers are known", len(known), seconds=None), _BROADCAST):
            answers.update(processes.broadcast("known answers", known[start : start + _BROADCAST], seconds=None))
        answers.commit(blocking=True)
        caching = CachingLM(lm, answers.filename)
        caching.dbdict.close()
        caching.dbdict = answers
        lm.set_cache_hook(caching.get_cache_hook())
        yield caching

"""lm-evaluation-harness by its public interface: its tasks loaded, prompts rendered in a sandbox, answers kept."""

import ast
import contextlib
import dataclasses
import io
import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

# Read when the library `evaluate` is imported, which fetches programs of others to compute metrics, and runs them.
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")

import datasets
import huggingface_hub
import jinja2
import lm_eval.tasks
import lm_eval.utils
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.model import LM, CachingLM
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager
from sqlitedict import SqliteDict

from affinage.cluster.processes import Processes
from affinage.data.hub_answers import is_of_the_network, limit_requests
from affinage.errors import UserError, did_you_mean, first_line
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, POCKET_TASKS

DEFINITIONS = Path(lm_eval.tasks.__file__).parent
_SHARED_AT_ONCE = 1000  # answers in a message to the other hosts
_PATIENCE = 5.0  # seconds, for the Hub to answer at all
_LOGGERS = ("lm_eval", "datasets", "evaluate", "fsspec", "filelock", "urllib3", "huggingface_hub")
_OFFLINE = "items on this machine"  # the group that overrides the data of the harness's own tasks
_KEYS = {one.name for one in dataclasses.fields(TaskConfig)} - {"use_prompt", "unsafe_code", "custom_dataset"}
_TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")


@contextmanager
def quiet() -> Iterator[None]:
    """While entered, the harness and its libraries print nothing but errors, and start no processes."""
    with ExitStack() as stack:
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        # Its bootstrap forks a pool of processes, which may deadlock once JAX's threads run.
        before = os.environ.get("DISABLE_MULTIPROC")
        os.environ["DISABLE_MULTIPROC"] = "1"
        stack.callback(os.environ.pop if before is None else os.environ.__setitem__, "DISABLE_MULTIPROC", before or "1")
        if datasets.utils.logging.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        stack.enter_context(redirect_stdout(io.StringIO()))  # it prints that it resamples,
        stack.enter_context(redirect_stderr(io.StringIO()))  # and shows bars that no setting switches off
        yield


def load_tasks(
    tasks: Sequence[Mapping[str, Any] | str], num_fewshot: int | None = None, shots_of: Mapping[str, int] | None = None
) -> dict[str, Task]:
    """The harness's tasks by name, ready to be evaluated: configurations of task files, benchmarks, or names.

    `num_fewshot` replaces a task's own number, unless that is set to 0; where it is None, `shots_of` does by the task's
    name. No example before a question is the item asked. Raises UserError for a name that the harness does not have,
    and for whatever is wrong with a task or its data.
    """
    random.seed(0)  # tasks may shuffle as they are loaded; these are the harness's own seeds
    np.random.seed(1234)
    loaded: dict[str, Task] = {}
    named = [task for task in tasks if isinstance(task, str)]
    offline = [str(task["task"]) for task in tasks if not isinstance(task, str) and is_offline(task)]
    manager = _manager([*named, *offline])
    for task in tasks:
        name = task if isinstance(task, str) else str(task["task"])
        where = name if isinstance(task, str) or "where" not in task else str(task["where"])
        with _told_of(name, where):
            if isinstance(task, str):
                found = manager.load([task])["tasks"]
            elif is_offline(task):
                found = manager.load([{"group": _OFFLINE, "task": [_without_place(task)]}])["tasks"]
            else:
                found = manager.load([_in_sandbox(task)])["tasks"]
            for one in found.values():
                _prepare(one, num_fewshot if num_fewshot is not None else (shots_of or {}).get(one.task_name))
                if not isinstance(task, str) and not is_offline(task):
                    _check_items(one)
        loaded |= found
    return loaded


def _without_place(task: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in task.items() if key != "where"}


def is_offline(task: Mapping[str, Any]) -> bool:
    """Whether it is a benchmark of the harness over a file of items on this machine."""
    return "benchmark" in (task.get("dataset_kwargs") or {})


def check_known(names: Sequence[str], where: str) -> None:
    """Raise UserError for a name that neither we nor the harness have; reading its 13,000 files takes seconds."""
    with quiet():
        _manager(names, where)


def _manager(names: Sequence[str], where: str = "evaluate.tasks") -> TaskManager:
    """The harness's index of tasks, of no more of its files than these names need."""
    if all(name in BENCHMARKS for name in names):
        folders = sorted({str((DEFINITIONS / BENCHMARKS[name].definition).parent) for name in names})
        return TaskManager(include_path=folders, include_defaults=False)
    manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks and name not in BENCHMARKS:
            known = [*manager.all_tasks, *GROUPS, *BENCHMARKS, *POCKET_TASKS]
            fix = did_you_mean(name, known) or "Names of tasks: lm-eval ls tasks"
            raise UserError(f"there is no task `{name}`, nor a file of that name", where=where, fix=fix)
    return manager


@contextmanager
def _told_of(name: str, where: str) -> Iterator[None]:
    """Whatever the harness raises becomes one message that names the task; what is wrong with a network does not."""
    try:
        yield
    except UserError as error:
        raise UserError(error.what, where=error.where or where, fix=error.fix) from error
    except (Exception, SystemExit) as error:
        of_the_machine = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if of_the_machine or (isinstance(error, Exception) and is_of_the_network(error)):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ModuleNotFoundError):
            cause = cause.__cause__ or cause.__context__
        fix = "Mend the task file, or leave the task out."
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            fix = f"Install what it needs: pip install {cause.name.partition('.')[0]}; or leave the task out."
        what = f"the task `{name}` cannot be used: {type(error).__name__}: {first_line(error)}"
        raise UserError(what, where=where, fix=fix) from error


# ---- task files of others ----


class Template:
    """A Jinja template of a task, compiled once and rendered in a sandbox; the harness calls it with an item."""

    _ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    _ENVIRONMENT.filters |= lm_eval.utils.env.filters

    def __init__(self, source: str, field: str, *, choices: bool) -> None:
        self._source, self._field, self._choices = source, field, choices
        self._template = self._ENVIRONMENT.from_string(source)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "Template":
        return self  # the harness copies configurations

    def __call__(self, item: Mapping[str, Any]) -> Any:
        """What the harness would make of the template."""
        if self._source in item:
            return item[self._source]
        text = self._template.render(**item)
        if self._field == "doc_to_choice":
            return ast.literal_eval(text)
        if text.isdigit() and self._choices:
            return int(text)
        if self._field == "doc_to_target" and text.startswith("[") and text.endswith("]"):
            with contextlib.suppress(SyntaxError, ValueError):
                return ast.literal_eval(text)
        return text


def _in_sandbox(task: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a task file, whose templates can reach nothing and whose metrics are the harness's.

    Raises UserError for keys and metrics that the harness does not have, and for templates that it would render itself.
    """
    config = _without_place(task)
    for key in config.keys() - _KEYS - {"custom_dataset", "group"}:
        raise UserError(f"a task has no `{key}`", fix=did_you_mean(key, sorted(_KEYS)) or "Leave it out.")
    for metric in config.get("metric_list") or ():
        name = metric.get("metric") if isinstance(metric, Mapping) else metric
        if not isinstance(metric, Mapping) or name not in metric_registry or metric.get("hf_evaluate"):
            fix = did_you_mean(str(name), sorted(metric_registry)) or f"There are {', '.join(sorted(metric_registry))}."
            raise UserError(f"the harness computes no metric `{name}`", fix=fix)
    for field in ("description", "gen_prefix", "doc_to_decontamination_query", "doc_to_image", "doc_to_audio"):
        if "{" in str(config.get(field) or ""):
            fix = "Write it as plain text, or in doc_to_text."
            raise UserError(f"`{field}` has a template, which is not rendered here", fix=fix)
    choices = config.get("doc_to_choice") is not None
    for section in (config, config.get("fewshot_config") or {}):
        for field in _TEMPLATES:
            if isinstance(section.get(field), str):
                section[field] = Template(section[field], field, choices=choices)
    return config


def _prepare(task: Task, num_fewshot: int | None) -> None:
    """Set the number of examples, keep the item asked out of them, and compile the templates once."""
    if not isinstance(task, ConfigurableTask):
        return
    config, examples = task.config, task.fewshot_cfg
    if config.num_fewshot is None or (num_fewshot is not None and config.num_fewshot != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=1234)  # the harness's own default
    # The harness leaves the item out where both splits have the same name, of `test_split` only.
    evaluated = config.test_split or config.validation_split
    shown = examples.split or config.training_split or config.validation_split or config.test_split
    if examples.samples is None and shown == evaluated:
        task.set_config(key="test_split", value=evaluated)
        examples.split = evaluated
    for field in _TEMPLATES:
        for section in (config, examples):
            if isinstance(source := getattr(section, field), str):
                setattr(section, field, Template(source, field, choices=config.doc_to_choice is not None))
    shots = config.num_fewshot or 0
    if shots:
        pool = len(list(task.fewshot_docs() or ())) if examples.samples is None else shots
        if shots > pool - (examples.split == evaluated):
            fix = "Ask for fewer with --num-fewshot, or give the task more items in `fewshot_split`."
            raise UserError(f"{shots} examples cannot be shown of the {pool} items that there are", fix=fix)


def _check_items(task: Task) -> None:
    """Raise UserError for the first item that cannot be scored: an empty question, a right answer that is not there."""

    def wrong(number: int, what: str) -> UserError:
        return UserError(f"item {number} {what}", fix="Mend the item, or what the task file makes of it.")

    if task.config.num_fewshot:
        shown = task.fewshot_cfg
        for example in task.fewshot_docs() or ():
            task.doc_to_text(example, shown.doc_to_text)
            task.doc_to_target(example, shown.doc_to_target)
    for number, item in enumerate(task.eval_docs, 1):
        try:
            question, answer = task.doc_to_text(item), task.doc_to_target(item)
            choices = task.doc_to_choice(item) if task.config.doc_to_choice is not None else None
        except Exception as error:  # of its templates
            raise wrong(number, f"does not fit the templates: {first_line(error)}") from error
        if question is None or answer is None or question == "None" or answer in ("None", []):
            raise wrong(number, "has no question" if question in (None, "None") else "has no right answer")
        if task.OUTPUT_TYPE != "multiple_choice":
            continue
        if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
            raise wrong(number, f"has no list of choices but {choices!r}")
        right = question if isinstance(question, int) else answer
        for one in right if isinstance(right, list) else [right]:
            if not (isinstance(one, int) and 0 <= one < len(choices)) and one not in choices:
                raise wrong(number, f"says that {one!r} is right, of {len(choices)} choices")


# ---- answers over a kill ----


def cached(lm: LM, path: Path, model: str) -> CachingLM:
    """The backend with lm-evaluation-harness's own cache of answers in a file, of one model only.

    The file holds JSON, not the pickles that the harness would write. Of hosts that evaluate together the first has the
    file and shares what is in it: all of them must ask the devices the same questions.
    """
    processes = Processes.at_work()
    path = path if processes.first else path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        with path.open("rb") as file:
            known_form = file.read(6) == b"SQLite"
        if not known_form:
            path.unlink()  # of another version
    answers = SqliteDict(str(path), encode=json.dumps, decode=json.loads, autocommit=True, outer_stack=False)
    if answers.get("model") != model:
        answers.clear()
        answers["model"] = model
    known = list(answers.items()) if processes.count > 1 and processes.first else []
    for start in range(0, processes.broadcast("how many answers are known", len(known), seconds=None), _SHARED_AT_ONCE):
        answers.update(processes.broadcast("known answers", known[start : start + _SHARED_AT_ONCE], seconds=None))
    answers.commit(blocking=True)
    caching = CachingLM(lm, str(path))
    caching.dbdict.close()
    caching.dbdict = answers
    lm.set_cache_hook(caching.get_cache_hook())
    return caching


# ---- the Hub ----


@contextmanager
def reachable_data(named: Sequence[str]) -> Iterator[None]:
    """While entered, the data of the tasks `named` are fetched from the Hub; UserError where it does not answer."""
    limit_requests()
    endpoint = huggingface_hub.constants.ENDPOINT
    fix = "Check the network, set HF_HUB_OFFLINE=1 to use what was fetched before, or give a folder: --data-dir."
    if named and not huggingface_hub.constants.HF_HUB_OFFLINE and not _answers(endpoint):
        raise UserError(f"the items of {', '.join(named)} cannot be fetched: {endpoint} does not answer", fix=fix)
    try:
        yield
    except Exception as error:
        of_a_library = isinstance(error, OSError) and error.errno is None  # an error of a file here has a number
        if not named or isinstance(error, UserError) or not (of_a_library or is_of_the_network(error)):
            raise
        what = f"the items of {', '.join(named)} cannot be fetched from {endpoint}: {first_line(error)}"
        raise UserError(what, fix=fix) from error


def _answers(endpoint: str) -> bool:
    try:
        huggingface_hub.get_session().head(endpoint, timeout=_PATIENCE)
    except Exception:  # whatever a network, a proxy or a name server can come up with
        return False
    return True

"""Tasks that cannot be scored here are named before a model is asked: for want of a metric, or of a package."""

import dis
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import lm_eval.api.registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml

from affinage.errors import UserError
from affinage.evaluation import metric_library

_NAMED = 12  # tasks in a message


def refuse_unscorable(tasks: Iterable[Mapping[str, Any] | str], manager: TaskManager) -> None:
    """See that the harness can read and score these tasks: configurations, or names of tasks, groups and tags.

    Call it in `tamed_harness`. The tasks' items are not fetched. Raises UserError, which names those that it cannot.
    """
    unscored: dict[str, None] = {}
    unread: dict[str, BaseException] = {}
    for name, read in (found for task in tasks for found in _meant(task, manager)):
        try:
            if _is_foreign(read()):
                unscored[name] = None
        except (Exception, SystemExit) as error:  # whatever a module of a task does when it is imported
            if any(isinstance(one, UserError) for one in _chain(error)):  # it loads its metrics then
                unscored[name] = None
            else:
                unread[name] = error
    if unread:
        raise cannot_be_read([*unread], next(iter(unread.values())))
    if unscored:
        raise UserError(
            f"{_listed([*unscored])}: scored by programs that the library `{metric_library.NAME}` fetches, such as "
            f"bertscore; those are not run here",
            where="evaluate.tasks",
            fix="Leave these out; what else a group has can be named one by one. "
            f"Computed are {', '.join(metric_library.METRICS)}.",
        )


@contextmanager
def readable(tasks: list[str]) -> Iterator[None]:
    """While entered, a package that one of the tasks lacks is told as such."""
    try:
        yield
    except ImportError as error:
        raise cannot_be_read(tasks, error) from error


def cannot_be_read(tasks: list[str], error: BaseException) -> UserError:
    """What to tell of tasks whose program cannot be imported, most often for want of a package."""
    said = " ".join(str(error).split()) or type(error).__name__
    missing = next((one for one in _chain(error) if isinstance(one, ModuleNotFoundError) and one.name), None)
    part = str(missing.name) if missing else ""
    package = part.partition(".")[0]
    if not package:
        why, fix = said, "Install what it asks for, or leave these tasks out."
    elif importlib.util.find_spec(package) is None:
        why = f"the package `{package}` is not installed" + (f" ({said})" if missing is not error else "")
        fix = f"Install it (`pip install {package}`), or leave these tasks out."
    else:
        why = f"the installed `{package}` has no `{part}`, which they were written for"
        fix = "Leave these tasks out: an older version of that package has it, beside which the rest may not work."
    return UserError(f"{_listed(tasks)} cannot be read: {why}", where="evaluate.tasks", fix=fix)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _meant(
    task: Mapping[str, Any] | str, manager: TaskManager
) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """The tasks that a configuration or a name stands for, and what reads their configurations."""
    if isinstance(task, Mapping):
        yield str(task["task"]), lambda: task
        return
    entry = manager.task_index.get(task)
    if entry is None or (entry.kind is not Kind.TAG and entry.yaml_path is None):
        return  # a part of a group that is written out there
    if entry.kind is Kind.TAG:
        members: Iterable[Any] = sorted(entry.tags)
    elif entry.kind is Kind.GROUP:
        members = (entry.cfg or {}).get("task") or ()
    else:
        yield task, partial(load_yaml, str(entry.yaml_path))
        return
    for member in members if not isinstance(members, str) else [members]:
        inner = (member.get("group") or member.get("task")) if isinstance(member, Mapping) else member
        if isinstance(inner, str):
            yield from _meant(inner, manager)


def _is_foreign(config: Mapping[str, Any]) -> bool:
    metrics = [metric for metric in config.get("metric_list") or () if isinstance(metric, Mapping)]
    named = (metric.get(key) for metric in metrics for key in ("metric", "aggregation"))
    scoring = [config.get("process_results"), *named]
    if "class" in config:
        scoring = [*_program(config["class"])]
    if any(_loads_another(function, set()) for function in scoring):
        return True
    # Of other tasks the harness computes the metrics itself, and looks none up.
    looked_up = config.get("output_type", "generate_until") == "generate_until" and not config.get("process_results")
    return "class" not in config and looked_up and any(_is_unknown(metric) for metric in metrics)


def _program(task: type) -> Iterator[Any]:
    """What the module of a task that is a program has, and its methods."""
    spaces = [sys.modules[task.__module__], *(kind for kind in task.__mro__ if kind.__module__ == task.__module__)]
    yield from (value for space in spaces for value in vars(space).values())


def _is_unknown(metric: Mapping[str, Any]) -> bool:
    name = metric.get("metric")
    known = metric.get("hf_evaluate") is not True and name in lm_eval.api.registry.metric_registry
    return isinstance(name, str) and not known and name not in metric_library.METRICS


def _loads_another(function: Any, seen: set[Any]) -> bool:
    """Whether a function, or one of its module that it names, loads a metric that is not here."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    steps = [*_steps(function.__code__)]
    names = {step.argval for step in steps if isinstance(step.argval, str)}
    values = [function.__globals__.get(name) for name in names]
    library = metric_library.MODULE, metric_library.load
    if metric_library.NAME in names or any(value is one for value in values for one in library):
        # What is loaded is the text that comes next, as in `evaluate.load("rouge")`; anything else is not known.
        called = (then for step, then in pairwise(steps) if step.opname.startswith("LOAD_") and step.argval == "load")
        if any(then.opname != "LOAD_CONST" or then.argval not in metric_library.METRICS for then in called):
            return True
    inner = [value for value in values if getattr(value, "__module__", "") == function.__module__]
    return any(_loads_another(value, seen) for value in inner)


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)

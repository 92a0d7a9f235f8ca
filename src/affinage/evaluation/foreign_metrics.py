"""Tasks whose scores come from programs that the library `evaluate` fetches: told by name before a model is asked."""

import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import lm_eval.api.registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml

from affinage.errors import UserError
from affinage.evaluation.harness import refuse_metric

_LIBRARY = "evaluate"
_NAMED = 12  # tasks in a message


def refuse_foreign_metrics(tasks: Iterable[Mapping[str, Any] | str], manager: TaskManager) -> None:
    """See that the harness can score these tasks by itself: configurations, or names of tasks, groups and tags.

    Call it in `tamed_harness`. The tasks' items are not fetched. Raises UserError, which names those that it cannot.
    """
    refused: dict[str, None] = {}
    for name, read in (found for task in tasks for found in _meant(task, manager)):
        try:
            foreign = _is_foreign(read())
        except UserError:  # its module fetches one when it is imported
            foreign = True
        if foreign:
            refused[name] = None
    if refused:
        listed = ", ".join([*refused][:_NAMED]) + (" ..." if len(refused) > _NAMED else "")
        raise UserError(
            f"{listed}: scored by programs that the library `evaluate` fetches, such as rouge; those are not run here",
            where="evaluate.tasks",
            fix="Leave these out; what else a group has can be named one by one.",
        )


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
    if "class" in config:
        return any(_fetches(function, set()) for function in _program(config["class"]))
    metrics = [metric for metric in config.get("metric_list") or () if isinstance(metric, Mapping)]
    named = (metric.get(key) for metric in metrics for key in ("metric", "aggregation"))
    scoring = [config.get("process_results"), *named]
    if any(_fetches(function, set()) for function in scoring):
        return True
    # Of other tasks the harness computes the metrics itself, and looks none up.
    looked_up = config.get("output_type", "generate_until") == "generate_until" and not config.get("process_results")
    return looked_up and any(_is_unknown(metric) for metric in metrics)


def _program(task: type) -> Iterator[FunctionType]:
    """The functions of the module of a task that is a program, and its methods."""
    module = task.__module__
    for space in (sys.modules[module], *(kind for kind in task.__mro__ if kind.__module__ == module)):
        yield from (value for value in vars(space).values() if _is_of(value, module))


def _is_unknown(metric: Mapping[str, Any]) -> bool:
    name = metric.get("metric")
    return isinstance(name, str) and (
        metric.get("hf_evaluate") is True or name not in lm_eval.api.registry.metric_registry
    )


def _fetches(function: Any, seen: set[Any]) -> bool:
    """Whether a function, or one of its module that it calls, uses the library."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    for step in _steps(function.__code__):
        if step.opname == "IMPORT_NAME" and step.argval == _LIBRARY:
            return True
        if step.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(step.argval)
            if _is_library(value) or (_is_of(value, function.__module__) and _fetches(value, seen)):
                return True
    return False


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)


def _is_library(value: Any) -> bool:
    return value is refuse_metric or (isinstance(value, ModuleType) and value.__name__ == _LIBRARY)


def _is_of(value: Any, module: str) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value.__module__ == module

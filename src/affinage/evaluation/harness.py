"""lm-evaluation-harness without its talk and its detours."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partialmethod
from unittest.mock import patch

import datasets
import huggingface_hub
import jinja2
import lm_eval.api.metrics
import lm_eval.evaluator
import lm_eval.utils
import tqdm
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.tasks import TaskManager

from affinage.data.hub_answers import is_of_the_network, limit_requests
from affinage.errors import UserError, first_line
from affinage.evaluation import metric_library
from affinage.evaluation.benchmarks import BENCHMARKS
from affinage.evaluation.item_files import DEFINITIONS
from affinage.evaluation.known import harness_names, unknown_task

_PATIENCE = 5.0  # seconds, for the hub to say that it is there
_LOGGERS = ("lm_eval", "datasets", "evaluate", "fsspec", "filelock", "urllib3", "huggingface_hub")


@contextmanager
def tamed_harness() -> Iterator[None]:
    """For as long as it is entered, the harness reports nothing but errors, forks nothing and does nothing twice."""
    with ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(_level(logging.getLogger(name), logging.ERROR))
        # Its bootstrap forks a pool of processes, which may deadlock once JAX's threads run.
        stack.enter_context(patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}))
        stack.enter_context(patch.object(tqdm.tqdm, "__init__", partialmethod(tqdm.tqdm.__init__, disable=True)))
        # It would import torch and run a dozen commands, 1 to 3 s, to describe the machine; results carry versions.
        stack.enter_context(patch.object(lm_eval.evaluator, "add_env_info", lambda storage: None))
        # It asks git about the folder it is started in, which complains aloud where that is no checkout.
        stack.enter_context(patch.object(lm_eval.evaluator, "get_git_commit_hash", lambda: None))
        # It says on standard output, which may be JSON for a script, that it resamples.
        stack.enter_context(patch.object(lm_eval.api.metrics, "print", lambda *_, **__: None, create=True))
        # Its templates may reach any object of Python, and a metric that it does not know is a program that is fetched
        # and run: a task file of somebody else's must not be able to run anything.
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        environment.filters |= lm_eval.utils.env.filters
        stack.enter_context(patch.object(lm_eval.utils, "env", environment))
        stack.enter_context(metric_library.library())
        # It compiles a task's Jinja templates anew for every item, which takes longer than scoring does.
        compiled = lru_cache(maxsize=256)(lm_eval.utils.env.from_string)
        stack.enter_context(patch.object(lm_eval.utils.env, "from_string", compiled))
        if datasets.utils.logging.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


@contextmanager
def _level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def task_manager(named: Sequence[str]) -> TaskManager:
    """The harness's index of tasks; reading its own 13,000 task files takes seconds, so only as far as asked for.

    Raises UserError for a name it does not know.
    """
    known = [DEFINITIONS / BENCHMARKS[name].definition for name in named if name in BENCHMARKS]
    if len(known) == len(named):
        return TaskManager(include_path=sorted({str(file.parent) for file in known}), include_defaults=False)
    for name in named:
        if name not in harness_names():
            raise unknown_task(name, harness_names(), "evaluate.tasks")
    manager = TaskManager()
    for name in named:  # some of those words are no names
        if name not in manager.all_tasks:
            raise unknown_task(name, manager.all_tasks, "evaluate.tasks")
    return manager


@contextmanager
def reachable_data(named: Sequence[str]) -> Iterator[None]:
    """While entered, the data of the tasks `named` come from the hub, or from its cache where it does not answer.

    The libraries try for minutes before they give up on a network that is not there; here that is asked once. Raises
    UserError where data can be had from neither.
    """
    limit_requests()
    with ExitStack() as stack:
        if named and not huggingface_hub.constants.HF_HUB_OFFLINE and not _answers(huggingface_hub.constants.ENDPOINT):
            stack.enter_context(patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
            stack.enter_context(patch.object(datasets.config, "HF_HUB_OFFLINE", True))
        try:
            yield
        except Exception as error:
            told_by_libraries = isinstance(error, OSError) and error.errno is None  # of a file here it has a number
            if not named or not (told_by_libraries or is_of_the_network(error)):
                raise
            raise UserError(
                f"the items of {', '.join(named)} cannot be fetched from {huggingface_hub.constants.ENDPOINT}, "
                f"nor are they in its cache here: {first_line(error)}",
                fix="Check the network, or give a folder with their files: --data-dir, or `data_dir` beside the tasks.",
            ) from error


def _answers(endpoint: str) -> bool:
    try:
        huggingface_hub.get_session().head(endpoint, timeout=_PATIENCE)
    except Exception:  # whatever a network, a proxy or a name server can come up with
        return False
    return True

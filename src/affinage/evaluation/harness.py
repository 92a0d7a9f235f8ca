"""lm-evaluation-harness without its talk and its detours."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partialmethod
from unittest.mock import patch

import datasets
import lm_eval.evaluator
import lm_eval.utils
import tqdm
from lm_eval.tasks import TaskManager

from affinage.errors import UserError

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
    """The harness's index of tasks; reading its own 13,000 task files takes seconds, so only if one is asked for.

    Raises UserError for a name it does not know.
    """
    manager = TaskManager(include_defaults=bool(named))
    for name in named:
        if name not in manager.all_tasks:
            raise UserError(
                f"lm-evaluation-harness knows no task {name!r}, and there is no such file or folder",
                where="evaluate.tasks",
                fix="`lm-eval ls tasks` lists the names it knows",
            )
    return manager

"""The names that lm-evaluation-harness has, read from its files: to import it and to make its index takes seconds."""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from affinage.errors import UserError, did_you_mean
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, POCKET_TASKS

# What stands behind the keys that give names, in their line and in the lines of a list under it.
_NAMING = re.compile(rb"^[\"']?(?:task|group|tag)[\"']?[ \t]*:(.*(?:\n[ \t]*(?:[-#].*)?)*)", re.MULTILINE)
_WORD = re.compile(rb"[^\s\[\],'\"#]+")
_SUGGESTED = 3


@cache
def harness_names() -> frozenset[str]:
    """Every name of a task, group or tag in the harness's files, and some words that are none."""
    found = importlib.util.find_spec("lm_eval")
    assert found is not None and found.origin is not None
    words = {
        word
        for text in _definitions(Path(found.origin).parent / "tasks")
        for value in _NAMING.findall(text)
        for word in _WORD.findall(value)
    }
    return frozenset(word.decode("utf-8", "replace") for word in words if word[:1].isalnum() and word[-1:] != b":")


def _definitions(folder: Path) -> Iterator[bytes]:
    """The YAML files of the harness; those that others include are called anything without an ending."""
    for path, _, names in os.walk(folder):
        for name in names:
            if "." not in name or "yaml" in name or "yml" in name:
                yield Path(path, name).read_bytes()


def unknown_task(name: str, known: Iterable[str], where: str) -> UserError:
    """What to tell of a task that is neither a file nor one of the `known` names."""
    groups = f"Groups are {', '.join(GROUPS)}; `lm-eval ls tasks` lists the names of the harness."
    names = dict.fromkeys([*GROUPS, *POCKET_TASKS, *BENCHMARKS, *known])
    near = did_you_mean(name.lower(), names, most=_SUGGESTED)
    return UserError(
        f"lm-evaluation-harness knows no task {name!r}, and there is no such file or folder",
        where=where,
        fix=f"{near} {groups}".lstrip(),
    )

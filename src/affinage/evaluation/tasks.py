"""Which tasks a name stands for: task files on this machine, or tasks that lm-evaluation-harness ships."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import yaml

from affinage.errors import UserError

CHAT_TAG = "chat"  # says of a local task that it is asked in the chat template, and only of chat models


@dataclass(frozen=True)
class TaskSet:
    """What a list of task names came to. `local` are whole configurations, `named` are left to the harness."""

    local: tuple[dict[str, Any], ...]
    named: tuple[str, ...]

    def plain(self) -> list[dict[str, Any] | str]:
        """Tasks that are asked without a chat template."""
        return [*(task for task in self.local if not is_chat(task)), *self.named]

    def chat(self) -> list[dict[str, Any]]:
        """Tasks that are asked in the chat template."""
        return [task for task in self.local if is_chat(task)]


def is_chat(task: Mapping[str, Any]) -> bool:
    """Whether a local task is put to chat models only: it asks for generated text, or carries the tag `chat`."""
    tags = task.get("tag") or []
    return task.get("output_type") == "generate_until" or CHAT_TAG in ([tags] if isinstance(tags, str) else tags)


def find_tasks(names: Sequence[str], folders: Mapping[str, Path]) -> TaskSet:
    """Look up task names.

    A name is a key of `folders` (all task files of that folder), the path of a YAML file or of a folder of them, or
    else a task, group or tag that lm-evaluation-harness knows. Data files of local tasks are given relative to their
    YAML file; the configurations returned hold absolute paths, and JSON Lines are read without the `datasets` cache.

    Raises UserError for files that are missing, unreadable, or contain `!function` (nothing loaded here may run code).
    """
    local: dict[str, dict[str, Any]] = {}
    named: list[str] = []
    for name in names:
        place = folders.get(name, Path(name))
        if name in folders or place.exists():
            for task in _read_all(place):
                local.setdefault(task["task"], task)
        elif place.suffix in {".yaml", ".yml"} or "/" in name:
            raise UserError("there is no such task file or folder", where=name)
        else:
            named.append(name)
    return TaskSet(tuple(local.values()), tuple(named))


def _read_all(place: Path) -> list[dict[str, Any]]:
    files = [place] if place.is_file() else sorted([*place.glob("**/*.yaml"), *place.glob("**/*.yml")])
    configurations = [(file, _read_yaml(file)) for file in files]
    # A file without `task` is a template that others include.
    tasks = [_with_local_data(task, file) for file, task in configurations if isinstance(task.get("task"), str)]
    if not tasks:
        raise UserError("holds no task (a YAML file with a `task:` key)", where=str(place))
    return tasks


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot be read as a task: {error}", where=str(file)) from error
    if not isinstance(task, dict):
        raise UserError("is not a task: a mapping with a `task:` key is needed", where=str(file))
    included: dict[str, Any] = {}
    include = task.pop("include", [])
    for other in [include] if isinstance(include, str) else include:
        included |= _read_yaml(file.parent / other)
    return included | task


def _with_local_data(task: dict[str, Any], file: Path) -> dict[str, Any]:
    kwargs = dict(task.get("dataset_kwargs") or {})
    if "data_files" not in kwargs:
        return task
    kwargs["data_files"] = _absolute(kwargs["data_files"], file)
    task = {**task, "dataset_kwargs": kwargs}
    if task.get("dataset_path") == "json":
        # In memory: `datasets` would write an Arrow copy into its cache, and take longer for it than the model takes.
        task["custom_dataset"] = read_json_lines
    return task


def _absolute(data_files: Any, file: Path) -> dict[str, list[str]]:
    by_split = data_files if isinstance(data_files, dict) else {"train": data_files}
    absolute: dict[str, list[str]] = {}
    for split, paths in by_split.items():
        absolute[split] = [
            str((file.parent / path).resolve()) for path in ([paths] if isinstance(paths, str) else paths)
        ]
        for path in absolute[split]:
            if not Path(path).is_file():
                raise UserError(f"the data file {path} is missing", where=str(file))
    return absolute


def read_json_lines(*, data_files: Mapping[str, Iterable[str]], **_metadata: Any) -> dict[str, datasets.Dataset]:
    """The splits of a task kept as JSON Lines (plain or .gz), as the harness wants them."""
    return {
        split: datasets.Dataset.from_list([item for path in paths for item in _json_lines(Path(path))])
        for split, paths in data_files.items()
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
        # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for ends of lines.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, gzip.BadGzipFile) as error:
        raise UserError(f"is not JSON Lines: {error}", where=str(path)) from error

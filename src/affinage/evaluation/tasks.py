"""Which tasks a name stands for: task files on this machine, or tasks that lm-evaluation-harness ships."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, POCKET_TASKS, names_of
from affinage.evaluation.item_files import on_file, read_json_lines
from affinage.recipe.data import POCKET_WORLD

CHAT_TAG = "chat"  # says of a local task that it is asked in the chat template, and only of chat models


@dataclass(frozen=True)
class TaskSet:
    """What a list of task names came to. `local` are whole configurations, `named` are left to the harness.

    `missing` are members of groups of which the folder of items has no file.
    """

    local: tuple[dict[str, Any], ...]
    named: tuple[str, ...]
    missing: tuple[str, ...] = ()

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


def find_tasks(names: Sequence[str], folders: Mapping[str, Path], data_dir: str | Path | None = None) -> TaskSet:
    """Look up task names.

    A name is one of our groups (`julian`, `french`, `quickstart`), a key of `folders` (all task files of that folder),
    one of the pocket world's benchmarks, whose folder `folders` must have, the path of a YAML file or of a folder of
    them, or else a task, group or tag that lm-evaluation-harness knows. Data files of local tasks are given relative to
    their YAML file; the configurations returned hold absolute paths, and JSON Lines are read without the `datasets`
    cache. With a `data_dir`, the benchmarks of `BENCHMARKS` are the harness's own definitions over the files of that
    folder.

    Raises UserError for files that are missing, unreadable, or contain `!function` (nothing loaded here may run code).
    """
    items = None if data_dir is None else Path(data_dir).expanduser()
    if items is not None and not items.is_dir():
        raise UserError(f"there is no folder {items}", where="evaluate.data_dir")
    local: dict[str, dict[str, Any]] = {}
    named: list[str] = []
    chosen, missing = names_of(names, items)
    for name in chosen:
        file = BENCHMARKS[name].file_in(items) if items is not None and name in BENCHMARKS else None
        if file is not None:
            local.setdefault(name, on_file(name, file))
            continue
        if (name == POCKET_WORLD or name in POCKET_TASKS) and POCKET_WORLD not in folders:
            raise UserError(
                "the pocket world's benchmarks are about facts that only a model of that world knows",
                where=name,
                fix="Evaluate a run that was trained on it, or name the task files: --task FOLDER/tasks.",
            )
        place = folders[POCKET_WORLD] / f"{name}.yaml" if name in POCKET_TASKS else folders.get(name, Path(name))
        if name in folders or name in POCKET_TASKS or place.exists():
            for task in _read_all(place):
                local.setdefault(task["task"], task)
        elif place.suffix in {".yaml", ".yml"} or "/" in name:
            raise UserError("there is no such task file or folder", where=name)
        else:
            named.append(name)
    return TaskSet(tuple(local.values()), tuple(named), tuple(missing))


def _read_all(place: Path) -> list[dict[str, Any]]:
    files = [place] if place.is_file() else sorted([*place.glob("**/*.yaml"), *place.glob("**/*.yml")])
    configurations = [(file, _read_yaml(file)) for file in files]
    # A file without `task` is a template that others include.
    tasks = [_with_local_data(task, file) for file, task in configurations if isinstance(task.get("task"), str)]
    if not tasks:
        raise UserError("holds no task (a YAML file with a `task:` key)", where=str(place))
    for task in tasks:
        if "dataset_path" not in task and "custom_dataset" not in task:
            raise UserError(
                f"the task `{task['task']}` says nothing of its items",
                where=str(place),
                fix="A task file needs `dataset_path:`, such as `json`, and `dataset_kwargs: {data_files: ...}`.",
            )
    return tasks


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
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

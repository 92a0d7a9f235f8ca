"""Which tasks a name stands for: task files on this machine, or tasks that lm-evaluation-harness ships."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, POCKET_TASKS, names_of
from affinage.evaluation.known import harness_names, unknown_task
from affinage.paths import from_home

ChatTemplateUse = Literal["auto"] | bool
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

    @property
    def fetched(self) -> list[str]:
        """Names of the tasks whose items come from the Hub, or from its cache."""
        return [*(str(task["task"]) for task in self.local if _is_on_hub(task)), *self.named]

    def chat(self) -> list[dict[str, Any]]:
        """Tasks that are asked in the chat template."""
        return [task for task in self.local if is_chat(task)]

    def rounds(self, chat: bool, template: ChatTemplateUse) -> list[tuple[list[dict[str, Any] | str], bool]]:
        """What a model is asked, and whether in the chat template; by `auto` chat models alone are put chat tasks."""
        if template != "auto":
            return [([*self.plain(), *self.chat()], template is True)]
        rounds: list[tuple[list[dict[str, Any] | str], bool]] = [(self.plain(), False)]
        if chat:
            rounds.append(([*self.chat()], True))
        return rounds


def is_chat(task: Mapping[str, Any]) -> bool:
    """Whether a local task is put to chat models only: it asks for generated text, or carries the tag `chat`.

    Definitions of the harness over local items are not: they are asked as the harness asks them.
    """
    if "benchmark" in (task.get("dataset_kwargs") or {}):
        return False
    tags = task.get("tag") or []
    return task.get("output_type") == "generate_until" or CHAT_TAG in ([tags] if isinstance(tags, str) else tags)


def of_the_hub(place: Path) -> bool:
    """Whether a task file, or one in a folder of them, takes its items from the Hub; what cannot be read does not."""
    try:
        return any(_is_on_hub(task) for _, task in _configurations(place) if "task" in task)
    except UserError:
        return False  # said where the task is read


def _is_on_hub(task: Mapping[str, Any]) -> bool:
    kwargs, path = task.get("dataset_kwargs") or {}, task.get("dataset_path")
    return "custom_dataset" not in task and "data_files" not in kwargs and bool(path) and not Path(str(path)).exists()


@dataclass(frozen=True)
class _Meant:
    """What a name stands for: a benchmark over a file of `items`, the task files of a `place`, or a name alone."""

    name: str
    items: Path | None = None
    place: Path | None = None


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
    local: dict[str, dict[str, Any]] = {}
    named: list[str] = []
    found, missing = _meant(names, folders, data_dir)
    for one in found:
        if one.items is not None:
            from affinage.evaluation.item_files import on_file  # with the harness: seconds

            local.setdefault(one.name, on_file(one.name, one.items))
        elif one.place is not None:
            for task in _read_all(one.place):
                local.setdefault(task["task"], task)
        else:
            named.append(one.name)
    return TaskSet(tuple(local.values()), tuple(named), tuple(missing))


def check_names(
    names: Sequence[str], folders: Mapping[str, Path], data_dir: str | Path | None = None, *, where: str
) -> None:
    """See in a second that the names can be looked up, before anything large is imported or loaded.

    The arguments are those of `find_tasks`, and `where` says in messages who gave the names. Raises UserError for one
    that is no file and stands nowhere in the harness's files, and where `find_tasks` would for want of a file.
    """
    found, _ = _meant(names, folders, data_dir)
    for one in found:
        by_name = one.items is None and one.place is None and one.name not in BENCHMARKS
        if by_name and one.name not in harness_names():
            raise unknown_task(one.name, harness_names(), where)


def _meant(
    names: Sequence[str], folders: Mapping[str, Path], data_dir: str | Path | None
) -> tuple[list[_Meant], list[str]]:
    """What each of the names stands for, and the members of groups of which the folder of items has no file."""
    items = None if data_dir is None else from_home(data_dir)
    if items is not None and not items.is_dir():
        raise UserError(f"there is no folder {items}", where="evaluate.data_dir", fix=_PATHS)
    found: list[_Meant] = []
    chosen, missing = names_of(names, items)
    for name in chosen:
        file = BENCHMARKS[name].file_in(items) if items is not None and name in BENCHMARKS else None
        if file is not None:
            found.append(_Meant(name, items=file))
            continue
        if (name == POCKET_WORLD or name in POCKET_TASKS) and POCKET_WORLD not in folders:
            raise UserError(
                "the pocket world's benchmarks are about facts that only a model of that world knows",
                where=name,
                fix="Evaluate a run that was trained on it, or name the task files: --task FOLDER/tasks.",
            )
        place = folders[POCKET_WORLD] / f"{name}.yaml" if name in POCKET_TASKS else folders.get(name, from_home(name))
        if name in folders or name in POCKET_TASKS or place.exists():
            found.append(_Meant(name, place=place))
        elif place.suffix in {".yaml", ".yml"} or "/" in name:
            raise UserError("there is no such task file or folder", where=name, fix=_PATHS)
        else:
            found.append(_Meant(name))
    return found, missing


_PATHS = "Paths start from the working directory."
_TASK_FILE = "A task file is YAML: `task: NAME`, `dataset_path: json`, `dataset_kwargs: {data_files: items.jsonl}`, ..."


def _read_all(place: Path) -> list[dict[str, Any]]:
    # A file without `task` is a template that others include.
    tasks = [_with_local_data(task, file) for file, task in _configurations(place) if isinstance(task.get("task"), str)]
    if not tasks:
        fix = "Name a YAML file with a `task:` key, or a folder of such files; of a file of items, its task file."
        raise UserError("there is no task in it", where=str(place), fix=fix)
    for task in tasks:
        if "dataset_path" not in task and "custom_dataset" not in task:
            raise UserError(
                f"the task `{task['task']}` says nothing of its items",
                where=str(place),
                fix="A task file needs `dataset_path:`, such as `json`, and `dataset_kwargs: {data_files: ...}`.",
            )
    return tasks


def _configurations(place: Path) -> list[tuple[Path, dict[str, Any]]]:
    files = [place] if place.is_file() else sorted([*place.glob("**/*.yaml"), *place.glob("**/*.yml")])
    return [(file, _read_yaml(file)) for file in files]


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"this cannot be read as a task: {error}", where=str(file), fix=_TASK_FILE) from error
    if not isinstance(task, dict):
        raise UserError("this is not a task: a mapping with a `task:` key is needed", where=str(file), fix=_TASK_FILE)
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
        from affinage.evaluation.item_files import read_json_lines

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
                fix = "Paths in a task file start from its folder."
                raise UserError(f"the data file {path} is missing", where=str(file), fix=fix)
    return absolute

"""Which tasks a name stands for: task files on this machine, or tasks that lm-evaluation-harness ships."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.data.benchmark_items import BenchmarkItem, strings_in
from affinage.data.foreign_json import of_a_line
from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, POCKET_TASKS, names_of
from affinage.paths import from_home

if TYPE_CHECKING:
    import datasets

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
            local.setdefault(one.name, _on_file(one.name, one.items))
        elif one.place is not None:
            for task in _read_all(one.place):
                local.setdefault(task["task"], task)
        else:
            named.append(one.name)
    return TaskSet(tuple(local.values()), tuple(named), tuple(missing))


def check_names(
    names: Sequence[str], folders: Mapping[str, Path], data_dir: str | Path | None = None, *, where: str
) -> None:
    """See that the names can be looked up, before anything large is loaded.

    The arguments are those of `find_tasks`, and `where` says in messages who gave the names. Raises UserError for one
    that is neither a file nor known, which takes seconds to find out for names of the harness's that are not ours, and
    where `find_tasks` would for want of a file.
    """
    found, _ = _meant(names, folders, data_dir)
    named = [one.name for one in found if one.items is None and one.place is None and one.name not in BENCHMARKS]
    if named:
        from affinage.evaluation.harness import check_known

        check_known(named, where)


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
    """The configuration with its file, and of JSON Lines with absolute paths and a check of its splits."""
    task = {**task, "where": str(file)}
    if "dataset_path" not in task:
        fix = "A task file needs `dataset_path:`, such as `json`, and `dataset_kwargs: {data_files: ...}`."
        raise UserError(f"the task `{task['task']}` names no items", where=str(file), fix=fix)
    kwargs = task.get("dataset_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise UserError("`dataset_kwargs` is not a mapping", where=str(file), fix=_TASK_FILE)
    if "data_files" not in kwargs:
        return task
    data_files = _absolute(kwargs["data_files"], file)
    for key in ("test_split", "validation_split", "training_split", "fewshot_split"):
        if (split := task.get(key)) is not None and split not in data_files:
            fix = f"There are: {', '.join(data_files)}."
            raise UserError(f"`{key}: {split}` is no split of data_files", where=str(file), fix=fix)
    if not task.get("test_split") and not task.get("validation_split"):
        task["test_split"] = next(iter(data_files))
    task["dataset_kwargs"] = {**kwargs, "data_files": data_files}
    if task["dataset_path"] == "json":
        # In memory: `datasets` would write an Arrow copy into its cache, and take longer than the model does.
        task["custom_dataset"] = read_json_lines
    return task


def _absolute(data_files: Any, file: Path) -> dict[str, list[str]]:
    by_split = data_files if isinstance(data_files, dict) else {"train": data_files}
    absolute: dict[str, list[str]] = {}
    for split, paths in by_split.items():
        absolute[split] = [
            str((file.parent / str(path)).resolve()) for path in ([paths] if isinstance(paths, str) else paths or ())
        ]
        for path in absolute[split]:
            if not Path(path).is_file():
                fix = "Paths in a task file start from its folder."
                raise UserError(f"the data file {path} is missing", where=str(file), fix=fix)
    return absolute


# ---- items ----


def _on_file(name: str, file: Path) -> dict[str, Any]:
    """What to change in the harness's task so that its items are the rows of a file."""
    rows = read_rows(file)
    if not rows:
        raise UserError("holds no items", where=str(file), fix="One JSON object a line is an item.")
    config = {
        "task": name,
        "where": str(file),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": [str(file)]}, "benchmark": name},
        "custom_dataset": read_json_lines,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",  # there are no other items
    }
    return config | {"process_docs": None} if "query" in rows[0] else config  # processed already


def read_json_lines(
    *, data_files: Mapping[str, Iterable[str]], benchmark: str | None = None, **_metadata: Any
) -> dict[str, "datasets.Dataset"]:
    """The splits of a task kept as JSON Lines (plain or .gz), as the harness wants them.

    The rows of a `benchmark` may have any of the forms it is known in. Raises UserError for anything else.
    """
    import datasets  # seconds

    splits = {}
    for split, paths in data_files.items():
        rows = [row for path in paths for row in read_rows(Path(path))]
        if benchmark is not None:
            rows = [_published(benchmark, row, number, paths) for number, row in enumerate(rows, 1)]
        if not rows:
            raise UserError(f"the split `{split}` has no items", where=", ".join(paths), fix="One JSON object a line.")
        splits[split] = datasets.Dataset.from_list(rows)
    return splits


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON Lines, plain or .gz."""
    fix = "It must be UTF-8 text with one JSON object a line, plain or compressed with gzip."
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"is not JSON Lines: {error}", where=str(path), fix=fix) from error
    rows = []
    # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for ends of lines.
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"is not JSON Lines: {of_a_line(error)}", where=f"{path}:{number}", fix=fix) from error
        if row is not None and not isinstance(row, dict):
            raise UserError(f"is not an object but a {type(row).__name__}", where=f"{path}:{number}", fix=fix)
        rows += [] if row is None else [row]
    return rows


def _published(benchmark: str, row: dict[str, Any], number: int, paths: Iterable[str]) -> dict[str, Any]:
    try:
        return BENCHMARKS[benchmark].as_published(row)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        what = f"row {number} is not an item of {benchmark}: {type(error).__name__}: {error}"
        fix = "Take the file of the Hub's dataset."
        raise UserError(what, where=", ".join(paths), fix=fix) from error


def benchmark_items(names: Sequence[str], data_dir: str | None = None) -> Iterator[BenchmarkItem]:
    """All items that the tasks `names` (see `find_tasks`) are scored on, each with the texts that would give it away.

    Those are every string in the item's data, and the question as it is asked with its right answer. Items are numbered
    from 0 in the order of the task. Raises UserError for tasks that cannot be found or whose data cannot be fetched.
    """
    from affinage.evaluation.harness import load_tasks, quiet, reachable_data

    found = find_tasks(names, {}, data_dir)
    with reachable_data(found.fetched), quiet():
        yield from items_of(load_tasks([*found.local, *found.named]))


def items_of(tasks: Mapping[str, Any]) -> Iterator[BenchmarkItem]:
    """The same of tasks as the harness has loaded them, by name."""
    for name, task in tasks.items():
        for number, item in enumerate(task.eval_docs):
            yield BenchmarkItem(name, str(number), tuple(dict.fromkeys(_texts(task, item))))


def _texts(task: Any, item: Mapping[str, Any]) -> Iterator[str]:
    yield from strings_in(dict(item))
    question, answer = task.doc_to_text(item), task.doc_to_target(item)
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(item)
        yield from strings_in(choices)
        if isinstance(answer, int) and 0 <= answer < len(choices):
            answer = choices[answer]
    if isinstance(question, str):
        yield f"{question}{task.config.target_delimiter}{answer}" if isinstance(answer, str) else question

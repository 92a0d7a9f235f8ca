"""Which tasks a name stands for: task files and items on this machine, or tasks of lm-evaluation-harness."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.data.overlap import BenchmarkItem, strings_in
from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, POCKET_TASKS, names_of
from affinage.paths import from_home

if TYPE_CHECKING:
    import datasets

ChatTemplateUse = Literal["auto"] | bool
Task = dict[str, Any]  # the configuration of a task; `where` is its file
_PATHS = "Paths start from the working directory."
_TASK_FILE = "A task file is YAML: `task: NAME`, `dataset_path: json`, `dataset_kwargs: {data_files: items.jsonl}`, ..."
_LINES = "It must be UTF-8 text with one JSON object a line, plain or compressed with gzip."


@dataclass(frozen=True)
class TaskSet:
    """The tasks of a list of names: whole configurations (`local`), and names that the harness looks up (`named`).

    `unavailable` are members of groups of which the folder of items has no file.
    """

    local: tuple[Task, ...]
    named: tuple[str, ...]
    unavailable: tuple[str, ...] = ()

    @property
    def fetched(self) -> list[str]:
        """Names of the tasks whose items come from the Hub, or from its cache."""
        return [*(str(task["task"]) for task in self.local if _is_on_hub(task)), *self.named]

    @property
    def chat(self) -> list[Task]:
        """Tasks for chat models: local ones that generate text or have the tag `chat`; the harness's are not."""

        def is_chat(task: Task) -> bool:
            tags = task.get("tag") or []
            tagged = "chat" in ([tags] if isinstance(tags, str) else tags)
            return not is_offline(task) and (tagged or task.get("output_type") == "generate_until")

        return [task for task in self.local if is_chat(task)]

    def rounds(self, chat: bool, template: ChatTemplateUse) -> list[tuple[list[Task | str], bool]]:
        """Tasks, and whether they use the chat template; with `auto`, only chat models get chat tasks."""
        of_chat = self.chat
        plain: list[Task | str] = [*(task for task in self.local if task not in of_chat), *self.named]
        if template != "auto":
            return [([*plain, *of_chat], template)]
        return [(plain, False), ([*of_chat], True)] if chat else [(plain, False)]


def is_offline(task: Mapping[str, Any]) -> bool:
    """Return whether it is a benchmark of the harness over a file of items on this machine."""
    return "benchmark" in (task.get("dataset_kwargs") or {})


def _is_on_hub(task: Mapping[str, Any]) -> bool:
    kwargs, path = task.get("dataset_kwargs") or {}, task.get("dataset_path")
    return "custom_dataset" not in task and "data_files" not in kwargs and bool(path) and not Path(str(path)).exists()


def of_the_hub(place: Path) -> bool:
    """Return whether a task file, or one in a folder of them, takes its items from the Hub; False if unreadable."""
    try:
        return any(_is_on_hub(task) for _, task in _configurations(place) if "task" in task)
    except UserError:  # raised again where the task is read
        return False


def find_tasks(names: Sequence[str], folders: Mapping[str, Path], data_dir: str | Path | None = None) -> TaskSet:
    """Look up task names.

    A name is one of our groups (`julian`, `french`, `quickstart`), a key of `folders` (all task files of that folder),
    one of the pocket world's benchmarks, whose folder `folders` must have, the path of a YAML file or of a folder of
    them, or else a task, group or tag that lm-evaluation-harness knows. Data files of local tasks are relative to their
    YAML file. With a `data_dir`, benchmarks of ours are the harness's definitions over the files of that folder.

    Raises UserError for files that are missing, unreadable, or contain `!function`: nothing loaded here may run code.
    """
    items = None if data_dir is None else from_home(data_dir)
    if items is not None and not items.is_dir():
        raise UserError(f"there is no folder {items}", where="evaluate.data_dir", fix=_PATHS)
    local: dict[str, Task] = {}
    named: list[str] = []
    chosen, unavailable = names_of(names, items)
    for name in chosen:
        if items is not None and name in BENCHMARKS and (file := BENCHMARKS[name].file_in(items)):
            local.setdefault(name, _on_file(name, file))
            continue
        place = folders.get(name, from_home(name))
        if name == POCKET_WORLD or name in POCKET_TASKS:
            if POCKET_WORLD not in folders:
                what = "the pocket world's benchmarks are about facts that only a model of that world knows"
                fix = "Evaluate a run that was trained on it, or name the task files: --tasks FOLDER/tasks."
                raise UserError(what, where=name, fix=fix)
            place = folders[POCKET_WORLD] / (f"{name}.yaml" if name in POCKET_TASKS else "")
        elif not place.exists():
            if place.suffix in {".yaml", ".yml"} or "/" in name:
                raise UserError("there is no such task file or folder", where=name, fix=_PATHS)
            named.append(name)
            continue
        # A file without `task` is a template that others include.
        tasks = [_with_data(task, file) for file, task in _configurations(place) if isinstance(task.get("task"), str)]
        if not tasks:
            raise UserError("there is no task in it", where=str(place), fix=_TASK_FILE)
        for task in tasks:
            local.setdefault(task["task"], task)
    return TaskSet(tuple(local.values()), tuple(named), tuple(unavailable))


def check_names(
    names: Sequence[str], folders: Mapping[str, Path], data_dir: str | Path | None = None, *, where: str
) -> None:
    """Raise UserError for names that `find_tasks` refuses or the harness does not know, before a model is loaded.

    The harness takes seconds to look up a name; names that are ours need it not. `where` names their origin.
    """
    if unknown := [name for name in find_tasks(names, folders, data_dir).named if name not in BENCHMARKS]:
        from affinage.evaluation.harness import quiet, task_manager

        with quiet():
            task_manager(unknown, where)


# ---- task files ----


def _configurations(place: Path) -> list[tuple[Path, Task]]:
    files = [place] if place.is_file() else sorted([*place.glob("**/*.yaml"), *place.glob("**/*.yml")])
    return [(file, _read_yaml(file)) for file in files]


def _read_yaml(file: Path) -> Task:
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"this cannot be read as a task: {error}", where=str(file), fix=_TASK_FILE) from error
    if not isinstance(task, dict):
        raise UserError("this is not a task: a mapping with a `task:` key is needed", where=str(file), fix=_TASK_FILE)
    included: Task = {}
    include = task.pop("include", [])
    for other in [include] if isinstance(include, str) else include:
        included |= _read_yaml(file.parent / other)
    return included | task


def _with_data(task: Task, file: Path) -> Task:
    """The configuration with its file, and for data files with absolute paths and a check of its splits."""
    task = {**task, "where": str(file)}
    kwargs = task.get("dataset_kwargs") or {}
    if "dataset_path" not in task or not isinstance(kwargs, dict):
        what = f"the task `{task['task']}` needs a `dataset_path`, and a mapping as `dataset_kwargs`"
        raise UserError(what, where=str(file), fix=_TASK_FILE)
    if "data_files" not in kwargs:
        return task
    listed, data_files = kwargs["data_files"], {}
    for split, paths in (listed if isinstance(listed, dict) else {"train": listed}).items():
        names = [paths] if isinstance(paths, str) else paths or ()
        data_files[split] = [str((file.parent / str(name)).resolve()) for name in names]
        for path in data_files[split]:
            if not Path(path).is_file():
                fix = "Paths in a task file start from its folder."
                raise UserError(f"the data file {path} is missing", where=str(file), fix=fix)
    if not task.get("test_split") and not task.get("validation_split"):
        task["test_split"] = next(iter(data_files))
    task["dataset_kwargs"] = {**kwargs, "data_files": data_files}
    if task["dataset_path"] == "json":
        # In memory: `datasets` would write an Arrow copy into its cache, and take longer than the model does.
        task["custom_dataset"] = read_json_lines
    return task


def _on_file(name: str, file: Path) -> Task:
    """What to change in the harness's task so that its items are the rows of a file."""
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
    first = next(read_rows(file), {})
    return config | {"process_docs": None} if "query" in first else config  # processed already


# ---- items ----


def read_json_lines(
    *, data_files: Mapping[str, Iterable[str]], benchmark: str | None = None, **_metadata: Any
) -> dict[str, "datasets.Dataset"]:
    """Return the splits of a task kept as JSON Lines (plain or .gz), as the harness wants them.

    The rows of a `benchmark` may have any of the forms it is known in. Raises UserError for anything else.
    """
    import datasets  # seconds

    splits = {}
    for split, paths in data_files.items():
        rows, where = [row for path in paths for row in read_rows(Path(path))], ", ".join(paths)
        if not rows:
            raise UserError(f"the split `{split}` has no items", where=where, fix=_LINES)
        for number, row in enumerate(rows if benchmark else ()):
            try:
                rows[number] = BENCHMARKS[str(benchmark)].as_published(row)
            except (KeyError, ValueError, TypeError, IndexError) as error:
                what = f"row {number + 1} is not an item of {benchmark}: {type(error).__name__}: {error}"
                raise UserError(what, where=where, fix="Take the file of the Hub's dataset.") from error
        splits[split] = datasets.Dataset.from_list(rows)
    return splits


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON Lines, plain or .gz. Raises UserError for what is none."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):  # noqa: B007  the message about a mistake has it
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"is not an object but a {type(row).__name__}")
                    yield row
    except (OSError, ValueError, EOFError, RecursionError) as error:
        what = f"is not JSON Lines: {getattr(error, 'msg', error)}"
        raise UserError(what, where=f"{path}:{number}", fix=_LINES) from error


def benchmark_items(names: Sequence[str], data_dir: str | None = None) -> Iterator[BenchmarkItem]:
    """Yield all items of the tasks `names` (see `find_tasks`), each with the texts that would give it away.

    Those are every string in the item's data, and the question as it is put with its right answer. Items are numbered
    from 0 in the order of the task. Raises UserError for tasks that cannot be found or whose data cannot be fetched.
    """
    from affinage.evaluation.harness import load_tasks, quiet, reachable_data

    tasks = find_tasks(names, {}, data_dir)
    with reachable_data(tasks.fetched), quiet():
        yield from items_of(load_tasks([*tasks.local, *tasks.named]))


def items_of(tasks: Mapping[str, Any]) -> Iterator[BenchmarkItem]:
    """Yield the same for tasks as the harness has loaded them, by name."""
    for name, task in tasks.items():
        for number, item in enumerate(task.eval_docs):
            texts = [*strings_in(dict(item))]
            question, answer = task.doc_to_text(item), task.doc_to_target(item)
            if task.OUTPUT_TYPE == "multiple_choice":
                choices = task.doc_to_choice(item)
                texts += strings_in(choices)
                if isinstance(answer, int) and 0 <= answer < len(choices):
                    answer = choices[answer]
            if isinstance(question, str):
                answered = f"{question}{task.config.target_delimiter}{answer}"
                texts.append(answered if isinstance(answer, str) else question)
            yield BenchmarkItem(name, str(number), tuple(dict.fromkeys(texts)))

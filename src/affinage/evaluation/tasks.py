"""Which tasks a name stands for: lm-evaluation-harness's own, benchmarks over items on this machine, or task files.

Those that have names here are in benchmarks.yaml: the harness's definitions over items of the Hub, or over a folder of
JSON Lines in the form of the Hub's dataset or another.
"""

import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.errors import UserError, first_line

if TYPE_CHECKING:
    import datasets

    from affinage.data.decontaminate import BenchmarkItem

ChatTemplateUse = Literal["auto"] | bool
Folder = str | Path | None
Task = dict[str, Any]  # the configuration of a task, with its file as `where`; or {"task": name} for the harness's own
_PATHS = "Paths start from the working directory."
_TASK_FILE = """A task file is YAML (docs/evaluation.md). This one measures bits per byte of the lines of a text:
    {task: mine, dataset_path: text, dataset_kwargs: {data_files: my.txt}, output_type: loglikelihood_rolling,
     doc_to_text: "", doc_to_target: "{{text}}", metric_list: [{metric: bits_per_byte}]}"""
_SUFFIXES = (".yaml", ".yml")
_LINES = "A line must be a JSON object in UTF-8, and an item of a benchmark as in the Hub's dataset."

_LISTED = yaml.safe_load(files("affinage.evaluation").joinpath("benchmarks.yaml").read_text(encoding="utf-8"))
BENCHMARKS: dict[str, Task] = _LISTED["benchmarks"]
GROUPS: dict[str, tuple[str, ...]] = {name: tuple(members) for name, members in _LISTED["groups"].items()}
CORE = "core"
CORE_SHOTS: dict[str, int] = _LISTED["groups"][CORE]


def of_pocket_world(task: str) -> bool:
    """Return whether it is one of the pocket world's benchmarks, or a name for all of them."""
    return (task.startswith("pocket_") and task.isidentifier()) or GROUPS.get(task, (task,)) == (POCKET_WORLD,)


def is_task_file(task: str) -> bool:
    """Return whether a benchmark is named by its task file, or by a folder of them."""
    return not of_pocket_world(task) and ("/" in task or task.endswith(_SUFFIXES))


def is_offline(task: Mapping[str, Any]) -> bool:
    """Return whether it is a benchmark of the harness over a file of items on this machine."""
    return "benchmark" in (task.get("dataset_kwargs") or {})


def is_chat(task: Mapping[str, Any]) -> bool:
    """Return whether it is for chat models: a task file that generates text or has the tag `chat`."""
    tags = task.get("tag") or []
    tagged = "chat" in (tags if isinstance(tags, list) else [tags])
    return not is_offline(task) and (tagged or task.get("output_type") == "generate_until")


def files_of(tasks: Sequence[str], data_dir: str | Path) -> list[Path]:
    """Return the files of a folder that these benchmarks and groups read, each once."""
    members = [member for task in tasks for member in GROUPS.get(task, (task,)) if member in BENCHMARKS]
    return list(dict.fromkeys(file for name in members if (file := _file_of(name, Path(os.path.expanduser(data_dir))))))


def find_tasks(names: Sequence[str], data_dir: Folder = None, world: Folder = None) -> tuple[list[Task], list[str]]:
    """Return the tasks that names stand for, and the members of groups that are left out.

    A name is one of our groups (`julian`, `french`), the pocket world (all task files in `tasks/` of its folder
    `world`) or one of its benchmarks, the path of a YAML file or of a folder of them, or else a task, group or tag of
    lm-evaluation-harness, which is returned as {"task": name}. With a `data_dir`, benchmarks of ours are the harness's
    definitions over the files of that folder; those of a group that it has no file of are left out. Raises UserError
    for two tasks of one name, and files that are missing, unreadable, or contain `!function`: none may run code.
    """
    items = None if data_dir is None else Path(os.path.expanduser(data_dir))
    if items is not None and not items.is_dir():
        raise UserError(f"there is no folder {items}", where="evaluate.data_dir", fix=_PATHS)
    tasks, left_out = dict[str, Task](), list[str]()
    for group in names:
        members = GROUPS.get(group, (group,))
        files = {name: _file_of(name, items) for name in members if items is not None and name in BENCHMARKS}
        absent = [name for name, file in files.items() if file is None]
        if len(absent) == len(members):
            fix = f"Looked for {', '.join(f'{name}.jsonl' for name in absent)} (or .jsonl.gz)."
            raise UserError(f"there are no items of `{group}` in {items}", fix=fix)
        left_out += absent
        for name in (member for member in members if member not in absent):
            for task in [_on_file(name, file)] if (file := files.get(name)) else _tasks_of(name, world):
                if (known := tasks.setdefault(task["task"], task)) | {"where": ""} != task | {"where": ""}:
                    where = " and ".join(str(each.get("where", group)) for each in (known, task))
                    raise UserError(f"two tasks have the name `{task['task']}`", where=where, fix="Rename one of them.")
    return list(tasks.values()), left_out


def check_names(names: Sequence[str], data_dir: Folder = None, world: Folder = None, *, where: str) -> None:
    """Raise UserError for names, from `where`, that `find_tasks` refuses or the harness, in seconds, does not find."""
    named = {task["task"] for task in find_tasks(names, data_dir, world)[0] if len(task) == 1}
    if unknown := sorted(named - BENCHMARKS.keys()):
        from affinage.evaluation.harness import quiet, task_manager

        with quiet():
            task_manager(unknown, where)


def _tasks_of(name: str, world: Folder) -> list[Task]:
    """The tasks of a task file or a folder of them, or the name alone if it must be one of the harness's."""
    place = Path(os.path.expanduser(name))
    if of_pocket_world(name):
        if world is None:
            what = "the pocket world's benchmarks are about facts that only a model of that world knows"
            fix = "Evaluate a run that was trained on it, or name the task files: --tasks FOLDER/tasks."
            raise UserError(what, where=name, fix=fix)
        place = Path(world) / "tasks" / ("" if name == POCKET_WORLD else f"{name}.yaml")
    if not place.exists():
        if is_task_file(name):
            raise UserError("there is no such task file or folder", where=name, fix=_PATHS)
        return [{"task": name}]
    paths = [path for path in ([place] if place.is_file() else sorted(place.rglob("*"))) if path.suffix in _SUFFIXES]
    # A file without `task` is a template that others include.
    tasks = [_with_data(task, path) for path in paths if isinstance((task := _read_yaml(path)).get("task"), str)]
    if not tasks:
        raise UserError("there is no task file (*.yaml) with a `task`", where=str(place), fix=_TASK_FILE)
    return tasks


def _read_yaml(file: Path) -> Task:
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(task, dict):
            raise ValueError("it has no `task: NAME`")
        include, included = task.pop("include", []), dict[str, Any]()
        for other in [include] if isinstance(include, str) else include:
            included |= _read_yaml(file.parent / other)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise UserError(f"this cannot be read as a task: {problem}", where=where, fix=_TASK_FILE) from error
    return included | task


def _with_data(task: Task, file: Path) -> Task:
    """The configuration with its file, with absolute paths of data files, and with a split to evaluate."""
    try:
        if Path(task["task"]).name != task["task"] or len(task["task"]) > 100:
            raise ValueError("its name is no name of a file")
        made = task | {"where": str(file), "dataset_kwargs": dict(task.get("dataset_kwargs") or {})}
        is_json = task["dataset_path"] == "json"
        if "data_files" not in made["dataset_kwargs"]:
            return made
        listed, data_files = made["dataset_kwargs"]["data_files"], dict[str, list[str]]()
        made["dataset_kwargs"]["data_files"] = data_files
        for split, paths in (listed if isinstance(listed, dict) else {"train": listed}).items():
            names = [paths] if isinstance(paths, str) else paths
            data_files[split] = [str((file.parent / name).resolve(strict=True)) for name in names]
        if not task.get("test_split") and not task.get("validation_split"):
            made["test_split"] = next(iter(data_files))
    except (OSError, LookupError, ValueError, TypeError, StopIteration) as error:
        what = f"the data of the task `{task['task']}` cannot be used: {type(error).__name__}: {error}"
        raise UserError(what, where=str(file), fix=_TASK_FILE) from error
    # In memory: `datasets` would write an Arrow copy into its cache, and take longer than the model does.
    return made | ({"custom_dataset": read_json_lines} if is_json else {})


def _file_of(benchmark: str, folder: Path) -> Path | None:
    names = (benchmark, *BENCHMARKS[benchmark].get("files", ()))
    paths = (folder / f"{name}{ending}" for name in names for ending in (".jsonl", ".jsonl.gz"))
    return next((path for path in paths if path.is_file()), None)


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
    return config | {"process_docs": None} if "query" in next(_read_rows(file, ""), {}) else config  # processed already


def _belebele(row: Task) -> Task:
    """From passage and question in one text, and the choices {"A": ..., "D": ...} with the letter of the answer."""
    passage, _, question = row["question"].rpartition("\n\nQuestion: ")
    answers = {f"mc_answer{number}": row["choices"][letter] for number, letter in enumerate("ABCD", 1)}
    asked = {"flores_passage": passage.partition("Passage: ")[2], "question": question}
    return asked | answers | {"correct_answer_num": str("ABCD".index(row["answer"]) + 1)}


def _winograd_schema(row: Task) -> Task:
    """From the pronoun's place among the tokens; the harness wants the sentence with `_` for it, and two options."""
    sentence, (pronoun, (first, _), _) = row["sentence"], row["pronoun"]
    # Tokens may be spelled otherwise in the sentence, which is not shorter than they are.
    word = re.compile(rf"\b{re.escape(pronoun)}\b").search(sentence, sum(map(len, row["tokens"][:first])))
    if word is None:
        raise ValueError(f"{pronoun!r} does not stand in the sentence where `tokens` have it")
    (option1, _, _, right), (option2, _, _, _) = row["options"]
    blanked = f"{sentence[: word.start()]}_{sentence[word.end() :]}"
    return {"sentence": blanked, "option1": option1, "option2": option2, "answer": "1" if right else "2"}


# Form: (a key that only rows of the Hub's dataset have, the conversion of other rows).
_FORMS: dict[str, tuple[str, Callable[[Task], Task]]] = {
    # The output of the harness's preprocessing: `query`, `choices`, `gold`.
    "preprocessed": ("endings", lambda row: row | {"label": str(row["gold"])}),
    "belebele": ("flores_passage", _belebele),
    "winograd_schema": ("option1", _winograd_schema),
    "minimal_pair": ("sen", lambda row: {"sen": row["sentence_good"], "wrong_sen": row["sentence_bad"]}),
}


def read_json_lines(
    *, data_files: Mapping[str, Iterable[str]], benchmark: str = "", **_metadata: Any
) -> dict[str, "datasets.Dataset"]:
    """Return the splits of JSON Lines (plain or .gz), a `benchmark`'s in any of its forms. UserError: anything else."""
    import datasets  # seconds

    form, splits = BENCHMARKS.get(benchmark, {}).get("form", ""), {}
    for split, paths in data_files.items():
        rows = [row for path in paths for row in _read_rows(Path(path), form)]
        if not rows:
            raise UserError(f"the split `{split}` has no items", where=", ".join(paths), fix=_LINES)
        splits[split] = datasets.Dataset.from_list(rows)
    return splits


def _read_rows(path: Path, form: str) -> Iterator[Task]:
    number, (of_hub, convert) = 0, _FORMS.get(form, ("", dict))
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):  # noqa: B007  the message about a mistake has it
                if line.strip():
                    if not isinstance(row := json.loads(line), dict):
                        raise ValueError(f"not an object but a {type(row).__name__}")
                    yield row if of_hub in row else convert(row)
    except (OSError, EOFError, LookupError, ValueError, TypeError, RecursionError) as error:
        what = f"no item can be read: {type(error).__name__}: {getattr(error, 'msg', error)}"
        raise UserError(what, where=f"{path}:{number}", fix=_LINES) from error


def items_of(tasks: Mapping[str, Any]) -> "Iterator[BenchmarkItem]":
    """Yield the items of loaded tasks, by number from 0: the strings of their data, and question with right answer."""
    from affinage.data.decontaminate import BenchmarkItem, strings_in  # a moment

    for name, task in tasks.items():
        for number, item in enumerate(task.eval_docs):
            texts = [*strings_in(dict(item))]
            question, answer = task.doc_to_text(item), task.doc_to_target(item)
            if task.OUTPUT_TYPE == "multiple_choice":
                texts += strings_in(choices := task.doc_to_choice(item))
                if isinstance(answer, int) and 0 <= answer < len(choices):
                    answer = choices[answer]
            if isinstance(question, str):
                answered = f"{question}{task.config.target_delimiter}{answer}"
                texts.append(answered if isinstance(answer, str) else question)
            yield BenchmarkItem(name, str(number), tuple(dict.fromkeys(texts)))

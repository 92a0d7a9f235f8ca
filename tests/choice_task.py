"""Small benchmarks of the tests' own: a task file and its items."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

_TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "right",
    "metric_list": [{"metric": "acc"}],
}


def write_task(folder: Path, name: str, items: Iterable[Mapping[str, Any]], **settings: Any) -> Path:
    """The task file. An item has `question`, `choices` and `right`, the index of one.

    `settings` replace those of the task; None leaves one out.
    """
    folder.mkdir(exist_ok=True)
    write_items(folder, items)
    task = folder / f"{name}.yaml"
    told = {key: value for key, value in (_TASK | settings).items() if value is not None}
    task.write_text(yaml.safe_dump({"task": name} | told, sort_keys=False))
    return task


def write_items(folder: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """The file that the tasks of a folder read."""
    lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    (folder / "items.jsonl").write_text("".join(lines), encoding="utf-8")


def sums(count: int, unsure: str = "") -> list[dict[str, Any]]:
    """Doublings of the first numbers; `unsure` follows the first choice of each."""
    return [
        {"question": f"{n} plus {n} is", "choices": [f"{2 * n}{unsure}", str(n)], "right": n % 2} for n in range(count)
    ]

"""Small benchmarks of the tests' own: a task file and its items."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from source_forms import write_lines

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
    """The task file beside `items.jsonl`. An item has `question`, `choices` and `right`, the index of one.

    `settings` replace those of the task; None leaves one out.
    """
    write_lines(folder / "items.jsonl", items)
    task = folder / f"{name}.yaml"
    told = {key: value for key, value in ({"task": name} | _TASK | settings).items() if value is not None}
    task.write_text(yaml.safe_dump(told, sort_keys=False))
    return task


def sums(count: int) -> list[dict[str, Any]]:
    """Doublings of the first numbers."""
    return [{"question": f"{n} plus {n} is", "choices": [str(2 * n), str(n)], "right": n % 2} for n in range(count)]

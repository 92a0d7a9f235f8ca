"""A small benchmark of the tests' own: a task file and its items."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: items.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: right
metric_list: [{{metric: acc}}]
"""


def write_task(folder: Path, name: str, items: Iterable[Mapping[str, Any]]) -> Path:
    """The task file. An item has `question`, `choices` and `right`, the index of one."""
    folder.mkdir(exist_ok=True)
    write_items(folder, items)
    task = folder / f"{name}.yaml"
    task.write_text(_TASK.format(name=name))
    return task


def write_items(folder: Path, items: Iterable[Mapping[str, Any]]) -> None:
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def sums(count: int, unsure: str = "") -> list[dict[str, Any]]:
    """Doublings of the first numbers; `unsure` follows the first choice of each."""
    return [
        {"question": f"{n} plus {n} is", "choices": [f"{2 * n}{unsure}", str(n)], "right": n % 2} for n in range(count)
    ]

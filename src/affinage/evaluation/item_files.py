"""Items of benchmarks in files of this machine, under the harness's own definitions."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.tasks._yaml_loader import load_yaml

from affinage.data.foreign_json import of_a_line
from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS
from affinage.evaluation.metric_library import library

DEFINITIONS = Path(lm_eval.tasks.__file__).parent


def on_file(task: str, file: Path) -> dict[str, Any]:
    """The harness's configuration of a benchmark, with the rows of a file as its items."""
    with library():
        config = dict(load_yaml(DEFINITIONS / BENCHMARKS[task].definition))
    split = config.get("test_split") or config["validation_split"]
    for published in ("dataset_path", "dataset_name", "training_split", "validation_split", "tag"):
        config.pop(published, None)
    rows = read_rows(file)
    if not rows:
        raise UserError("holds no items", where=str(file))
    if "query" in rows[0]:
        config.pop("process_docs", None)  # done already
    return config | {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: [str(file)]}, "benchmark": task},
        "custom_dataset": read_json_lines,
        "test_split": split,
        # There are no other items to show as examples; the harness does not show an item to itself.
        "fewshot_split": split,
    }


def read_json_lines(
    *, data_files: Mapping[str, Iterable[str]], benchmark: str | None = None, **_metadata: Any
) -> dict[str, datasets.Dataset]:
    """The splits of a task kept as JSON Lines (plain or .gz), as the harness wants them.

    The rows of a `benchmark` may have any of the forms it is known in. Raises UserError for what is none of them.
    """
    splits = {}
    for split, paths in data_files.items():
        rows = [row for path in paths for row in read_rows(Path(path))]
        if benchmark is not None:
            rows = [_published(benchmark, row, number, paths) for number, row in enumerate(rows, 1)]
        splits[split] = datasets.Dataset.from_list(rows)
    return splits


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON Lines, plain or .gz."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"is not JSON Lines: {error}", where=str(path)) from error
    rows = []
    # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for ends of lines.
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"is not JSON Lines: {of_a_line(error)}", where=f"{path}:{number}") from error
    return rows


def _published(benchmark: str, row: dict[str, Any], number: int, paths: Iterable[str]) -> dict[str, Any]:
    try:
        return BENCHMARKS[benchmark].as_published(row)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"row {number} is not an item of {benchmark}: {type(error).__name__}: {error}", where=", ".join(paths)
        ) from error

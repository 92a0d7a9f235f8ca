"""The curve of a training, without what the clock and the machine decide."""

from pathlib import Path
from typing import Any

from affinage.results import read_json_lines
from affinage.training.metrics import METRICS

_MEASURED = frozenset("tokens_per_second mfu data_time step_time goodput".split())


def curve(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are equal if two runs computed the same."""
    rows = read_json_lines(folder / METRICS)
    return [{key: value for key, value in row.items() if key not in _MEASURED} for row in rows]

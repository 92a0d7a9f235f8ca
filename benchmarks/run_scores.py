"""What the three models of a run scored, as cells of a table and as results of a benchmark; read by others here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS = ("base", "sft", "dpo")


def evaluations(run: Path) -> dict[str, Any]:
    """By the name of the model: its results.json."""
    return {model: json.loads((run / f"evaluate-{model}" / "results.json").read_text()) for model in MODELS}


def pairs(run: Path) -> dict[str, float]:
    """By source: the share of held-out pairs of which the preferred answer has the higher reward after DPO."""
    validation = json.loads((run / "dpo" / "summary.json").read_text())["validation"]
    return {name: facts["rewards/accuracies"] for name, facts in validation.items()}


def seconds(run: Path) -> float:
    """That all stages took."""
    return sum(json.loads(path.read_text())["seconds"] for path in run.glob("*/manifest.json"))


def cells(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Of one question: the models' scores in percent with their errors, and what guessing would score."""
    shown = [
        f"{100 * one['value']:.1f} ± {100 * (one['stderr'] or 0):.1f}" if (one := scores.get(model)) else "–"
        for model in MODELS
    ]
    chance = next(iter(scores.values()))["chance"]
    return " | ".join([*shown, f"{chance:.0%}" if chance else "–"])


def result(name: str, value: float, peer: float | None, unit: str, stderr: float | None = None) -> dict[str, Any]:
    """A line of a benchmark's results, with its standard error if it has one."""
    error = {} if stderr is None else {"stderr": stderr}
    return {"name": name, "ours": value, **error, "peer": peer, "unit": unit, "ratio": value / peer if peer else None}

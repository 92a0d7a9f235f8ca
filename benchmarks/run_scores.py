"""What the three models of a run scored, and its tunings when they were looked at; read by others here."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.data.dataloader import ValidationRows
from affinage.data.lineage import spans_of_rows
from affinage.data.token_shards import open_shards
from affinage.evaluation.compare import Answers, compare
from affinage.pipeline.watching import LOOKS, worse

MODELS = ("base", "sft", "dpo")


def evaluations(run: Path) -> dict[str, Any]:
    """By the name of the model: its results.json."""
    return {model: json.loads((run / f"evaluate-{model}" / "results.json").read_text()) for model in MODELS}


@dataclass(frozen=True)
class Share:
    """How many of some things are right."""

    value: float
    of: int

    @property
    def stderr(self) -> float:
        return math.sqrt(self.value * (1 - self.value) / max(1, self.of - 1))

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} ± {100 * self.stderr:.1f} % of {self.of} held-out pairs"

    def result(self, name: str) -> dict[str, Any]:
        return result(name, self.value, 0.5, f"share of {self.of} pairs", self.stderr)


def pairs(run: Path) -> dict[str, Share]:
    """By source: the held-out pairs of which the preferred answer has the higher reward after DPO."""
    validation = json.loads((run / "dpo" / "summary.json").read_text())["validation"]
    limit = json.loads((run / "recipe.json").read_text())["dpo"]["eval_sequences"]
    held_out = run / "preference-data" / "validation"
    return {
        name: Share(facts["rewards/accuracies"], _pairs_in(held_out / name, limit))
        for name, facts in validation.items()
    }


def _pairs_in(folder: Path, limit: int) -> int:
    """How many pairs the rows hold that the validation reads."""
    rows = ValidationRows(folder, batch=limit, limit=limit).rows_of(0).tolist()
    return sum(map(len, spans_of_rows(open_shards(folder), rows).values()))


def differences(run: Path, before: str, after: str) -> list[dict[str, Any]]:
    """What two models of a run score on the same items, printed and as results: the second's score less the first's."""
    return between(before, Answers(run / f"evaluate-{before}"), after, Answers(run / f"evaluate-{after}"))


def between(before: str, first: Answers, after: str, second: Answers) -> list[dict[str, Any]]:
    """What two models by these names score on the same items; see `differences`."""
    results = []
    print(f"| {before} to {after} | points, 95 % interval | items |\n|---|---|---|")
    for one in compare(first, second):
        interval = f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"
        print(f"| {one.task} {one.metric} | {100 * one.difference:+.1f} ({interval}) | {one.items} |")
        found = result(
            f"{one.task} {one.metric}, {before} to {after}",
            one.difference,
            None,
            f"difference of share of {one.items} items",
            one.stderr,
        )
        results.append(found | {"low": one.low, "high": one.high, "real": one.is_real})
    return results


def seconds(run: Path) -> float:
    """That all stages took."""
    return sum(json.loads(path.read_text())["seconds"] for path in run.glob("*/manifest.json"))


def cells(scores: Mapping[str, Mapping[str, Any]], *, percent: bool = True) -> str:
    """Of one question: the models' scores with their errors, and what guessing would score."""
    scale, digits = (100, ".1f") if percent else (1, ",.0f")
    shown = [
        f"{scale * one['value']:{digits}} ± {scale * (one['stderr'] or 0):{digits}}"
        if (one := scores.get(model))
        else "–"
        for model in MODELS
    ]
    chance = next(iter(scores.values()))["chance"]
    return " | ".join([*shown, f"{chance:.0%}" if chance else "–"])


def result(name: str, value: float, peer: float | None, unit: str, stderr: float | None = None) -> dict[str, Any]:
    """A line of a benchmark's results, with its standard error if it has one."""
    error = {} if stderr is None else {"stderr": stderr}
    return {"name": name, "ours": value, **error, "peer": peer, "unit": unit, "ratio": value / peer if peer else None}


def watched(run: Path, stage: str) -> list[dict[str, Any]]:
    """What a tuning's looks at its watch-list found, printed and as results, and last the surest degradation.

    `p` of a look is that of the surest degradation since any look before it, as the training itself tests it.
    """
    told = json.loads((run / stage / LOOKS).read_text())
    looks, results = told["looks"], []
    for task in looks[0]["scores"]:
        said = []
        for number, look in enumerate(looks):
            step, score = look["step"], look["scores"][task]
            p = min((worse(before["right"][task], look["right"][task]) for before in looks[:number]), default=None)
            name, unit = f"{task} watched in {stage}, step {step}", f"share of {len(look['right'][task])} items"
            found = {"task": task, "step": step} | ({} if p is None else {"p": p})
            results.append(result(name, score["value"], None, unit, score["stderr"]) | found)
            shown = f"{100 * score['value']:.1f} ± {100 * score['stderr']:.1f} at step {step}"
            said.append(shown if p is None else f"{shown} (p = {p:.2g})")
        print(f"{stage} watched, {task}: {', '.join(said)}")
    least = min((one["p"] for one in results if "p" in one), default=1.0)
    stopped = [f"{one['task']} at step {look['step']}" for look in looks for one in look["worse"]]
    print(f"{stage}: least p {least:.2g}, threshold {told['threshold']:.2g}; worse: {', '.join(stopped) or 'none'}")
    return [*results, result(f"least p of a degradation in {stage}", least, told["threshold"], "probability")]

"""What the model of novels scores on the real benchmarks before and after SFT and DPO, from its run.

    python benchmarks/novels_chat.py [--quick] [--runs DIR]

Reads `novels-chat` in DIR (default: runs), which the command in the head of recipes/novels-chat.yaml makes; --quick is
no shorter. The peer of a score is chance.
"""

import argparse
import json
import sys
from pathlib import Path

from run_scores import MODELS, cells, evaluations, pairs, result, seconds

from affinage.evaluation.published import headline_metrics
from affinage.stages.watching import LOOKS, worse


def scores(run: Path) -> list[dict]:
    found = {model: results["tasks"] for model, results in evaluations(run).items()}
    return [
        {"task": task, "model": model, "items": found[model][task]["items"], "chance": found[model][task].get("chance")}
        | {"metric": metric, **found[model][task]["metrics"][metric]}
        for task, metric in headline_metrics().items()
        for model in MODELS
        if task in found[model]
    ]


def watched(run: Path, stage: str) -> list[dict]:
    """What a tuning's looks at its watch-list found, printed and as results; the last one is the surest degradation."""
    told = json.loads((run / stage / LOOKS).read_text())
    looks, results = told["looks"], []
    for task in looks[0]["scores"]:
        seen = [(look["step"], look["scores"][task]) for look in looks]
        results += [
            result(f"{task} watched in {stage}, step {step}", one["value"], None, "share of items", one["stderr"])
            for step, one in seen
        ]
        said = ", ".join(f"{100 * one['value']:.1f} ± {100 * one['stderr']:.1f} at step {step}" for step, one in seen)
        print(f"{stage} watched, {task}: {said}")
    pairs = [
        (a["right"][task], b["right"][task])
        for b in looks
        for a in looks
        for task in a["scores"]
        if a["step"] < b["step"]
    ]
    least = min(worse(*pair) for pair in pairs)
    stopped = [f"{one['task']} at step {look['step']}" for look in looks for one in look["worse"]]
    print(f"{stage}: least p {least:.2g}, threshold {told['threshold']:.2g}; worse: {', '.join(stopped) or 'none'}")
    return [*results, result(f"least p of a degradation in {stage}", least, told["threshold"], "probability")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    run = parser.parse_args().runs / "novels-chat"
    if not (run / "evaluate-dpo" / "results.json").exists():
        sys.exit(f"{run} is not complete: recipes/novels-chat.yaml says how to make it")
    rows, right = scores(run), pairs(run)
    print("| | metric | items | base | SFT | DPO | chance |\n|---|---|---|---|---|---|---|")
    for task in dict.fromkeys(row["task"] for row in rows):
        of = {row["model"]: row for row in rows if row["task"] == task}
        print(f"| {task} | {of['base']['metric']} | {of['base']['items']} | {cells(of)} |")
    for source, share in right.items():
        print(f"{source}: {share:.1%} of the held-out pairs are right after DPO")
    print(f"all stages: {seconds(run):.0f} s")
    looks = [line for stage in ("sft", "dpo") for line in watched(run, stage)]
    results = [
        result(
            f"{row['task']} {row['metric']}, {row['model']}",
            row["value"],
            row["chance"],
            f"share of {row['items']} items",
            row["stderr"],
        )
        for row in rows
    ]
    results += [result(f"pairs right, {source}", share, 0.5, "share") for source, share in right.items()]
    results += looks
    print(json.dumps({"benchmark": "novels_chat", "results": results}))


if __name__ == "__main__":
    main()

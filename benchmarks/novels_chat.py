"""What the model of novels scores on the real benchmarks before and after SFT and DPO, from its run.

    python benchmarks/novels_chat.py [--quick] [--runs DIR]

Reads `novels-chat` in DIR (default: runs), which the command in the head of recipes/novels-chat.yaml makes; --quick is
no shorter. The peer of a score is chance.
"""

import argparse
import json
import sys
from pathlib import Path

from affinage.evaluation.published import headline_metrics

MODELS = ("base", "sft", "dpo")


def scores(run: Path) -> list[dict]:
    found = {model: json.loads((run / f"evaluate-{model}" / "results.json").read_text())["tasks"] for model in MODELS}
    return [
        {"task": task, "model": model, "items": found[model][task]["items"], "chance": found[model][task].get("chance")}
        | {"metric": metric, **found[model][task]["metrics"][metric]}
        for task, metric in headline_metrics().items()
        for model in MODELS
        if task in found[model]
    ]


def pairs(run: Path) -> list[dict]:
    """Share of held-out pairs of which the preferred answer has the higher reward."""
    validation = json.loads((run / "dpo" / "summary.json").read_text())["validation"]
    return [{"source": name, "value": facts["rewards/accuracies"]} for name, facts in validation.items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    run = parser.parse_args().runs / "novels-chat"
    if not (run / "evaluate-dpo" / "results.json").exists():
        sys.exit(f"{run} is not complete: recipes/novels-chat.yaml says how to make it")
    rows = scores(run)
    print("| | metric | items | base | SFT | DPO | chance |\n|---|---|---|---|---|---|---|")
    for task in dict.fromkeys(row["task"] for row in rows):
        of = {row["model"]: row for row in rows if row["task"] == task}
        one = of["base"]
        shown = " | ".join(f"{100 * of[m]['value']:.1f} ± {100 * of[m]['stderr']:.1f}" for m in MODELS)
        chance = f"{one['chance']:.0%}" if one["chance"] else "–"
        print(f"| {task} | {one['metric']} | {one['items']} | {shown} | {chance} |")
    preferred = pairs(run)
    for one in preferred:
        print(f"{one['source']}: {one['value']:.1%} of the held-out pairs are right after DPO")
    seconds = sum(json.loads(path.read_text())["seconds"] for path in run.glob("*/manifest.json"))
    print(f"all stages: {seconds:.0f} s")
    results = [
        {
            "name": f"{row['task']} {row['metric']}, {row['model']}",
            "ours": row["value"],
            "stderr": row["stderr"],
            "peer": row["chance"],
            "unit": f"share of {row['items']} items",
            "ratio": row["value"] / row["chance"] if row["chance"] else None,
        }
        for row in rows
    ] + [
        {
            "name": f"pairs right, {p['source']}",
            "ours": p["value"],
            "peer": 0.5,
            "unit": "share",
            "ratio": 2 * p["value"],
        }
        for p in preferred
    ]
    print(json.dumps({"benchmark": "novels_chat", "results": results}))


if __name__ == "__main__":
    main()

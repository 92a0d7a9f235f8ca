"""What the model of novels scores on the real benchmarks before and after SFT and DPO, from its run.

    python benchmarks/novels_chat.py [--quick] [--runs DIR]

Reads `novels-chat` in DIR (default: runs), which the command in the head of recipes/novels-chat.yaml makes; --quick is
no shorter. The peer of a score is chance.
"""

import argparse
import json
import sys
from pathlib import Path

from run_scores import MODELS, cells, evaluations, pairs, result, seconds, watched

from affinage.evaluation.published import headline_metrics

PERPLEXITY = (
    "lambada_openai",
    "perplexity",
)  # of the last word, of which accuracy says right or not


def scores(run: Path) -> list[dict]:
    """A line for every headline metric, LAMBADA's perplexity, and model."""
    metrics = list(headline_metrics().items())
    metrics.insert(metrics.index(("lambada_openai", "acc")) + 1, PERPLEXITY)
    found = {model: results["tasks"] for model, results in evaluations(run).items()}
    return [
        {"task": task, "model": model, "items": found[model][task]["items"], "chance": found[model][task].get("chance")}
        | {"metric": metric, **found[model][task]["metrics"][metric]}
        for task, metric in metrics
        for model in MODELS
        if task in found[model]
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    run = parser.parse_args().runs / "novels-chat"
    if not (run / "evaluate-dpo" / "results.json").exists():
        sys.exit(f"{run} is not complete: recipes/novels-chat.yaml says how to make it")
    rows, right = scores(run), pairs(run)
    print("| | metric | items | base | SFT | DPO | chance |\n|---|---|---|---|---|---|---|")
    for asked in dict.fromkeys((row["task"], row["metric"]) for row in rows):
        of = {row["model"]: row for row in rows if (row["task"], row["metric"]) == asked}
        print(f"| {' | '.join(asked)} | {of['base']['items']} | {cells(of, percent=asked != PERPLEXITY)} |")
    for source, share in right.items():
        print(f"{source}: {share:.1%} of the held-out pairs are right after DPO")
    print(f"all stages: {seconds(run):.0f} s")
    looks = [line for stage in ("sft", "dpo") for line in watched(run, stage)]
    results = [
        result(
            f"{row['task']} {row['metric']}, {row['model']}",
            row["value"],
            row["chance"],
            f"{'perplexity' if (row['task'], row['metric']) == PERPLEXITY else 'share'} of {row['items']} items",
            row["stderr"],
        )
        for row in rows
    ]
    results += [result(f"pairs right, {source}", share, 0.5, "share") for source, share in right.items()]
    results += looks
    print(json.dumps({"benchmark": "novels_chat", "results": results}))


if __name__ == "__main__":
    main()

"""What the quickstart scores and how long it takes, from its run: a table to read and a line for programs.

    python benchmarks/quickstart_scores.py [--quick] [--runs DIR]

Runs `affinage run quickstart` first if it has not been run in DIR (default: runs). The peer of a score is chance, that
of a time is the five minutes that the quickstart may take. With `--quick` an unfinished run is trained for 60 steps.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

QUESTIONS = [
    ("facts, form seen", "pocket_facts", "acc"),
    ("facts, form unseen for the fact", "pocket_facts_unseen", "acc"),
    ("facts told in the other language only", "pocket_cross", "acc"),
    ("agreement pairs", "pocket_agreement", "acc"),
    ("arithmetic, operands unseen", "pocket_arithmetic", "acc"),
    ("seen questions in ChatML, exact answer", "pocket_chat", "exact_match"),
]
MODELS = ("base", "sft", "dpo")
LANGUAGES = {"en": "English", "fr": "French"}
LIMIT_SECONDS = 300


def run(runs: Path, quick: bool) -> Path:
    command = [sys.executable, "-c", "from affinage.cli import main; main()", "run", "quickstart", "--runs", str(runs)]
    if quick and not (runs / "quickstart" / "evaluate-dpo").exists():
        shorter = ("pretrain.steps=60", "sft.steps=30", "dpo.steps=20", "evaluate.limit=20")
        command += [word for setting in shorter for word in ("--set", setting)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={"JAX_PLATFORMS": "cpu", **os.environ})
    return runs / "quickstart"


def scores(folder: Path) -> list[dict]:
    rows = []
    results = {m: json.loads((folder / f"evaluate-{m}" / "results.json").read_text()) for m in MODELS}
    for label, task, metric in QUESTIONS:
        for code, language in LANGUAGES.items():
            for model, found in results.items():
                measured = found["tasks"].get(f"{task}_{code}")
                if measured:
                    score = measured["metrics"][metric]
                    chance = measured.get("chance")
                    rows.append({"what": label, "language": language, "model": model, "chance": chance, **score})
    for model in ("sft", "dpo"):
        stopped = results[model]["generation"]["stopped"]
        what = "answers that end with <|im_end|>"
        rows.append({"what": what, "language": "both", "model": model, "chance": None, **stopped})
    return rows


def pairs(folder: Path) -> float:
    """Share of held-out pairs of which the preferred answer has the higher reward after DPO."""
    (validation,) = json.loads((folder / "dpo" / "summary.json").read_text())["validation"].values()
    return validation["rewards/accuracies"]


def table(rows: list[dict]) -> str:
    lines = ["| | language | base | fine-tuned | preferences | chance |", "|---|---|---|---|---|---|"]
    for key in dict.fromkeys((row["what"], row["language"]) for row in rows):
        of_model = {row["model"]: row for row in rows if (row["what"], row["language"]) == key}
        shown = [
            f"{100 * one['value']:.1f} ± {100 * (one['stderr'] or 0):.1f}" if (one := of_model.get(model)) else "–"
            for model in MODELS
        ]
        chance = next(iter(of_model.values()))["chance"]
        name = key[0].replace("|", "\\|")
        lines.append(f"| {name} | {key[1]} | {' | '.join(shown)} | {'–' if chance is None else f'{chance:.0%}'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    folder = run(options.runs, options.quick)
    rows = scores(folder)
    manifests = [json.loads(path.read_text()) for path in folder.glob("*/manifest.json")]
    seconds = sum(manifest["seconds"] for manifest in manifests)
    print(table(rows))
    print(f"\nall stages: {seconds:.0f} s; after DPO {pairs(folder):.1%} of the held-out pairs are right")
    results = [
        {
            "name": f"{row['what']}, {row['language']}, {row['model']}",
            "ours": row["value"],
            "peer": row["chance"],
            "unit": "share of items",
            "ratio": row["value"] / row["chance"] if row["chance"] else None,
        }
        for row in rows
    ]
    time = {"ours": seconds, "peer": LIMIT_SECONDS, "unit": "s", "ratio": seconds / LIMIT_SECONDS}
    results.append({"name": "all stages", **time})
    right = pairs(folder)
    results.append({"name": "held-out pairs, dpo", "ours": right, "peer": 0.5, "unit": "share", "ratio": right / 0.5})
    print(json.dumps({"benchmark": "quickstart_scores", "results": results}))


if __name__ == "__main__":
    main()

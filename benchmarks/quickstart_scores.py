"""What the quickstart scores, also while it is fine-tuned, and how long it takes, from its run.

    python benchmarks/quickstart_scores.py [--quick] [--runs DIR]

Prints a table to read and a line for programs. Runs `affinage run quickstart` first if it has not been run in DIR
(default: runs); what of it is done there is not done again. The peer of a score is chance, that of a time is the five
minutes that the quickstart may take. With `--quick` an unfinished run is trained for 60 steps.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from run_scores import cells, differences, evaluations, pairs, result, seconds, watched

QUESTIONS = [
    ("facts, form seen", "pocket_facts", "acc"),
    ("facts, form unseen for the fact", "pocket_facts_unseen", "acc"),
    ("facts told in the other language only", "pocket_cross", "acc"),
    ("agreement pairs", "pocket_agreement", "acc"),
    ("arithmetic, operands unseen", "pocket_arithmetic", "acc"),
    ("seen questions in ChatML, exact answer", "pocket_chat", "exact_match"),
]
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
    results = evaluations(folder)
    for label, task, metric in QUESTIONS:
        for code, language in LANGUAGES.items():
            for model, found in results.items():
                measured = found["tasks"].get(f"{task}_{code}")
                if measured:
                    score = measured["metrics"][metric]
                    chance = measured.get("chance")
                    about = {"what": label, "language": language, "model": model, "items": measured["items"]}
                    rows.append({**about, "chance": chance, **score})
    for model in ("sft", "dpo"):
        said = results[model]["generation"]
        about = {"what": "answers that end with <|im_end|>", "language": "both", "model": model, "chance": None}
        rows.append({**about, "items": said["texts"], **said["stopped"]})
    return rows


def table(rows: list[dict]) -> str:
    lines = ["| | language | base | fine-tuned | preferences | chance |", "|---|---|---|---|---|---|"]
    for what, language in dict.fromkeys((row["what"], row["language"]) for row in rows):
        of_model = {row["model"]: row for row in rows if (row["what"], row["language"]) == (what, language)}
        name = what.replace("|", "\\|")
        lines.append(f"| {name} | {language} | {cells(of_model)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    folder = run(options.runs, options.quick)
    rows, took = scores(folder), seconds(folder)
    (right,) = pairs(folder).values()
    print(table(rows))
    print(f"\nall stages: {took:.0f} s; after DPO {right} are right")
    looks = watched(folder, "sft")
    paired = [line for models in (("base", "sft"), ("sft", "dpo")) for line in differences(folder, *models)]
    results = [
        result(
            f"{row['what']}, {row['language']}, {row['model']}",
            row["value"],
            row["chance"],
            f"share of {row['items']} items",
            row["stderr"],
        )
        for row in rows
    ]
    results += [*paired, *looks]
    results.append(result("all stages", took, LIMIT_SECONDS, "s"))
    results.append(right.result("held-out pairs, dpo"))
    print(json.dumps({"benchmark": "quickstart_scores", "results": results}))


if __name__ == "__main__":
    main()

"""A sweep of 2 x 2 x 2 in small: base model x conversations x steps of fine-tuning, killed on the way.

    python benchmarks/sweep_quickstart.py [--quick] [--runs DIR] [--kill-after SECONDS]...

Prints the table of docs/tuning.md and a line for programs, from `affinage sweep quickstart`, which is run in DIR
(default: runs); what of it is done there is not done again. The peer of a score is chance. Each --kill-after ends the
sweep with SIGKILL after so many seconds and begins it anew (default: twice, after 120). With `--quick` the models are
trained for a few steps, and nothing is killed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from run_scores import result

SETTINGS = (
    "dpo=null",
    "export=null",
    "report={prompts: [], questions: []}",
    "data.sources=[{path: pocket-world, max_bytes: 1MB}]",
)
WHOLE = (
    "pretrain.steps=900",
    "runtime.checkpoint.keep_every=300",
    "sweep={sft.from_step: [300, 900], sft.sources: [[{path: pocket-world, max_examples: 300}], [pocket-world]],"
    " sft.steps: [100, 300]}",
)
QUICK = (
    "pretrain.steps=60",
    "evaluate.limit=10",
    "sweep={sft.from_step: [60], sft.steps: [5, 10]}",
)
COLUMNS = ("pocket_facts", "pocket_chat", "pocket_agreement")
KILLS = [120.0, 120.0]


def sweep(runs: Path, settings: tuple[str, ...], kill_after: list[float]) -> list[dict]:
    """What `affinage sweep` tells of each run: its settings, losses and scores."""
    program = [sys.executable, "-c", "from affinage.cli import main; main()", "sweep", "quickstart", "--json"]
    command = [*program, "--runs", str(runs), *(word for setting in settings for word in ("--set", setting))]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    for limit in kill_after:
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        print(f"ended with {process.returncode} after {limit:.0f} s at most", file=sys.stderr)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def said(settings: dict) -> str:
    """The point of the three dimensions."""
    sources = settings.get("sft.sources", ["pocket-world"])
    number = next((source["examples"] for source in sources if isinstance(source, dict)), "all")
    return f"base at step {settings['sft.from_step']}, {number} conversations, {settings['sft.steps']} steps"


def table(told: list[dict]) -> str:
    names = [f"{column}_{language}" for column in COLUMNS for language in ("en", "fr")]
    head = [name.removeprefix("pocket_").replace("_", ", ") for name in names]
    lines = [f"| {' | '.join(['run', *head])} |", "|---" * (1 + len(head)) + "|"]
    for point in told:
        scores = [point["scores"][name] for name in names]
        shown = [f"{100 * score['value']:.1f} ± {100 * score['stderr']:.1f}" for score in scores]
        lines.append(f"| {' | '.join([said(point['settings']), *shown])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--kill-after", type=float, action="append")
    options = parser.parse_args()
    settings = SETTINGS + (QUICK if options.quick else WHOLE)
    kills = options.kill_after or ([] if options.quick else KILLS)
    told = sweep(options.runs, settings, kills)
    print(table(told))
    results = [
        result(
            f"{said(point['settings'])}: {task} {score['metric']}",
            score["value"],
            score["chance"],
            "share of items, beside chance",
            score["stderr"],
        )
        for point in told
        for task, score in point["scores"].items()
    ]
    print(json.dumps({"benchmark": "sweep_quickstart", "results": results}))


if __name__ == "__main__":
    main()

"""A fine-tuning that its watch stops: the loss falls on, a benchmark does not, and the model is that from before.

    python benchmarks/watch_stops.py [--quick] [--runs DIR]

The quickstart's base is fine-tuned twice on the same conversations by the same seed, watched on its grammar pairs (all
200 of each language, a look every 100 steps): once the looks only tell, once they stop. Prints the looks, where it
ended, and what the models score on all of the quickstart's questions: the base, the one that was stopped, and the one
that went on to the end. What of it is in DIR (default: runs) is not done again. --quick: a base of 200 steps, and 100
of fine-tuning, in which nothing gets worse.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from run_scores import between, result, watched

from affinage.evaluation.compare import Answers

TOLD, STOPPED = "watch-tells", "watch-stops"
EVERY = 100  # steps


def fine_tuned(runs: Path, name: str, on_regression: str, quick: bool) -> Path:
    """The run of that name, after its models were judged."""
    settings = [f"name={name}", "dpo=null", "export=null", "report=null", f"sft.monitor.on_regression={on_regression}"]
    settings += [f"sft.monitor.every_steps={EVERY // 2 if quick else EVERY}"]
    settings += ["pretrain.steps=200", "sft.steps=100", "evaluate.limit=20"] if quick else []
    command = [sys.executable, "-m", "affinage", "run", "quickstart", "--runs", str(runs)]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={"JAX_PLATFORMS": "cpu", **os.environ})
    return runs / name


def losses(run: Path) -> dict[int, float]:
    """By step: of the assistant's tokens in the conversations that are held out."""
    summary = json.loads((run / "sft/summary.json").read_text())
    lines = [json.loads(line) for line in (run / "sft/metrics.jsonl").read_text().splitlines()]
    [name] = summary["validation"]
    return {line["step"]: line["validation"][name]["loss"] for line in lines if "validation" in line}


def ending(run: Path) -> dict[str, Any]:
    """Where a fine-tuning ended, and why; `kept` is the step of its model."""
    summary = json.loads((run / "sft/summary.json").read_text())
    looks = json.loads((run / "sft/watch.json").read_text())["looks"]
    kept = max(look["step"] for look in looks if not look["worse"]) if summary.get("ended") else summary["steps"]
    return {"steps": summary["steps"], "ended": summary.get("ended", ""), "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    told = fine_tuned(options.runs, TOLD, "log", options.quick)
    stopped = fine_tuned(options.runs, STOPPED, "stop", options.quick)
    end, loss = ending(stopped), losses(told)
    results = watched(told, "sft")
    print(f"ended at step {end['steps']}: {end['ended'] or 'its last'}; the model is that of step {end['kept']}")
    print("held-out loss: " + ", ".join(f"{loss[step]:.3f} at step {step}" for step in sorted(loss)))
    results += [result(f"held-out loss, step {step}", loss[step], None, "nats") | {"step": step} for step in loss]
    results.append(result("step of the stop", end["steps"], None, "steps") | {"ended": end["ended"]})
    results.append(result("step of the model that is kept", end["kept"], None, "steps"))
    models = {
        "base": Answers(told / "evaluate-base"),
        "stopped": Answers(stopped / "evaluate-sft"),
        "to the end": Answers(told / "evaluate-sft"),
    }
    for before, after in (("base", "stopped"), ("base", "to the end"), ("to the end", "stopped")):
        results += between(before, models[before], after, models[after])
    print(json.dumps({"benchmark": "watch_stops", "results": results}))


if __name__ == "__main__":
    main()

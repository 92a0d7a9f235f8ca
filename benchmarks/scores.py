"""What the recipes score: the tables of docs/results.md and docs/tuning.md.

    python benchmarks/scores.py [quickstart monitor experts novels] [--quick]

quickstart: its scores and what tuning changed; the part that runs by default.
monitor: a fine-tuning in which grammar gets worse while its loss falls, once logged, once stopped.
experts: moe-small beside its dense twin, by validation loss.
novels: reads the run `novels-chat`, which the head of its recipe says how to make.

What is complete in runs/ is not run again. The peer of a score is chance, that of the time the five minutes that the
quickstart may take, that of experts the dense model. With `--quick` the models are trained for some steps only, in runs
of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from measuring import Result, finish, parts_of, result

RUNS = Path("runs")
LIMIT_SECONDS = 300
QUICK = ("pretrain.steps=60", "sft.steps=30", "sft.monitor=null", "dpo.steps=20", "evaluate.limit=20")


def affinage(verb: str, *words: str, settings: tuple[str, ...] = ()) -> Any:
    """Run a verb with settings of its recipe, and return its JSON."""
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "affinage", verb, *words, *sets, "--runs", str(RUNS), "--json"]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def run(recipe: str, name: str, *settings: str) -> Path:
    """Run a recipe under a name of its own, unless it is complete, and return the run's folder."""
    affinage("run", recipe, settings=(f"name={name}", *settings))
    return RUNS / name


def scores(folder: Path) -> Iterator[Result]:
    """Yield every score of a run's models."""
    for step, evaluation in affinage("eval", folder.name)["evaluations"].items():
        for task, entry in evaluation["tasks"].items():
            for metric, score in entry["metrics"].items():
                unit, name = f"{metric} of {entry['items']} items", f"{task}, {step}"
                yield result(name, score["value"], unit, entry.get("chance"), stderr=score["stderr"])


def differences(folder: Path, before: str, after: str) -> Iterator[Result]:
    """Yield what two models of a run score on the same items: the second's score less the first's."""
    for row in affinage("compare", f"{folder.name}/{before}", f"{folder.name}/{after}")["differences"]:
        name, unit = f"{row['task']} {row['metric']}, {before} to {after}", f"difference over {row['items']} items"
        yield result(name, row["difference"], unit, low=row["low"], high=row["high"])


def monitored(folder: Path, training: str) -> Iterator[Result]:
    """Yield what the benchmarks during a training scored; `p` is that of a score worse than before."""
    for point in json.loads((folder / training / "monitor.json").read_text())["points"]:
        worse = {row["task"]: row["p"] for row in point["worse"]}
        for task, score in point["scores"].items():
            name = f"{task} in {training}, step {point['step']}"
            yield result(name, score["value"], "share", stderr=score["stderr"], p=worse.get(task))


def quickstart(quick: bool) -> Iterator[Result]:
    """Yield the quickstart's scores, what tuning changed, and its time."""
    folder = run("quickstart", "quickstart-quick", *QUICK) if quick else run("quickstart", "quickstart")
    yield from scores(folder)
    yield from differences(folder, "pretrain", "sft")
    yield from differences(folder, "sft", "dpo")
    if not quick:
        yield from monitored(folder, "sft")
    seconds = affinage("compare", folder.name, folder.name)["runs"][0]["seconds"]
    yield result("all steps", seconds, "s", LIMIT_SECONDS)


def monitor(quick: bool) -> Iterator[Result]:
    """Yield the benchmarks during the fine-tuning, and what it changed."""
    shorter = ("pretrain.steps=200", "sft.steps=100", "evaluate.limit=20") if quick else ()
    for action in ("log", "stop"):
        every = f"sft.monitor.every_steps={50 if quick else 100}"
        steps = ("pretrain.steps=2200", "sft.steps=1000")  # more than the recipe has: more is forgotten
        stops = f"sft.monitor.on_regression={action}"
        settings = ("dpo=null", "export=null", stops, every, *steps, *shorter)
        folder = run("quickstart", f"monitor-{action}{'-quick' if quick else ''}", *settings)
        yield from monitored(folder, "sft")
        yield from differences(folder, "pretrain", "sft")


def experts(quick: bool) -> Iterator[Result]:
    """Yield the losses of 8 experts, 2 active, beside the dense model with as many active parameters."""
    losses: dict[str, dict[str, list[float]]] = {}
    for recipe in ("moe-small", "moe-small-dense"):
        for seed in (0,) if quick else (0, 1):
            shorter = ("pretrain.steps=20", "pretrain.eval_every=20") if quick else ()
            folder = run(recipe, f"{recipe}-{seed}{'-quick' if quick else ''}", f"seed={seed}", *shorter)
            summary = json.loads((folder / "pretrain" / "summary.json").read_text())
            for name, validation in summary["validation"].items():
                losses.setdefault(name, {}).setdefault(recipe, []).append(validation["loss"])
    for name, by_recipe in losses.items():
        ours, peer = (mean(by_recipe[recipe]) for recipe in ("moe-small", "moe-small-dense"))
        yield result(f"loss of experts, {name}", ours, "nats/token", peer)


def novels(quick: bool) -> Iterator[Result]:
    """Yield the scores of the model of novels before and after tuning; nothing of it is shorter with `quick`."""
    folder = RUNS / "novels-chat"
    if not (folder / "evaluate-dpo").exists():
        sys.exit(f"{folder} is not complete: the head of recipes/novels-chat.yaml has the command that makes it")
    yield from scores(folder)
    for training in ("sft", "dpo"):
        yield from monitored(folder, training)


PARTS: dict[str, Callable[[bool], Iterator[Result]]] = {
    part.__name__: part for part in (quickstart, monitor, experts, novels)
}


def main() -> None:
    parts, quick = parts_of(__doc__, PARTS, ["quickstart"])
    finish("scores", [line for part in parts.values() for line in part(quick)])


if __name__ == "__main__":
    main()

"""What the recipes score: the tables of docs/results.md and docs/tuning.md.

    python benchmarks/scores.py [PART]... [--quick] [--runs DIR]

Parts: `quickstart` (default), `sweep` (a 2 x 2 x 2 sweep of it), `monitor` (its fine-tuning, logged and stopped by
benchmarks), `experts` (moe-small beside its dense twin), and `novels`, which reads the run `novels-chat` that the head
of its recipe says how to make. What is complete in DIR (default: runs) is not run again. The peer of a score is chance,
that of a time is the five minutes that the quickstart may take, that of experts the dense model. With `--quick` the
models are trained for some steps only, in runs of their own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300
SWEEP = (
    *("dpo=null", "export=null", "data.sources=[{path: pocket-world, max_bytes: 1MB}]"),
    *("pretrain.steps=900", "runtime.checkpoint.keep_every=300"),
    "sweep={sft.from_step: [300, 900], sft.sources: [[{path: pocket-world, max_examples: 300}], [pocket-world]],"
    " sft.steps: [100, 300]}",
)
QUICK_SWEEP = (*SWEEP[:-1], "pretrain.steps=60", "evaluate.limit=10", "sweep={sft.from_step: [60], sft.steps: [5, 10]}")
QUICK = ("pretrain.steps=60", "sft.steps=30", "sft.monitor=null", "dpo.steps=20", "evaluate.limit=20")
Result = dict[str, Any]


def affinage(*words: str, runs: Path) -> Any:
    """Run a verb; returns its JSON."""
    command = [sys.executable, "-m", "affinage", *words, "--runs", str(runs), "--json"]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={"JAX_PLATFORMS": "cpu", **os.environ}
    )
    return json.loads(done.stdout)


def run(recipe: str, name: str, settings: tuple[str, ...], runs: Path) -> Path:
    """Run a recipe under a name of its own, unless it is complete. Returns the run's folder."""
    words = [word for setting in (f"name={name}", *settings) for word in ("--set", setting)]
    affinage("run", recipe, *words, runs=runs)
    return runs / name


def result(name: str, ours: float, peer: float | None, unit: str, **more: Any) -> Result:
    """One line of a benchmark's results."""
    return {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer if peer else None, **more}


def scores(folder: Path) -> Iterator[Result]:
    """Every score of a run's models, printed as a table and as results."""
    evaluations = affinage("eval", folder.name, runs=folder.parent)["evaluations"]
    print(f"| task | metric | items | {' | '.join(evaluations)} | chance |\n|{'---|' * (4 + len(evaluations))}")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for step, evaluation in evaluations.items():
        for task, entry in evaluation["tasks"].items():
            for metric, score in entry["metrics"].items():
                about = {"items": entry["items"], "chance": entry.get("chance")}
                found.setdefault((task, metric), {})[step] = score | about
    for (task, metric), by_step in found.items():
        first, scale = next(iter(by_step.values())), 1 if metric == "perplexity" else 100
        cells = [
            f"{scale * one['value']:.1f} ± {scale * (one['stderr'] or 0):.1f}" if (one := by_step.get(step)) else "–"
            for step in evaluations
        ]
        chance = "–" if first["chance"] is None else f"{first['chance']:.0%}"
        print(f"| {task} | {metric} | {first['items']} | {' | '.join(cells)} | {chance} |")
        for step, one in by_step.items():
            unit = f"{metric} of {one['items']} items"
            yield result(f"{task}, {step}", one["value"], one["chance"], unit, stderr=one["stderr"])
    for step, evaluation in evaluations.items():
        if stopped := (evaluation.get("generation") or {}).get("stopped"):
            texts = evaluation["generation"]["texts"]
            print(f"{step}: {stopped['value']:.1%} of {texts} answers end with a control token")
            yield result(f"answers that end, {step}", stopped["value"], None, "share", stderr=stopped["stderr"])


def differences(folder: Path, before: str, after: str) -> Iterator[Result]:
    """What two models of a run score on the same items: the second's score less the first's."""
    names = [f"{folder.name}/{model}" for model in (before, after)]
    print(f"\n| {before} to {after} | difference, 95 % interval | items |\n|---|---|---|")
    for one in affinage("compare", *names, runs=folder.parent)["differences"]:
        interval = f"{one['low']:+.3f} to {one['high']:+.3f}"
        print(f"| {one['task']} {one['metric']} | {one['difference']:+.3f} ({interval}) | {one['items']} |")
        more = {"low": one["low"], "high": one["high"]}
        name = f"{one['task']} {one['metric']}, {before} to {after}"
        yield result(name, one["difference"], None, f"difference over {one['items']} items", **more)


def monitored(folder: Path, training: str) -> Iterator[Result]:
    """What the benchmarks during a training scored, and what was worse than before."""
    record = json.loads((folder / training / "monitor.json").read_text())
    for point in record["points"]:
        worse = {each["task"]: each["p"] for each in point["worse"]}
        for task, score in point["scores"].items():
            shown = f"{100 * score['value']:.1f} ± {100 * score['stderr']:.1f}"
            told = f" worse, p = {worse[task]:.1g}" if task in worse else ""
            print(f"{training}, step {point['step']}: {task} {shown}{told}")
            name = f"{task} in {training}, step {point['step']}"
            yield result(name, score["value"], None, "share", stderr=score["stderr"], p=worse.get(task))


def quickstart(runs: Path, quick: bool) -> Iterator[Result]:
    """The quickstart's scores, what tuning changed, and its time."""
    folder = run("quickstart", "quickstart-quick" if quick else "quickstart", QUICK if quick else (), runs)
    yield from scores(folder)
    yield from differences(folder, "pretrain", "sft")
    yield from differences(folder, "sft", "dpo")
    if not quick:
        yield from monitored(folder, "sft")
    seconds = affinage("compare", *[str(folder)] * 2, runs=runs)["runs"][0]["seconds"]
    print(f"\nall steps: {seconds:.0f} s")
    yield result("all steps", seconds, LIMIT_SECONDS, "s")


def sweep(runs: Path, quick: bool) -> Iterator[Result]:
    """Base model, conversations and steps of fine-tuning, two of each."""
    name = "sweep-quick" if quick else "sweep"
    words = [w for setting in (f"name={name}", *(QUICK_SWEEP if quick else SWEEP)) for w in ("--set", setting)]
    for point in affinage("sweep", "quickstart", *words, runs=runs):
        where = ", ".join(f"{key} {json.dumps(value)}" for key, value in point["settings"].items())
        for task, one in point["scores"].items():
            print(f"{where}: {task} {100 * one['value']:.1f} ± {100 * (one['stderr'] or 0):.1f}")
            yield result(f"{where}: {task}", one["value"], one["chance"], one["metric"], stderr=one["stderr"])


def monitor(runs: Path, quick: bool) -> Iterator[Result]:
    """A fine-tuning in which grammar gets worse while its loss falls: once logged, once stopped."""
    shorter = ("pretrain.steps=200", "sft.steps=100", "evaluate.limit=20") if quick else ()
    for action in ("log", "stop"):
        every = f"sft.monitor.every_steps={50 if quick else 100}"
        settings = ("dpo=null", "export=null", f"sft.monitor.on_regression={action}", every, *shorter)
        folder = run("quickstart", f"monitor-{action}{'-quick' if quick else ''}", settings, runs)
        yield from monitored(folder, "sft")
        yield from differences(folder, "pretrain", "sft")


def experts(runs: Path, quick: bool) -> Iterator[Result]:
    """A mixture of 8 experts, 2 active, and the dense model with as many active parameters, by validation loss."""
    losses: dict[str, dict[str, list[float]]] = {}
    for recipe in ("moe-small", "moe-small-dense"):
        for seed in (0,) if quick else (0, 1):
            shorter = ("pretrain.steps=20", "pretrain.eval_every=20") if quick else ()
            folder = run(recipe, f"{recipe}-{seed}{'-quick' if quick else ''}", (f"seed={seed}", *shorter), runs)
            summary = json.loads((folder / "pretrain" / "summary.json").read_text())
            for name, found in summary["validation"].items():
                losses.setdefault(name, {}).setdefault(recipe, []).append(found["loss"])
    for name, by_recipe in losses.items():
        ours, peer = (statistics.mean(by_recipe[recipe]) for recipe in ("moe-small", "moe-small-dense"))
        print(f"{name}: experts {ours:.4f}, dense {peer:.4f}")
        yield result(f"loss of experts, {name}", ours, peer, "nats/token")


def novels(runs: Path, quick: bool) -> Iterator[Result]:
    """The model of novels on real benchmarks, before and after tuning; nothing of it is shorter with `quick`."""
    folder = runs / "novels-chat"
    if not (folder / "evaluate-dpo").exists():
        sys.exit(f"{folder} is not complete: the head of recipes/novels-chat.yaml has the command that makes it")
    yield from scores(folder)
    for training in ("sft", "dpo"):
        yield from monitored(folder, training)


PARTS: dict[str, Callable[[Path, bool], Iterator[Result]]] = {
    part.__name__: part for part in (quickstart, sweep, monitor, experts, novels)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default="quickstart", metavar="PART")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    parts = [options.parts] if isinstance(options.parts, str) else options.parts
    results = [line for part in parts for line in PARTS[part](options.runs, options.quick)]
    print(json.dumps({"benchmark": "scores", "results": results}))


if __name__ == "__main__":
    main()

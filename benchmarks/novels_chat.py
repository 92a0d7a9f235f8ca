"""What the model of novels scores on the real benchmarks: while it is pretrained, and before and after SFT and DPO.

    python benchmarks/novels_chat.py [--quick] [--runs DIR]

Reads `novels-chat` in DIR (default: runs), which the command in the head of recipes/novels-chat.yaml makes; --quick is
no shorter. The peer of a score is chance.
"""

import argparse
import json
import sys
from pathlib import Path

from run_scores import MODELS, cells, evaluations, pairs, result, seconds, watched

from affinage.evaluation.benchmarks import GROUPS
from affinage.evaluation.published import headline_metrics
from affinage.evaluation.run import drawn_places

PERPLEXITY = (
    "lambada_openai",
    "perplexity",
)  # of the last word, of which accuracy says right or not


def scores(run: Path) -> list[dict]:
    """A line for every headline metric, LAMBADA's perplexity, French benchmark that was there, and model."""
    metrics = [*headline_metrics().items(), *((task, "acc") for task in GROUPS["french"])]
    metrics.insert(metrics.index(("lambada_openai", "acc")) + 1, PERPLEXITY)
    found = {model: results["tasks"] for model, results in evaluations(run).items()}
    return [
        {"task": task, "model": model, "items": found[model][task]["items"], "chance": found[model][task].get("chance")}
        | {"metric": metric, **found[model][task]["metrics"][metric]}
        for task, metric in metrics
        for model in MODELS
        if task in found[model]
    ]


def contamination(run: Path) -> list[dict]:
    """Of every model, printed and as results: the items that stand in what it was trained on, and what did not fit."""
    novels = json.loads((run / "decontaminate" / "manifest.json").read_text())["summary"]
    whole = {task: entry["items"] for task, entry in novels["benchmarks"].items()}
    standing = sum(entry["found"] for entry in novels["benchmarks"].values())
    unit = f"of {sum(whole.values())} items, all of each task, in {novels['documents_in']} documents of novels"
    results = [result("items in the novels, before they are split", standing, None, unit)]
    for model, evaluated in evaluations(run).items():
        looked, tasks = evaluated["contamination"], evaluated["tasks"]
        there = {task: len(entry["found"]) + len(entry["common"]) for task, entry in looked["tasks"].items()}
        items = sum(entry["items"] for entry in looked["tasks"].values())
        print(f"{model}: {sum(there.values())} of {items:,} items stand in the {looked['texts']:,} texts before it")
        unit = f"of {items} items that were asked, in {looked['texts']} texts"
        results.append(result(f"items in its text, {model}", sum(there.values()), None, unit))
        for task, entry in looked["tasks"].items():
            line = result(f"{task} items in its text, {model}", there[task], None, f"of {entry['items']} items")
            line |= {"too_short": entry["too_short"], "too_short_of": whole[task]}  # of all that the task has
            line["longer_than_context"] = tasks[task]["longer"]  # of those that were asked
            results.append(line | ({"scores_without": entry["without"]} if there[task] else {}))
            for metric, score in entry["without"].items() if there[task] else ():
                with_them = tasks[task]["metrics"][metric]["value"]
                print(f"  {task} {metric} {with_them:.4f}; without {there[task]} items {score['value']:.4f}")
        short = {task: (entry["too_short"], whole[task]) for task, entry in looked["tasks"].items()}
        longer = {task: (entry["longer"], entry["items"]) for task, entry in tasks.items()}
        told = {"too short to be looked for, asked or not": short, f"longer than {evaluated['context']} tokens": longer}
        for what, counts in told.items():
            said = (f"{count} of {task}'s {items}" for task, (count, items) in counts.items() if count)
            print(f"  {what}: {', '.join(said) or 'none'}")
    return results


def same_answers(run: Path) -> list[dict]:
    """Printed and as results: of which tasks a model gave the same answer to every question.

    That is where exactly the items that have one answer are right. WinoGrande's and others' answers are texts.
    """
    results = []
    for model, evaluated in evaluations(run).items():
        for task in evaluated["tasks"]:
            lines = (run / f"evaluate-{model}" / "items" / f"{task}.jsonl").read_text().splitlines()
            items = [json.loads(line) for line in lines]
            right = {item["target_hash"] for item in items if item.get("acc")}
            if len(right) == 1 and all(item["acc"] for item in items if item["target_hash"] in right):
                print(f"{model}: the same answer to each of the {len(items)} questions of {task}")
                results.append(result(f"same answer, {task}, {model}", len(items), None, f"of {len(items)} items"))
    return results


def among_both(run: Path) -> list[dict]:
    """Printed and as results: how many items both a watched tuning and the evaluation ask."""
    recipe = json.loads((run / "recipe.json").read_text())
    novels = json.loads((run / "decontaminate" / "manifest.json").read_text())["summary"]["benchmarks"]
    results = []
    for task in recipe["sft"]["monitor"]["tasks"]:
        count, first = recipe["sft"]["monitor"]["limit"], recipe["evaluate"]["limit"]
        drawn = drawn_places(task, novels[task]["items"], count, recipe["seed"])
        both = sum(place < first for place in drawn)
        print(f"{task}: {both} of the {count} items that tunings are watched by are among the first {first}")
        results.append(result(f"items of {task} watched and evaluated", both, None, f"of {count} items watched"))
    return results


def in_the_loop(run: Path) -> list[dict]:
    """What was scored while it was pretrained, printed as a table and as results."""
    lines = [json.loads(line) for line in (run / "pretrain/metrics.jsonl").read_text().splitlines()]
    looks = [(line["step"], line["evaluation"]) for line in lines if "evaluation" in line]
    languages, tasks = (list(looks[0][1][kind]) for kind in ("bits_per_byte", "tasks"))
    metrics = {task: headline_metrics().get(task, "acc") for task in tasks}
    titles = [*(f"bits per byte, {language}" for language in languages), *map(" ".join, metrics.items())]
    print(f"| step | {' | '.join(titles)} |\n|{'---|' * (1 + len(titles))}")
    results = []
    for step, look in looks:
        bits = look["bits_per_byte"]
        scores = {task: look["tasks"][task][metric] for task, metric in metrics.items()}
        shown = [f"{bits[language]:.2f}" for language in languages]
        shown += [f"{100 * one['value']:.1f} ± {100 * one['stderr']:.1f}" for one in scores.values()]
        print(f"| {step} | {' | '.join(shown)} |")
        results += [result(f"bits per byte, {name}, step {step}", bits[name], None, "bits") for name in languages]
        results += [
            result(f"{task} {metrics[task]} in pretraining, step {step}", one["value"], None, "share", one["stderr"])
            for task, one in scores.items()
        ]
    return results


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
        print(f"{source}: {share} are right after DPO")
    found = contamination(run)
    alike, both = same_answers(run), among_both(run)
    learning = in_the_loop(run)
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
    results += [share.result(f"pairs right, {source}") for source, share in right.items()]
    results += [*found, *alike, *both, *learning, *looks]
    print(json.dumps({"benchmark": "novels_chat", "results": results}))


if __name__ == "__main__":
    main()

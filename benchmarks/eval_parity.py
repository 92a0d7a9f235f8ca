"""Our evaluation beside lm-evaluation-harness's `hf` backend: the same weights, items, log-likelihoods and scores.

    python benchmarks/eval_parity.py --data FOLDER --items 200 [--model HUGGING_FACE_FOLDER]

FOLDER holds the items as docs/evaluation.md says. Without --model, a small Llama with random weights is exported.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

TASKS = ("winogrande", "piqa", "arc_easy", "arc_challenge", "hellaswag", "lambada_openai", "boolq", "belebele_fra_Latn")


def random_model(folder: Path) -> Path:
    """A small Llama with random weights over bytes and the pieces of a few sentences, exported."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from dataclasses import replace

    from affinage.hub.card import CardFacts
    from affinage.hub.export import export
    from tiny_models import tiny_llama

    export(replace(tiny_llama(scale=3.0), context=512), folder, facts=CardFacts(licence="apache-2.0"))
    return folder


def evaluated(lm, task: str, data: Path, items: int):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from affinage.evaluation.harness import tamed_harness
    from affinage.evaluation.tasks import find_tasks

    with tamed_harness():
        results = simple_evaluate(
            model=lm,
            tasks=list(find_tasks([task], {}, data).local),
            task_manager=TaskManager(include_defaults=False),
            limit=items,
            bootstrap_iters=0,
            torch_random_seed=None,
        )
    return results["results"][task], results["samples"][task]


def compare(task: str, ours, theirs) -> dict:
    worst, greedy, requests = 0.0, 0, 0
    for mine, his in zip(ours[1], theirs[1], strict=True):
        assert mine["arguments"] == his["arguments"] and mine["doc_hash"] == his["doc_hash"]
        for (value, best), (expected, expected_best) in zip(mine["filtered_resps"], his["filtered_resps"], strict=True):
            worst, requests = max(worst, abs(value - expected)), requests + 1
            greedy += best != expected_best
    metrics = {
        name: (value, theirs[0][name])
        for name, value in ours[0].items()
        if isinstance(value, float) and "stderr" not in name
    }
    return {
        "task": task,
        "items": len(ours[1]),
        "requests": requests,
        "largest_difference": worst,
        "greedy_differs": greedy,
        "scores": {name.split(",")[0]: {"ours": a, "hf": b} for name, (a, b) in metrics.items()},
    }


def both(folder: Path, data: Path, items: int, batch: int) -> Iterator[dict]:
    import torch
    from lm_eval.models.huggingface import HFLM

    from affinage.evaluation.backend import JaxLM
    from affinage.stages.models import open_model

    torch.set_num_threads(os.cpu_count() or 1)
    ours = JaxLM(open_model(str(folder), Path("runs")), batch=batch)
    theirs = HFLM(pretrained=str(folder), add_bos_token=True, device="cpu", dtype="float32", batch_size=batch)
    for task in TASKS:
        yield compare(task, evaluated(ours, task, data, items), evaluated(theirs, task, data, items))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="5 items a task")
    options = parser.parse_args()
    rows = []
    print(f"{'task':<20}{'items':>6}{'requests':>9}{'largest |difference|':>22}  scores (ours = hf)")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or random_model(Path(temporary) / "model")
        for row in both(folder, options.data, 5 if options.quick else options.items, options.batch):
            scores = ", ".join(f"{name} {pair['ours']:.6g} = {pair['hf']:.6g}" for name, pair in row["scores"].items())
            found = f"{row['task']:<20}{row['items']:>6}{row['requests']:>9}{row['largest_difference']:>22.2e}"
            print(f"{found}  {scores}", flush=True)
            rows.append(row)
    results = [
        {"name": row["task"], "ours": row["largest_difference"], "peer": 1e-3, "unit": "nats", "ratio": None} | row
        for row in rows
    ]
    print(json.dumps({"benchmark": "eval_parity", "results": results}))
    equal = all(abs(p["ours"] - p["hf"]) <= 1e-3 * max(1, abs(p["hf"])) for row in rows for p in row["scores"].values())
    sys.exit(0 if equal and all(row["largest_difference"] < 1e-3 for row in rows) else 1)


if __name__ == "__main__":
    main()

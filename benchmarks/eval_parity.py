"""Our evaluation beside lm-evaluation-harness's `hf` backend: the same weights, items, log-likelihoods and scores.

    python benchmarks/eval_parity.py --data FOLDER --items 200 [--model HUGGING_FACE_FOLDER]

FOLDER holds the items as docs/evaluation.md says. Without --model, a small Llama with random weights is exported.
A benchmark's own answers are hardly ever what such models would say, so that "none was greedy" is all one hears of
them. So of each task some contexts are also asked with what transformers itself greedily says after them.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

TASKS = ("winogrande", "piqa", "arc_easy", "arc_challenge", "hellaswag", "lambada_openai", "boolq", "belebele_fra_Latn")
OWN = 20  # contexts of a task that are continued by the model itself, by one, two and three tokens in turn


def random_model(folder: Path) -> Path:
    """A small Llama with random weights over bytes and the pieces of a few sentences, exported."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from dataclasses import replace

    from affinage.hub.card import CardFacts
    from affinage.hub.export import export
    from tiny_models import tiny_llama

    export(replace(tiny_llama(scale=3.0, layers=2), context=512), folder, facts=CardFacts(license="apache-2.0"))
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


def said_greedily(lm, samples) -> Iterator[tuple[str, str]]:
    """Contexts with what transformers says after them, where the text has the tokens that were said."""
    import torch

    for number, sample in enumerate(samples):
        tokens = 1 + number % 3
        text, asked = sample["arguments"][0]
        context, _ = lm._encode_pair(text, asked)
        kept = context[-(lm.max_length + 1 - tokens) :]  # as the harness cuts it from the left
        with torch.no_grad():
            whole = lm.model.generate(torch.tensor([kept]), max_new_tokens=tokens, do_sample=False)[0].tolist()
        continuation = lm.tok_decode(whole)[len(lm.tok_decode(kept)) :]
        if continuation and lm._encode_pair(text, continuation) == (context, whole[len(kept) :]):
            yield text, continuation


def asked_own(lm, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance

    from affinage.evaluation.harness import tamed_harness

    with tamed_harness():
        return lm.loglikelihood([Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)])


def compare(task: str, ours, theirs, own: list) -> dict:
    """A row of results, of scores and samples of both, and of both answers to `own` requests, (value, greedy)."""
    answers = list(own)
    for mine, his in zip(ours[1], theirs[1], strict=True):
        assert mine["arguments"] == his["arguments"] and mine["doc_hash"] == his["doc_hash"]
        answers += zip(mine["filtered_resps"], his["filtered_resps"], strict=True)
    metrics = {
        name: (value, theirs[0][name])
        for name, value in ours[0].items()
        if isinstance(value, float) and "stderr" not in name
    }
    return {
        "task": task,
        "items": len(ours[1]),
        "requests": len(answers) - len(own),
        "said_by_itself": len(own),  # requests beside those of the benchmark
        "largest_difference": max(abs(mine[0] - his[0]) for mine, his in answers),
        "greedy": sum(bool(his[1]) for _, his in answers),  # of the harness's
        "greedy_differs": sum(mine[1] != his[1] for mine, his in answers),
        "scores": {name.split(",")[0]: {"ours": a, "hf": b} for name, (a, b) in metrics.items()},
    }


def both(folder: Path, data: Path, items: int, batch: int) -> Iterator[dict]:
    import torch
    from lm_eval.models.huggingface import HFLM

    from affinage.evaluation.backend import JaxLM
    from affinage.pipeline.models import open_model

    torch.set_num_threads(os.cpu_count() or 1)
    ours = JaxLM(open_model(str(folder), Path("runs")), batch=batch)
    theirs = HFLM(pretrained=str(folder), add_bos_token=True, device="cpu", dtype="float32", batch_size=batch)
    for task in TASKS:
        mine, his = evaluated(ours, task, data, items), evaluated(theirs, task, data, items)
        pairs = list(islice(said_greedily(theirs, his[1]), OWN))
        own = list(zip(asked_own(ours, pairs), asked_own(theirs, pairs), strict=True))
        yield compare(task, mine, his, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="5 items a task")
    options = parser.parse_args()
    rows = []
    counts = f"{'items':>6}{'requests':>9}{'own':>5}{'largest |difference|':>22}{'greedy':>8}{'differ':>8}"
    print(f"{'task':<20}{counts}  scores (ours = hf)")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or random_model(Path(temporary) / "model")
        for row in both(folder, options.data, 5 if options.quick else options.items, options.batch):
            scores = ", ".join(f"{name} {pair['ours']:.6g} = {pair['hf']:.6g}" for name, pair in row["scores"].items())
            counts = f"{row['items']:>6}{row['requests']:>9}{row['said_by_itself']:>5}"
            found = f"{row['task']:<20}{counts}{row['largest_difference']:>22.2e}"
            print(f"{found}{row['greedy']:>8}{row['greedy_differs']:>8}  {scores}", flush=True)
            rows.append(row)
    results = [
        {"name": row["task"], "ours": row["largest_difference"], "peer": 1e-3, "unit": "nats", "ratio": None} | row
        for row in rows
    ]
    print(json.dumps({"benchmark": "eval_parity", "results": results}))
    equal = all(abs(p["ours"] - p["hf"]) <= 1e-3 * max(1, abs(p["hf"])) for row in rows for p in row["scores"].values())
    alike = all(row["largest_difference"] < 1e-3 and not row["greedy_differs"] for row in rows)
    sys.exit(0 if equal and alike else 1)


if __name__ == "__main__":
    main()

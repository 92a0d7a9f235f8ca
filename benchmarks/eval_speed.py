"""Items per second of an evaluation beside lm-evaluation-harness's `hf` backend: same machine, weights and items.

    python benchmarks/eval_speed.py --data FOLDER --items 200 [--model HUGGING_FACE_FOLDER] [--tasks hellaswag,piqa]

Both are asked the same requests through the harness's own classes, so that prompts, tokenisation and scoring are timed,
and the harness's own bookkeeping is not. The first pass compiles; after it both take turns, over the same shapes, and
the medians are the figures. CPU seconds are given beside those of the clock, but do not help on a machine that others
use: torch's threads spin while they wait, and its own then grow several times over.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "boolq", "belebele_fra_Latn")


def random_model(folder: Path) -> Path:
    """A Llama of 4 layers of width 256 (3M parameters) with random weights and a context of 512 tokens, exported."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import jax

    from affinage.generation.model import LoadedModel
    from affinage.hub.card import CardFacts
    from affinage.hub.export import export
    from affinage.model.graph import parse
    from affinage.model.module import init_params
    from tiny_models import LLAMA, tokenizer

    nodes = LLAMA["nodes"]
    blocks = nodes["blocks"] | {"repeat": 4, "ffn": {"kind": "swiglu", "width": 704}}
    graph = parse(LLAMA | {"nodes": nodes | {"embed": nodes["embed"] | {"width": 256}, "blocks": blocks}})
    params = jax.jit(lambda key: init_params(graph, key))(jax.random.key(0))
    export(LoadedModel(graph, params, tokenizer(), "random", 512), folder, facts=CardFacts(licence="apache-2.0"))
    return folder


def requests_of(task: str, data: Path, items: int) -> list:
    from affinage.evaluation.harness import tamed_harness, task_manager
    from affinage.evaluation.tasks import find_tasks

    with tamed_harness():
        (loaded,) = task_manager([]).load(list(find_tasks([task], {}, data).local))["tasks"].values()
        loaded.build_all_requests(limit=items, rank=0, world_size=1)
    return loaded.instances


def both_answer(requests: list, lm) -> list:
    """Without the items that have a continuation longer than the context, at which the hf backend gives up."""
    long = {one.doc_id for one in requests if len(lm._encode_pair(*one.args)[1]) > lm.max_length}
    if long:
        print(f"{requests[0].task_name}: {len(long)} items with choices longer than {lm.max_length} tokens left out")
    return [one for one in requests if one.doc_id not in long]


def timed(lm, requests: list) -> dict[str, float]:
    from affinage.evaluation.harness import tamed_harness

    wall, cpu = time.perf_counter(), time.process_time()
    with tamed_harness():
        lm.loglikelihood(requests)
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def alike(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def useful_flops(lm, requests: list) -> float:
    """2 x parameters x tokens that must be computed: what texts of an item begin with alike is once."""
    import jax

    parameters = sum(leaf.size for leaf in jax.tree.leaves(lm.model.params))
    texts: dict[int, list[list[int]]] = {}
    for request in requests:
        context, continuation = lm._encode_pair(*request.args)
        texts.setdefault(request.doc_id, []).append([*context, *continuation][:-1][-lm.max_length :])
    tokens = 0
    for of_item in map(sorted, texts.values()):
        tokens += sum(map(len, of_item)) - sum(map(alike, of_item, of_item[1:]))
    return 2.0 * parameters * tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--peak", type=float, help="FLOP/s that the machine's matrix products reach")
    parser.add_argument("--quick", action="store_true", help="10 items of three tasks")
    options = parser.parse_args()
    import torch
    from lm_eval.models.huggingface import HFLM

    from affinage.evaluation.backend import JaxLM
    from affinage.stages.models import open_model

    torch.set_num_threads(os.cpu_count() or 1)
    tasks, items, repeats = options.tasks.split(","), options.items, options.repeats
    if options.quick:
        tasks, items, repeats = tasks[:3], 10, 1
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or random_model(Path(temporary) / "model")
        ours = JaxLM(open_model(str(folder), Path("runs")), batch=options.batch)
        hf = HFLM(pretrained=str(folder), add_bos_token=True, device="cpu", dtype="float32", batch_size=options.batch)
        for task in tasks:
            requests = both_answer(requests_of(task, options.data, items), ours)
            count = len({one.doc_id for one in requests})
            timed(ours, requests)  # compiles
            timed(hf, requests[:4])  # wakes torch's threads and buffers
            turns = [(timed(ours, requests), timed(hf, requests)) for _ in range(repeats)]
            mine, his = ({unit: median(one[unit] for one in runs) for unit in ("wall", "cpu")} for runs in zip(*turns))
            flops = useful_flops(ours, requests)
            row = {
                "name": task,
                "items": count,
                "ours": count / mine["cpu"],
                "peer": count / his["cpu"],
                "unit": "items per CPU second",
                "ratio": his["cpu"] / mine["cpu"],
                "ratio_of_wall": his["wall"] / mine["wall"],
                "requests_per_second": len(requests) / mine["wall"],
                "useful_flops": flops,
                "share_of_peak": flops / mine["wall"] / options.peak if options.peak else None,
                "seconds": {"ours": mine, "hf": his},
                "cpu_seconds_of_turns": [[one["cpu"], other["cpu"]] for one, other in turns],
            }
            results.append(row)
            share = f", {row['share_of_peak']:.0%} of the arithmetic limit" if options.peak else ""
            print(
                f"{task:<20} {row['ours']:9.1f} items per CPU second, hf {row['peer']:9.1f}: {row['ratio']:.2f} x "
                f"(of the clock {row['ratio_of_wall']:.2f} x){share}",
                flush=True,
            )
    print(json.dumps({"benchmark": "eval_speed", "results": results}))


if __name__ == "__main__":
    main()

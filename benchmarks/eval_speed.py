"""Items per second of an evaluation beside lm-evaluation-harness's `hf` backend: same machine, weights and items.

    python benchmarks/eval_speed.py --data FOLDER --items 200 [--model HUGGING_FACE_FOLDER] [--tasks hellaswag,piqa]
    python benchmarks/eval_speed.py --data FOLDER --host-only --tokenizer FOLDER [--like julian-600m]
    python benchmarks/eval_speed.py --data FOLDER --suite --tokenizer FOLDER [--like julian-600m]

Both are asked the same requests through the harness's own classes, so that prompts, tokenisation and scoring are timed,
and the harness's own bookkeeping is not. The first pass compiles; after it both take turns, over the same shapes, and
the medians are the figures. The ratio is that of the clock; that of CPU seconds, given beside it, does not help
on a machine that others use: torch's threads spin while they wait, and its own then grow several times over. The
arithmetic limit is what must be computed at the rate of this machine's matrix products, measured, or given by --peak.

--suite is the figure of one accelerator: requests a second of the whole group `julian`, all items, with random weights
of a recipe's shape, on the device that JAX finds; with `--like novels --items 20` it runs on a processor. --host-only
computes nothing: requests per CPU second of everything else, and, as arithmetic, what share of an H200's peak 1,000
requests a second would take. The tokenizer is a folder of one, or GPT-2's vocab.bpe with its encoder.json beside it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from eval_suite import host_only, model_like, suite, tokenizer_at

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
    export(LoadedModel(graph, params, tokenizer(), "random", 512), folder, facts=CardFacts(license="apache-2.0"))
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


def of_suite(options: argparse.Namespace) -> list[dict]:
    """Results of --suite or --host-only."""
    from affinage.hardware.devices import acquire

    acquire()
    with tempfile.TemporaryDirectory() as temporary:
        if options.tokenizer is None:
            sys.exit("--tokenizer: the folder of a tokenizer, or GPT-2's vocab.bpe")
        tokenizer = tokenizer_at(options.tokenizer, Path(temporary))
        model = model_like(options.like, tokenizer, drawn=options.suite)
        told = {"limit": options.items, "repeats": options.repeats}
        if options.suite:
            return suite(model, options.data, ["julian"], batch=options.batch or "auto", **told)
        return host_only(model, options.data, ["julian"], batch=options.batch or 64, **told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--items", type=int, help="of each task; default: 200, of --suite and --host-only all")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, help="rows at once; default: 16, of --suite what memory holds")
    parser.add_argument("--peak", type=float, help="FLOP/s of the machine's matrix products; default: measured")
    parser.add_argument("--quick", action="store_true", help="10 items of three tasks; or 200 of all, once")
    parser.add_argument("--suite", action="store_true", help="all of `julian` on the device that JAX finds")
    parser.add_argument("--host-only", action="store_true", help="what the host takes, and the arithmetic")
    parser.add_argument("--like", default="julian-600m", help="a recipe, whose model --suite and --host-only take")
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    if not options.suite:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.suite or options.host_only:
        if options.quick:
            options.items, options.repeats = options.items or 200, 1
        print(json.dumps({"benchmark": "eval_speed", "results": of_suite(options)}))
        return
    import torch
    from lm_eval.models.huggingface import HFLM

    from affinage.evaluation.backend import JaxLM
    from affinage.hardware.matmul import measured_flops
    from affinage.pipeline.models import open_model

    peak = options.peak or measured_flops()
    torch.set_num_threads(os.cpu_count() or 1)
    tasks, items, repeats = options.tasks.split(","), options.items or 200, options.repeats
    batch = options.batch or 16
    if options.quick:
        tasks, items, repeats = tasks[:3], 10, 1
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or random_model(Path(temporary) / "model")
        ours = JaxLM(open_model(str(folder), Path("runs")), batch=batch)
        hf = HFLM(pretrained=str(folder), add_bos_token=True, device="cpu", dtype="float32", batch_size=batch)
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
                "ours": count / mine["wall"],
                "peer": count / his["wall"],
                "unit": "items per second",
                "ratio": his["wall"] / mine["wall"],
                "ratio_of_cpu": his["cpu"] / mine["cpu"],
                "requests_per_second": len(requests) / mine["wall"],
                "useful_flops": flops,
                "peak_flops": peak,
                "share_of_peak": flops / mine["wall"] / peak,
                "seconds": {"ours": mine, "hf": his},
                "ratios_of_turns": [other["wall"] / one["wall"] for one, other in turns],
                "ratios_of_cpu_of_turns": [other["cpu"] / one["cpu"] for one, other in turns],
            }
            results.append(row)
            print(
                f"{task:<20} {row['ours']:9.1f} items per second, hf {row['peer']:9.1f}: {row['ratio']:.2f} x "
                f"(of CPU seconds {row['ratio_of_cpu']:.2f} x), {row['share_of_peak']:.0%} of the arithmetic limit",
                flush=True,
            )
    print(json.dumps({"benchmark": "eval_speed", "results": results}))


if __name__ == "__main__":
    main()

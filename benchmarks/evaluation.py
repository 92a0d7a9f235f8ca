"""Items per second and parity of an evaluation beside lm-evaluation-harness's `hf` backend, on one machine's CPU.

    python benchmarks/evaluation.py --quick     # that it runs: its items are copies, of which the speed says little
    python benchmarks/evaluation.py --data FOLDER --items 200 [--model HUGGING_FACE_FOLDER] [--tasks hellaswag,piqa]

Both backends answer the same requests through the harness's own classes. The first pass compiles and is compared:
log-probabilities within 2e-4, and what is greedy. After it both take turns over the same requests, and the medians are
the figures; the ratio is that of the clock.
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
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "boolq", "belebele_fra_Latn")
TOLERANCE = 2e-4  # of a log-probability, and of its size where that is above 1


def random_model(folder: Path) -> Path:
    """A Llama of 4 layers of width 256 (3M parameters) with random weights and a context of 512 tokens, exported."""
    import jax

    from affinage.generation.model import LoadedModel
    from affinage.hub.card import CardFacts
    from affinage.hub.export import export
    from affinage.model.forward import init_params
    from affinage.model.graph import parse
    from tiny_models import LLAMA, tokenizer

    nodes = LLAMA["nodes"]
    blocks = nodes["blocks"] | {"repeat": 4, "ffn": {"kind": "swiglu", "width": 704}}
    graph = parse(LLAMA | {"nodes": nodes | {"embed": nodes["embed"] | {"width": 256}, "blocks": blocks}})
    params = jax.jit(lambda key: init_params(graph, key))(jax.random.key(0))
    export(LoadedModel(graph, params, tokenizer(), "random", 512), folder, facts=CardFacts(license="apache-2.0"))
    return folder


def requests_of(task: str, data: Path, items: int, longest: int, encode) -> list:
    """The requests of a task, without items that have a choice longer than the context, at which hf gives up."""
    from affinage.evaluation.harness import load_tasks, quiet
    from affinage.evaluation.tasks import find_tasks

    with quiet():
        (loaded,) = load_tasks(find_tasks([task], {}, data).local).values()
        loaded.build_all_requests(limit=items, rank=0, world_size=1)
    long = {one.doc_id for one in loaded.instances if len(encode(*one.args)[1]) > longest}
    return [one for one in loaded.instances if one.doc_id not in long]


def answered(lm, requests: list) -> tuple[list[tuple[float, bool]], float]:
    """The answers, and the seconds that they took."""
    from affinage.evaluation.harness import quiet

    started = time.perf_counter()
    with quiet():
        answers = lm.loglikelihood(requests)
    return answers, time.perf_counter() - started


def compare(task: str, ours, theirs, requests: list, repeats: int) -> dict:
    found, expected = answered(ours, requests)[0], answered(theirs, requests)[0]
    pairs = list(zip(found, expected, strict=True))
    difference = max(abs(a - b) / max(1.0, abs(b)) for (a, _), (b, _) in pairs)
    turns = [(answered(ours, requests)[1], answered(theirs, requests)[1]) for _ in range(repeats)]
    mine, his = (median(seconds) for seconds in zip(*turns, strict=True))
    items = len({one.doc_id for one in requests})
    return {
        "name": task,
        "items": items,
        "ours": items / mine,
        "peer": items / his,
        "unit": "items per second",
        "ratio": his / mine,
        "largest_difference": difference,
        "greedy_differs": sum(a != b for (_, a), (_, b) in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="items as NAME.jsonl; default: the tests' items, copied")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: one with random weights")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="10 items of three tasks, once")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    if options.quick:
        tasks, options.items, options.repeats = tasks[:3], 10, 1
    import torch
    from lm_eval.models.huggingface import HFLM

    from affinage.evaluation.backend import JaxLM
    from affinage.pipeline.models import open_model
    from benchmark_fixtures import write_items

    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        data = options.data or write_items(Path(temporary) / "items", tasks, copies=options.items)
        folder = options.model or random_model(Path(temporary) / "model")
        ours = JaxLM(open_model(str(folder), Path("runs")), batch=options.batch)
        theirs = HFLM(
            pretrained=str(folder), add_bos_token=True, device="cpu", dtype="float32", batch_size=options.batch
        )
        for task in tasks:
            requests = requests_of(task, data, options.items, ours.max_length, ours._encode_pair)
            row = compare(task, ours, theirs, requests, options.repeats)
            rows.append(row)
            print(
                f"{task:<20}{row['ours']:>9.1f} items/s, hf {row['peer']:>9.1f}: {row['ratio']:.2f} x; "
                f"largest difference {row['largest_difference']:.1e}, {row['greedy_differs']} greedy differ",
                flush=True,
            )
    print(json.dumps({"benchmark": "evaluation", "load": round(os.getloadavg()[0], 1), "results": rows}))
    sys.exit(any(row["largest_difference"] > TOLERANCE or row["greedy_differs"] for row in rows))


if __name__ == "__main__":
    main()

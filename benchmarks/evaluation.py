"""Items per second and parity of an evaluation beside lm-evaluation-harness's `hf` backend, on this machine's CPU.

    python benchmarks/evaluation.py --data FOLDER --items 200
    python benchmarks/evaluation.py --quick     # its items are copies, so their speed says little

The model is a small Llama with random weights, and FOLDER has the items of every task as NAME.jsonl. Both backends
answer the same requests. The first pass compiles and is compared: log-probabilities within 2e-4, and whether each
continuation is greedy. Then both take turns, and the medians of the wall clock count.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from measuring import finish, median_seconds, options_of, random_llama, result

TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "boolq", "belebele_fra_Latn")
TOLERANCE = 2e-4  # of a log-probability, relative where its size is above 1
BATCH = 16


def requests_of(task: str, data: Path, items: int, longest: int, encode: Callable[..., Any]) -> list[Any]:
    """Return the requests of a task, without items that have a choice longer than the context: `hf` refuses those."""
    from affinage.evaluation.harness import load_tasks
    from affinage.evaluation.tasks import find_tasks

    (loaded,) = load_tasks(find_tasks([task], data)[0]).values()
    loaded.build_all_requests(limit=items, rank=0, world_size=1)
    long = {request.doc_id for request in loaded.instances if len(encode(*request.args)[1]) > longest}
    return [request for request in loaded.instances if request.doc_id not in long]


def compare(ours: Any, peer: Any, requests: list[Any], repeats: int) -> tuple[list[float], dict[str, float]]:
    """Return items/s of both sides, and how their answers differ."""
    pairs = list(zip(ours.loglikelihood(requests), peer.loglikelihood(requests), strict=True))
    turns = [
        [median_seconds(lambda lm=lm: lm.loglikelihood(requests), 1) for lm in (ours, peer)] for _ in range(repeats)
    ]
    items = len({request.doc_id for request in requests})
    rates = [items / median(seconds) for seconds in zip(*turns, strict=True)]
    difference = max(abs(a - b) / max(1.0, abs(b)) for (a, _), (b, _) in pairs)
    greedy_differs = sum(a != b for (_, a), (_, b) in pairs)
    return rates, {"largest_difference": difference, "greedy_differs": greedy_differs}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--data", type=Path, help="items as NAME.jsonl; default: copies of the tests' items")
    parser.add_argument("--items", type=int, default=200)
    options = parser.parse_args()
    tasks, items, repeats = (TASKS[:3], 10, 1) if options.quick else (TASKS, options.items, 3)
    import torch
    from lm_eval.models.huggingface import HFLM

    from affinage.evaluation.harness import quiet
    from affinage.evaluation.run import JaxLM
    from affinage.pipeline.opening import open_model
    from benchmark_fixtures import write_items

    torch.set_num_threads(os.cpu_count() or 1)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or write_items(Path(scratch) / "items", tasks, copies=items)
        folder = str(random_llama(Path(scratch) / "model", layers=4, width=256, ffn=704, vocabulary=420, context=512))
        ours = JaxLM(open_model(folder, Path("runs")), batch=BATCH)
        peer = HFLM(pretrained=folder, add_bos_token=True, device="cpu", dtype="float32", batch_size=BATCH)
        for task in tasks:
            with quiet():
                requests = requests_of(task, data, items, ours.max_length, ours._encode_pair)
                rates, differences = compare(ours, peer, requests, repeats)
            results.append(result(task, rates[0], "items/s", rates[1], **differences))
    finish("evaluation", results)
    sys.exit(any(line["largest_difference"] > TOLERANCE or line["greedy_differs"] for line in results))


if __name__ == "__main__":
    main()

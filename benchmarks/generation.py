"""Tokens per second of greedy generation beside transformers: same weights and device, both with a KV cache.

    python benchmarks/generation.py [--gpu] [--quick]

The model is a Llama with random weights: of 58 million parameters in float32 on the CPU, of 554 million in bfloat16 on
a GPU. Both sides generate after the same prompts, and `same_tokens` is the share of equal tokens. After a first round,
which compiles, they take turns on all cores, and the medians count. On a machine with other work, compare the CPU
seconds.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if "--gpu" in sys.argv else "cpu")

import numpy as np
from measuring import Result, finish, options_of, random_llama, result

PROMPT, VOCABULARY = 64, 32_000
ON_GPU = "--gpu" in sys.argv
Tokens = list[list[int]]


def ours(folder: Path, prompts: Tokens, tokens: int) -> Callable[[], Tokens]:
    """Return a function that generates with our engine."""
    from affinage.generation.engine import generate
    from affinage.generation.sampling import SamplingParams
    from affinage.pipeline.opening import open_model

    model, params = open_model(str(folder), Path("runs")), SamplingParams(tokens, ignore_eos=True)
    return lambda: [answer.tokens for answer in generate(model, prompts, params, max_num_seqs=len(prompts))]


def transformers(folder: Path, prompts: Tokens, tokens: int) -> Callable[[], Tokens]:
    """Return a function that generates with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    rows = torch.tensor(prompts, device=device)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    settings |= {"attention_mask": torch.ones_like(rows), "pad_token_id": 0, "use_cache": True}

    def run() -> Tokens:
        with torch.inference_mode():
            return model.generate(rows, **settings)[:, rows.shape[1] :].tolist()

    return run


def compare(folder: Path, batch: int, tokens: int, rounds: int) -> Result:
    """Return one line of the results."""
    prompts = np.random.default_rng(batch).integers(8, VOCABULARY, (batch, PROMPT)).tolist()
    sides = (ours(folder, prompts, tokens), transformers(folder, prompts, tokens))
    first = [np.array(run()) for run in sides]
    seconds = np.zeros((rounds, 2, 2))  # of a round and side, by the wall clock and of CPU
    for times in seconds:
        for side, run in enumerate(sides):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            times[side] = time.perf_counter() - wall, time.process_time() - cpu
    (wall, cpu), (peer_wall, peer_cpu) = np.median(seconds, axis=0).tolist()
    more = {"cpu_seconds": cpu, "peer_cpu_seconds": peer_cpu, "same_tokens": float(np.mean(first[0] == first[1]))}
    return result(f"greedy, batch {batch}", batch * tokens / wall, "tokens/s", batch * tokens / peer_wall, **more)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--gpu", action="store_true", help="a larger model, on a GPU")
    quick = parser.parse_args().quick
    layers, width, ffn, tokens, rounds = (18, 1280, 5120, 128, 3) if ON_GPU else (8, 512, 1408, 128, 5)
    if quick:
        layers, width, ffn, tokens, rounds = 2, 128, 352, 32, 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_llama(Path(scratch) / "model", layers, width, ffn, VOCABULARY, context=1024)
        results = [
            compare(folder, batch, tokens, rounds) for batch in ((1, 16, 64) if ON_GPU and not quick else (1, 16))
        ]
    finish("generation", results)


if __name__ == "__main__":
    main()

"""Tokens per second of greedy generation beside transformers: same weights, same CPU, float32, both with a KV cache.

    python benchmarks/generation.py [--model HUGGING_FACE_FOLDER] [--batch 1 16] [--tokens 128] [--rounds 5]
    python benchmarks/generation.py --quick

Both generate after the same prompts, and how many of the tokens are the same is told. Their rounds take turns, and the
figures are the medians; the first round of each, which compiles, is left out. Both may use all cores. CPU seconds are
given beside those of the clock: on a machine that others use, too, they are the ones to compare.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
PROMPT = 64  # tokens
WIDTHS = {"small": (8, 512, 1408), "quick": (2, 128, 352)}  # layers, width, ffn


def random_model(folder: Path, size: str) -> Path:
    """A Llama with random weights, a vocabulary of 32,000 and a context of 1,024 tokens, exported."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import jax

    from affinage.generation.model import LoadedModel
    from affinage.hub.card import CardFacts
    from affinage.hub.export import export
    from affinage.model.forward import init_params
    from affinage.model.graph import parse
    from tiny_models import LLAMA, tokenizer

    layers, width, ffn = WIDTHS[size]
    nodes = LLAMA["nodes"]
    attention = {"heads": width // 64, "rope": {"theta": 10000}}
    blocks = nodes["blocks"] | {"repeat": layers, "attention": attention, "ffn": {"kind": "swiglu", "width": ffn}}
    embed = nodes["embed"] | {"width": width, "vocab": 32_000}
    logits = nodes["logits"] | {"vocab": 32_000}
    graph = parse(LLAMA | {"nodes": nodes | {"embed": embed, "blocks": blocks, "logits": logits}})
    params = jax.jit(lambda key: init_params(graph, key))(jax.random.key(0))
    export(LoadedModel(graph, params, tokenizer(), "random", 1024), folder, facts=CardFacts(license="apache-2.0"))
    return folder


def ours(folder: Path, batch: int, prompts: list[list[int]], tokens: int):
    from affinage.generation.engine import generate
    from affinage.generation.sampling import SamplingParams
    from affinage.pipeline.models import open_model

    model, params = open_model(str(folder), Path("runs")), SamplingParams(tokens, ignore_eos=True)
    return lambda: [one.tokens for one in generate(model, prompts, params, max_num_seqs=batch)]


def theirs(folder: Path, prompts: list[list[int]], tokens: int):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = torch.tensor(prompts)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    settings |= {"attention_mask": torch.ones_like(rows), "pad_token_id": 0, "use_cache": True}

    def run() -> list[list[int]]:
        with torch.inference_mode():
            return model.generate(rows, **settings)[:, rows.shape[1] :].tolist()

    return run


def timed(run) -> tuple[list[list[int]], float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    said = run()
    return said, time.perf_counter() - wall, time.process_time() - cpu


def compare(folder: Path, batch: int, tokens: int, rounds: int) -> dict:
    import numpy as np

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = np.random.default_rng(batch).integers(8, vocabulary, (batch, PROMPT)).tolist()
    sides = {"ours": ours(folder, batch, prompts, tokens), "peer": theirs(folder, prompts, tokens)}
    first = {name: run() for name, run in sides.items()}
    seconds: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        for name, run in sides.items():
            said, wall, cpu = timed(run)
            assert said == first[name]
            seconds[name].append((wall, cpu))
    wall = {name: statistics.median(w for w, _ in of) for name, of in seconds.items()}
    cpu = {name: statistics.median(c for _, c in of) for name, of in seconds.items()}
    rates = {name: batch * tokens / value for name, value in wall.items()}
    same = sum(a == b for mine, other in zip(first["ours"], first["peer"]) for a, b in zip(mine, other))
    return {
        "name": f"greedy tokens/s, batch {batch}",
        "ours": round(rates["ours"], 1),
        "peer": round(rates["peer"], 1),
        "unit": "tokens/s",
        "ratio": round(rates["ours"] / rates["peer"], 3),
        "cpu_seconds": {name: round(value, 2) for name, value in cpu.items()},
        "cpu_ratio": round(cpu["peer"] / cpu["ours"], 3),
        "same_tokens": f"{same} of {batch * tokens}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: one with random weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer tokens, two rounds")
    asked = parser.parse_args()
    if asked.quick:
        asked.tokens, asked.rounds = min(asked.tokens, 32), 2
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.model or random_model(Path(temporary) / "model", "quick" if asked.quick else "small")
        results = [compare(folder, batch, asked.tokens, asked.rounds) for batch in asked.batch]
    for one in results:
        print(f"{one['name']:<28}{one['ours']:>10.1f} ours{one['peer']:>10.1f} transformers{one['ratio']:>8.2f}x")
    import jax
    import transformers

    versions = {"jax": jax.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    told = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "versions": versions}
    told |= {"tokens": asked.tokens, "prompt": PROMPT, "rounds": asked.rounds, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({"benchmark": "generation", "results": results, **told}))


if __name__ == "__main__":
    main()

"""Tokens per second of our train step and of PyTorch's, on this CPU: same model, batch, AdamW and clipping.

    python benchmarks/step_cpu.py [--quick] [--family llama] [--rounds 5] [--seconds 6] [--one-core]

PyTorch is transformers' LlamaForCausalLM and GPT2LMHeadModel, eager and compiled; the peer is the faster of the two.
Contenders take turns within each round; the medians over the rounds are compared. Beside them: page faults of a step,
CPU seconds of a step (which other work on the machine changes least), and how much of the measured float32 matrix
product rate our step reaches by its counted FLOPs. With `--one-core` each contender has one thread on one core.
"""

import argparse
import json
import os
import statistics

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from twins import Contender, Size, matmul_rate

# width, ffn, heads, layers, vocabulary, context, batch
SIZES = [
    Size(128, 512, 4, 4, 1024, 128, 16),
    Size(256, 1024, 8, 6, 8192, 256, 8),
    Size(512, 2048, 8, 8, 16384, 512, 4),
]
PEERS = ("torch-eager", "torch-compile")


def race(family: str, size: Size, rounds: int, seconds: float) -> dict[str, object]:
    """One line of the table."""
    contenders = {who: Contender(who, family, size, "float32") for who in ("ours", *PEERS)}
    counts = {contender.facts["parameters"] for contender in contenders.values()}
    if len(counts) != 1:
        raise SystemExit(f"these are not the same models: {counts} parameters")
    seen: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
    products = []
    for _ in range(rounds):
        products.append(matmul_rate("float32", 1024, 1.0))
        for who, contender in contenders.items():
            seen[who].append(contender.run(seconds))
    for contender in contenders.values():
        contender.close()
    rates = {who: statistics.median(each["rate"] for each in answers) for who, answers in seen.items()}
    best = max(PEERS, key=lambda who: rates[who])
    busy = {who: min(each["cpu"] for each in answers) for who, answers in seen.items()}
    flops = contenders["ours"].facts["flops"] / size.tokens
    return {
        "name": f"{family} {size}",
        "ours": rates["ours"],
        "peer": rates[best],
        "unit": "tok/s",
        "ratio": rates["ours"] / rates[best],
        "peer_name": best,
        "rates": rates,
        "cpu_seconds_per_step": busy,
        "ratio_of_cpu_seconds": min(busy[who] for who in PEERS) / busy["ours"],
        "page_faults_per_step": statistics.median(each["faults"] for each in seen["ours"]),
        "flops": rates["ours"] * flops,
        "matmul_flops": statistics.median(products),
        "share_of_matmul_rate": rates["ours"] * flops / statistics.median(products),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest size of one family, for seconds")
    parser.add_argument("--family", choices=("llama", "gpt2"), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of every contender in every round")
    parser.add_argument("--one-core", action="store_true", help="one thread on one core for each")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    families = arguments.family or (["llama"] if arguments.quick else ["llama", "gpt2"])
    rounds, seconds = (2, 2.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    results = []
    for family in families:
        for size in SIZES[:1] if arguments.quick else SIZES:
            result = race(family, size, rounds, seconds)
            results.append(result)
            print(
                f"{result['name']:40s} ours {result['ours']:9,.0f} tok/s   {result['peer_name']} {result['peer']:9,.0f}"
                f"   {result['ratio']:.2f}x ({result['ratio_of_cpu_seconds']:.2f}x by CPU seconds)"
                f"   {result['page_faults_per_step']:,.0f} page faults a step"
                f"   {result['share_of_matmul_rate']:.0%} of {result['matmul_flops'] / 1e9:,.0f} GFLOP/s",
                flush=True,
            )
    print(json.dumps({"benchmark": "step_cpu", "results": results}))


if __name__ == "__main__":
    main()

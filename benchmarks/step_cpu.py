"""Tokens per second of our train step and of PyTorch's, on this CPU: same model, batch, AdamW and clipping.

    python benchmarks/step_cpu.py [--quick]

PyTorch is transformers' LlamaForCausalLM and GPT2LMHeadModel, eager and compiled; the peer is the faster of the two.
Contenders take turns within each round; the medians over the rounds are compared. Beside them: CPU seconds of a step,
which other work on the machine changes least, and the share of the measured float32 matrix product rate that our step
reaches by its counted FLOPs.
"""

import os
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from measuring import Result, finish, options_of, result
from twins import Contender, Size, matmul_rate

# width, ffn, heads, layers, vocabulary, context, batch
SIZES = (
    Size(128, 512, 4, 4, 1024, 128, 16),
    Size(256, 1024, 8, 6, 8192, 256, 8),
    Size(512, 2048, 8, 8, 16384, 512, 4),
)
PEERS = ("torch-eager", "torch-compile")


def race(family: str, size: Size, rounds: int, seconds: float) -> Result:
    """Return one line of the results."""
    contenders = {who: Contender(who, family, size, "float32") for who in ("ours", *PEERS)}
    counts = {contender.facts["parameters"] for contender in contenders.values()}
    if len(counts) != 1:
        raise SystemExit(f"these are not the same models: {counts} parameters")
    answers: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
    products = []
    for _ in range(rounds):
        products.append(matmul_rate("float32", 1024, 1.0))
        for who, contender in contenders.items():
            answers[who].append(contender.run(seconds))
    for contender in contenders.values():
        contender.close()
    rates = {who: median(answer["rate"] for answer in of) for who, of in answers.items()}
    cpu = {who: min(answer["cpu"] for answer in of) for who, of in answers.items()}
    best = max(PEERS, key=rates.__getitem__)
    share = rates["ours"] * contenders["ours"].facts["flops"] / size.tokens / median(products)
    more = {"cpu_seconds": cpu["ours"], "peer_cpu_seconds": min(cpu[who] for who in PEERS)}
    more |= {"share_of_matmul_rate": share}
    return result(f"{family} {size} against {best}", rates["ours"], "tokens/s", rates[best], **more)


def main() -> None:
    quick = options_of(__doc__).parse_args().quick
    families, sizes = (["llama"], SIZES[:1]) if quick else (["llama", "gpt2"], SIZES)
    rounds, seconds = (2, 2.0) if quick else (5, 6.0)
    finish("step_cpu", [race(family, size, rounds, seconds) for family in families for size in sizes])


if __name__ == "__main__":
    main()

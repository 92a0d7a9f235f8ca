"""Tokens per second and MFU of our train step and of PyTorch's on one GPU: GPT-2 124M at 1,024, Julian-600M at 2,048.

    python benchmarks/step_gpu.py [--quick] [--rounds 3] [--seconds 10]

Ours: bfloat16 products, float32 weights, cuDNN's attention, the loss in parts. PyTorch: transformers'
GPT2LMHeadModel and LlamaForCausalLM under torch.compile, bfloat16 autocast, SDPA, fused AdamW. MFU counts causal
attention as what is computed, against the datasheet's peak; the measured bfloat16 product rate stands beside it.
Aimed at on an H200, and not measured yet: an MFU of 45 % for GPT-2 124M and 55 % for Julian-600M, and more tokens per
second than PyTorch.

Before that the numbers are checked: the losses of the first 20 steps on one batch, which the model learns by heart,
with bfloat16 products against float32 ones, and against PyTorch's in float32 from weights of its own. A curve that
strays further than 2 % from float32's ends the benchmark with status 1.

It needs JAX for CUDA, PyTorch for CUDA and transformers, and nothing else: no network, no data, no weights. Without a
GPU it runs tiny sizes on the CPU to the end, both cases beside each other: that shows that it runs, and no speed.
"""

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
from twins import Contender, Size, matmul_rate

GPT2 = Size(768, 3072, 12, 12, 50257, 1024, 16)
JULIAN = Size(1280, 5120, 20, 18, 50000, 2048, 8)
CURVE, TOLERANCE = 20, 0.02  # steps, and how far bfloat16 may stray from float32 in any of them
CASES = [("GPT-2 124M", "gpt2", GPT2), ("Julian-600M", "llama", JULIAN)]


def race(name: str, family: str, size: Size, rounds: int, seconds: float, peak: float | None) -> dict[str, object]:
    """One line of the table. The contenders run one after the other: both want the device's memory."""
    seen: dict[str, list[dict[str, float]]] = {}
    flops, device = 0.0, ""
    for who in ("ours", "torch-compile"):
        contender = Contender(who, family, size, "bfloat16")
        seen[who] = [contender.run(seconds) for _ in range(rounds)]
        if who == "ours":
            flops, device = contender.facts["flops"] / size.tokens, contender.facts["device"]
        contender.close()
    rates = {who: statistics.median(each["rate"] for each in answers) for who, answers in seen.items()}
    result: dict[str, object] = {
        "name": name,
        "ours": rates["ours"],
        "peer": rates["torch-compile"],
        "unit": "tok/s",
        "ratio": rates["ours"] / rates["torch-compile"],
        "device": device,
        "flops": rates["ours"] * flops,
    }
    if peak is not None:
        result |= {"mfu": rates["ours"] * flops / peak, "peer_mfu": rates["torch-compile"] * flops / peak}
    return result


def loss_curves(family: str, size: Size) -> dict[str, list[float]]:
    """The losses of the first steps, by whom and in which precision."""
    curves = {}
    for who, precision in (("ours", "float32"), ("ours", "bfloat16"), ("torch-eager", "float32")):
        contender = Contender(who, family, size, precision, CURVE)
        curves[f"{who} {precision}"] = contender.facts["losses"]
        contender.close()
    return curves


def measure(
    case: tuple[str, str, Size], *, rounds: int, seconds: float, peak: float | None
) -> tuple[dict[str, object], dict[str, list[float]]]:
    """One case: the race, and the curves at two rows."""
    name, family, size = case
    return race(name, family, size, rounds, seconds, peak), loss_curves(family, replace(size, batch=2))


def shrunk(size: Size) -> Size:
    return replace(size, width=128, ffn=256, heads=4, layers=2, vocabulary=512, context=64, batch=2)


def furthest(curve: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / b for a, b in zip(curve, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of every contender in every round")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    tiny = arguments.quick or device.platform == "cpu"
    rounds, seconds = (1, 1.0) if tiny else (arguments.rounds, arguments.seconds)
    from affinage.hardware.chips import chip

    peak = chip(device.device_kind).flops_per_device if device.platform != "cpu" else None
    measured = matmul_rate("bfloat16", 512 if tiny else 8192, 0.5 if tiny else 2.0)
    cases = [(f"{name}, tiny", family, shrunk(size)) if tiny else (name, family, size) for name, family, size in CASES]
    of_case = partial(measure, rounds=rounds, seconds=seconds, peak=peak)
    results, worst = [], 0.0
    pool = ThreadPoolExecutor(len(cases) if tiny else 1)  # starting ten processes is most of the tiny sizes' time
    for result, curves in pool.map(of_case, cases):
        off = furthest(curves["ours bfloat16"], curves["ours float32"])
        worst = max(worst, off)
        result |= {"matmul_flops": measured, "loss_difference": off, "losses": curves}
        results.append(result)
        share = f"MFU {result['mfu']:.1%} (peer {result['peer_mfu']:.1%})   " if peak is not None else ""
        print(
            f"{result['name']:20s} ours {result['ours']:10,.0f} tok/s   peer {result['peer']:10,.0f}   "
            f"{result['ratio']:.2f}x   {share}bfloat16 loss off by {off:.1e}",
            flush=True,
        )
        for who, curve in curves.items():
            print(f"  {who:20s} every third loss of {CURVE} steps: {', '.join(f'{loss:.3f}' for loss in curve[::3])}")
    print(
        f"bfloat16 products: {measured / 1e12:.3g} TFLOP/s measured" + (f", {peak / 1e12:.0f} stated" if peak else "")
    )
    print(json.dumps({"benchmark": "step_gpu", "results": results}))
    if worst > TOLERANCE:
        sys.exit(f"bfloat16 strays from float32 by {worst:.1%}, more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()

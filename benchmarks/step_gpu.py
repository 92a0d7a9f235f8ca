"""Tokens per second and MFU of our train step and of PyTorch's on one GPU: GPT-2 124M at 1,024, Julian-600M at 2,048.

    python benchmarks/step_gpu.py [--gpu] [--quick] [--rounds 2] [--seconds 8] [--cases NAME ...] [--profile] [--curves]

Ours: bfloat16 products, float32 weights, attention `auto` (cuDNN), the loss in chunks. PyTorch: transformers'
GPT2LMHeadModel and LlamaForCausalLM under torch.compile, bfloat16 autocast, fused AdamW, causal SDPA. Both mask alike:
rows have one document, or several on both sides (ours by offsets, PyTorch's by FlexAttention).
MFU counts causal attention of whole rows, against the datasheet's peak; the measured bfloat16 product rate
stands beside it.

`--curves` checks the numbers: the losses of the first 20 steps on one batch, which the model learns by heart, with
bfloat16 products against float32 ones, and against PyTorch's in float32 from weights of its own. A curve that strays
further than 2 % from float32's ends the benchmark with status 1. `--profile` prints the kernels of a step.

It needs JAX for CUDA, PyTorch for CUDA and transformers, and nothing else: no network, no data, no weights. Without a
GPU it runs tiny sizes on the CPU, which shows that it runs, and no speed; with `--gpu` it ends there instead.
A contender that fails, for want of memory or of a kernel, is left out with its reason.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace

from twins import Contender, Size

from affinage.hardware.chips import chip

GPT2 = Size(768, 3072, 12, 12, 50257, 1024, 32)
JULIAN = Size(1280, 5120, 20, 18, 50000, 2048, 8)
CURVE, TOLERANCE = 20, 0.02  # steps, and how far bfloat16 may stray from float32 in any of them
BOTH = ("ours", "torch-compile")
CASES: dict[str, tuple[str, Size, tuple[str, ...]]] = {
    "gpt2": ("gpt2", GPT2, BOTH),
    "julian": ("llama", JULIAN, BOTH),
    "gpt2-documents": ("gpt2", replace(GPT2, documents=4), ("ours",)),  # transformers' GPT-2 has no FlexAttention
    "julian-documents": ("llama", replace(JULIAN, documents=4), BOTH),
    # Ours alone, to choose defaults by: layers as a loop, as operations of their own, and the recipe's micro-batch.
    "gpt2-scanned": ("gpt2", replace(GPT2, scan=True), ("ours",)),
    "gpt2-unrolled": ("gpt2", replace(GPT2, scan=False), ("ours",)),
    "julian-scanned": ("llama", replace(JULIAN, scan=True), ("ours",)),
    "julian-unrolled": ("llama", replace(JULIAN, scan=False), ("ours",)),
    "gpt2-96": ("gpt2", replace(GPT2, batch=96), ("ours",)),
}


def race(
    family: str, size: Size, who: tuple[str, ...], rounds: int, seconds: float, profile: bool
) -> dict[str, dict[str, object]]:
    """What each contender measured. They run one after the other: each wants the device's memory."""
    found: dict[str, dict[str, object]] = {}
    for name in who:
        began = time.perf_counter()
        try:
            contender = Contender(name, family, size, "bfloat16", profile=profile)
        except SystemExit as reason:
            found[name] = {"failed": str(reason)}
            continue
        answers = [contender.run(seconds) for _ in range(rounds)]
        contender.close()
        rate = statistics.median(answer["rate"] for answer in answers)
        found[name] = {**contender.facts, "rate": rate, "seconds": time.perf_counter() - began}
    return found


def loss_curves(family: str, size: Size) -> dict[str, list[float]]:
    """The losses of the first steps, by whom and in which precision."""
    curves = {}
    for who, precision in (("ours", "float32"), ("ours", "bfloat16"), ("torch-eager", "float32")):
        contender = Contender(who, family, size, precision, CURVE)
        curves[f"{who} {precision}"] = contender.facts["losses"]
        contender.close()
    return curves


def shrunk(size: Size) -> Size:
    return replace(size, width=128, ffn=256, heads=4, layers=2, vocabulary=512, context=64, batch=2)


def furthest(curve: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / b for a, b in zip(curve, other, strict=True))


def line(who: str, facts: dict, flops: float, size: Size, peak: float | None) -> str:
    if "failed" in facts:
        return f"  {who:14s} failed: {facts['failed']}"
    share = f"   MFU {facts['rate'] * flops / peak:6.1%}" if peak else ""
    more = f"   compiled in {facts['compile']:.0f} s" if "compile" in facts else ""
    more += f", {facts['temporaries'] / 2**30:.1f} GiB of temporaries" if facts.get("temporaries") else ""
    step = 1000 * size.tokens / facts["rate"]
    return f"  {who:14s} {facts['rate']:10,.0f} tok/s   {step:7.1f} ms a step{share}{more}   loss {facts['loss']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="end with an error where there is no GPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for seconds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of every contender in every round")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES)[:4])
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of ours")
    parser.add_argument("--curves", action="store_true", help="compare the losses of 20 steps")
    arguments = parser.parse_args()
    # In a process of its own, as all that follows: a process that has a GPU has most of its memory.
    products = Contender("matmul", "", GPT2, "bfloat16")
    products.close()
    device, measured = products.facts["device"], products.facts["rate"]
    on_cpu = products.facts["platform"] == "cpu"
    if arguments.gpu and on_cpu:
        sys.exit(f"JAX finds no GPU here, but {device}")
    tiny = arguments.quick or on_cpu
    rounds, seconds = (1, 1.0) if tiny else (arguments.rounds, arguments.seconds)
    peak = None if on_cpu else chip(device).flops_per_device
    print(f"{device}: bfloat16 products at {measured / 1e12:.3g} TFLOP/s measured", end="")
    print(f", {peak / 1e12:.0f} stated" if peak else "", flush=True)
    results, worst = [], 0.0
    for name in arguments.cases:
        family, size, who = CASES[name]
        size = shrunk(size) if tiny else size
        found = race(family, size, who, rounds, seconds, arguments.profile)
        flops = float(found["ours"].get("flops", 0.0)) / size.tokens  # type: ignore[arg-type]
        print(f"{name} ({size.batch} rows of {size.context} tokens, {size.documents} documents each)")
        for contender, facts in found.items():
            print(line(contender, facts, flops, size, peak), flush=True)
            for kernel in facts.pop("kernels", []):  # type: ignore[attr-defined]
                print(f"      {kernel}")
        result: dict[str, object] = {"name": name, "size": str(size), "contenders": found, "peak": peak}
        if arguments.curves:
            curves = loss_curves(family, replace(size, batch=2))
            off = furthest(curves["ours bfloat16"], curves["ours float32"])
            worst = max(worst, off)
            result |= {"loss_difference": off, "losses": curves}
            for who_in, curve in curves.items():
                print(
                    f"  {who_in:20s} every third of {CURVE} losses: {', '.join(f'{loss:.3f}' for loss in curve[::3])}"
                )
        results.append(result)
    print(json.dumps({"benchmark": "step_gpu", "device": device, "matmul": measured, "results": results}))
    if worst > TOLERANCE:
        sys.exit(f"bfloat16 strays from float32 by {worst:.1%}, more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()

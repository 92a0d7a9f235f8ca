"""Tokens per second and MFU of our train step and of PyTorch's on one GPU: GPT-2 124M at 1,024, Julian-600M at 2,048.

    python benchmarks/step_gpu.py [--gpu] [--quick] [--cases NAME ...]

Ours: bfloat16 products, float32 weights, attention `auto` (cuDNN), the loss in chunks. PyTorch: transformers'
GPT2LMHeadModel and LlamaForCausalLM under torch.compile, bfloat16 autocast, fused AdamW, causal SDPA. Rows have one
document, or several on both sides (ours by offsets, PyTorch's by FlexAttention). MFU counts causal attention of whole
rows, against the datasheet's peak; the measured bfloat16 product rate stands in the JSON line.

It needs JAX and PyTorch for CUDA and transformers, and no network, data or weights. Without a GPU it runs tiny sizes on
the CPU, which shows that it runs, and no speed; with `--gpu` it ends there instead. A contender that fails, for want of
memory or of a kernel, is left out.
"""

import sys
from dataclasses import replace
from statistics import median
from typing import Any

from measuring import finish, options_of, result
from twins import Contender, Size

from affinage.hardware.chips import chip

GPT2 = Size(768, 3072, 12, 12, 50257, 1024, 32)
JULIAN = Size(1280, 5120, 20, 18, 50000, 2048, 8)
CASES: dict[str, tuple[str, Size]] = {
    "gpt2": ("gpt2", GPT2),
    "julian": ("llama", JULIAN),
    "gpt2-documents": ("gpt2", replace(GPT2, documents=4)),  # ours alone: transformers' GPT-2 has no FlexAttention
    "julian-documents": ("llama", replace(JULIAN, documents=4)),
}


def race(who: str, family: str, size: Size, rounds: int, seconds: float) -> dict[str, Any] | None:
    """Return what a contender measured, None if it failed. Each has the device's memory for itself."""
    try:
        contender = Contender(who, family, size, "bfloat16")
        answers = [contender.run(seconds) for _ in range(rounds)]
        contender.close()
    except SystemExit as reason:
        print(reason)
        return None
    return contender.facts | {"rate": median(answer["rate"] for answer in answers), "loss": answers[-1]["loss"]}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--gpu", action="store_true", help="end with an error where there is no GPU")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    products = Contender("matmul", "", GPT2, "bfloat16")  # in a process of its own: this one must leave the GPU alone
    products.close()
    device, on_cpu = products.facts["device"], products.facts["platform"] == "cpu"
    if options.gpu and on_cpu:
        sys.exit(f"JAX finds no GPU here, but {device}")
    tiny = options.quick or on_cpu
    peak = None if on_cpu else chip(device).flops_per_device
    results = []
    for name in options.cases:
        family, size = CASES[name]
        if tiny:
            size = replace(size, width=128, ffn=256, heads=4, layers=2, vocabulary=512, context=64, batch=2)
        peers = () if name == "gpt2-documents" else ("torch-compile",)
        facts = [race(who, family, size, *((1, 1.0) if tiny else (2, 8.0))) for who in ("ours", *peers)]
        ours, peer = facts[0], facts[1] if peers else None
        if ours is not None:
            more = {"loss": ours["loss"], "compile_s": ours["compile"], "temporary_GiB": ours["temporaries"] / 2**30}
            if peak:
                more["mfu"] = ours["rate"] * ours["flops"] / size.tokens / peak
                more["peer_mfu"] = more["mfu"] * peer["rate"] / ours["rate"] if peer else None
            results.append(result(name, ours["rate"], "tokens/s", peer and peer["rate"], **more))
    finish("step_gpu", results, device=device, matmul_flops=products.facts["rate"], peak_flops=peak)


if __name__ == "__main__":
    main()

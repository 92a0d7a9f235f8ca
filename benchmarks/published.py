"""The planner's step beside steps that others published, with nothing fitted to them.

    python benchmarks/published.py [--quick]

`ratio` is planned / published seconds. `source` says where a step is published, and what is assumed where that leaves
something open. `--quick` plans one of them.
"""

from dataclasses import dataclass

from measuring import Result, finish, options_of, result

from affinage.config.load import load_recipe
from affinage.hardware.chips import find_slice
from affinage.planning.plan import make_plan, planned_graph

CUDNN = "pretrain.attention=cudnn"
XLA = ("pretrain.attention=xla",)


@dataclass(frozen=True)
class Published:
    """A step that somebody measured on a slice, and the recipe of a model of its shape."""

    name: str
    recipe: str
    slice: str
    seconds: float
    source: str
    overrides: tuple[str, ...] = ()


def _llama(
    width: int, layers: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, rows: int, length: int
) -> tuple[str, ...]:
    """Return overrides of llama3-1b for another model of its kind, with heads of 128 and an unembedding of its own."""
    blocks = "model.nodes.blocks"
    return (
        f"model.nodes.embed.width={width}",
        f"model.nodes.embed.vocab={vocabulary}",
        f"model.nodes.logits={{kind: unembed, in: norm, vocab: {vocabulary}}}",
        f"{blocks}.repeat={layers}",
        f"{blocks}.attention={{heads: {heads}, kv_heads: {kv_heads}, head_dim: 128}}",
        f"{blocks}.ffn.width={ffn}",
        f"packing.seq_len={length}",
        f"pretrain.batch_size={rows}",
        "pretrain.gradient_accumulation_steps=1",
    )


def _tflops(per_second: float, parameters: float, layers: int, width: int, rows: int, length: int) -> float:
    """Return seconds of a step at MaxText's TFLOP/s of a chip: 6 FLOPs a parameter and token, and attention."""
    flops = 6 * parameters * rows * length + 12 * layers * width * length**2 * rows
    return flops / (per_second * 1e12)


# MaxText's models by `global_parameter_scale`, from its scripts configs/v5p/32b.sh and configs/v5e/16b.sh; parameters
# are those that are multiplied with.
_32B = (31.4e9, 32, 8192, 7, 2048)
_16B = (15.7e9, 32, 8192, 6, 2048)  # its attention is twice as wide as the residual stream
_7B = (6.6e9, 32, 4096, 4, 4096)

CASES = (
    Published(
        "MaxText 32B",
        "llama3-1b",
        "v5p-128",
        _tflops(328, *_32B),
        "328 TFLOP/s a chip, configs/tpu/v5p/README.md",
        (*_llama(8192, 32, 64, 64, 28672, 32000, 7 * 64, 2048), "mesh={fsdp: 16, tensor: 4}", "parallel.remat=dots"),
    ),
    Published(
        "MaxText 16B",
        "llama3-1b",
        "v5e-256",
        _tflops(120.4, *_16B),
        "61.1 % of 197 TFLOP/s a chip, configs/tpu/v5e/README.md",
        (*_llama(4096, 32, 64, 64, 28672, 32000, 6 * 256, 2048), "mesh={fsdp: 256}", "parallel.remat=block"),
    ),
    Published(
        "MaxText Llama 3.1 8B",
        "llama3-1b",
        "v6e-256",
        3 * 8192 / 7207,
        "7,207 tokens/s a chip, docs/reference/models/tiering.md; 3 rows a chip and `block` are assumed",
        (*_llama(4096, 32, 32, 8, 14336, 128256, 3 * 256, 8192), "mesh={fsdp: 256}", "parallel.remat=block"),
    ),
    Published(
        "MaxText Llama 2 7B",
        "llama3-1b",
        "h100x8",
        _tflops(492, *_7B),
        "492 TFLOP/s a GPU, configs/gpu/a3/llama_2_7b/README.md",
        (*_llama(4096, 32, 32, 32, 11008, 32000, 4 * 8, 4096), "mesh={fsdp: 8}", "parallel.remat=dots", CUDNN),
    ),
    Published("FAX 13.7B", "fax-5120", "v4-16", 0.87, "Yoo et al., 2022, table 1, without a kernel", XLA),
    Published("FAX 86.6B", "fax-10240", "v4-128", 1.52, "the same", XLA),
    Published("FAX 340B", "fax-16384", "v4-512", 6.21, "the same", XLA),
    Published(
        "nanochat d24 in JAX",
        "llama3-1b",
        "v6e-8",
        1.41,
        "1.39 to 1.44 s a step of 524,288 tokens; fsdp and `block` are assumed",
        (
            *_llama(1536, 24, 12, 12, 6144, 65536, 256, 2048),
            "model.nodes.blocks.ffn.kind=gelu",
            "mesh={fsdp: 8}",
            "parallel.remat=block",
        ),
    ),
    Published(
        "GPT-2 124M on one TPU host",
        "gpt2-124m-tpu",
        "v3-8",
        7 * 3600 / 75_000,
        "about 7 hours, 'Train a GPT2 model with JAX on TPU for free'; 7.37B tokens are assumed",
    ),
    Published("GPT-2 124M on one TPU host", "gpt2-124m-tpu", "v6e-8", 1.5 * 3600 / 75_000, "about 1.5 hours, the same"),
    Published(
        "nanoGPT 124M",
        "gpt2-124m",
        "a100-40gbx8",
        480 * 1024 / (8 * 107e3),
        "600,000 steps in about 4 days, README; 12 rows at a time",
        ("pretrain.gradient_accumulation_steps=5", "mesh={data: 8}", CUDNN),
    ),
)


def measure(case: Published) -> Result:
    """Return one line of the results."""
    loaded = load_recipe(case.recipe, case.overrides)
    plan = make_plan(loaded.recipe, planned_graph(loaded), find_slice(case.slice))
    more = {"mfu": plan.mfu, "bound": plan.time.bound, "source": case.source}
    return result(f"{case.name}, {case.slice}", plan.time.seconds, "s", case.seconds, **more)


def main() -> None:
    quick = options_of(__doc__).parse_args().quick
    finish("published", [measure(case) for case in CASES[-1 if quick else 0 :]])


if __name__ == "__main__":
    main()

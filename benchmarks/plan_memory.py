"""The planner's memory estimate beside the TPU compiler's, for every preset: the same step, traced and compiled.

    python benchmarks/plan_memory.py                # minutes: some forty compilations
    python benchmarks/plan_memory.py --quick        # one of them
    python benchmarks/plan_memory.py --only gpt2    # those whose name holds a word

Needs `pip install 'affinage[tpu]'`, and no TPU. `ratio` is estimate / compiler.
"""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"

from measuring import Result, finish, options_of, result

from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.hardware.chips import GiB, find_slice
from affinage.planning.compiled import compile_on
from affinage.planning.plan import Training, make_plan, only, planned_graph

DROP = "model.nodes.blocks.attention.dropout=0"
DROPLESS = "model.nodes.blocks.ffn.capacity_factor=null"  # some four minutes of compilation each
BLOCK = "parallel.remat=block"
FOUR_PARTS = "parallel.pipeline_micro_batches=4"
CHARACTERS = ("model.nodes.embed.vocab=65", "model.nodes.logits.vocab=65")


@dataclass(frozen=True)
class Case:
    """A recipe with overrides on a slice."""

    recipe: str
    slice: str
    overrides: tuple[str, ...] = ()
    stage: Training | None = None  # None: the first that the recipe has

    @property
    def name(self) -> str:
        """Options of `affinage plan`."""
        stage = ["--training", self.stage] if self.stage else []
        return " ".join([self.recipe, "--on", self.slice, *stage, *(f"--set {setting}" for setting in self.overrides)])


CASES = (
    Case("quickstart", "v4-8", ("mesh.data=4", "pretrain.batch_size=4096")),
    Case("shakespeare-char", "v4-8", ("mesh.data=4", "pretrain.batch_size=4096", *CHARACTERS)),
    Case("shakespeare-char", "v4-8", ("mesh.data=4", "pretrain.batch_size=4096")),  # planned with 50,000 characters
    Case("novels", "v4-8", ("mesh.data=4", "pretrain.batch_size=1024")),
    Case("moe-small", "v4-8", ("mesh.data=4", "pretrain.batch_size=4096")),
    Case("moe-small", "v4-8", ("mesh={data: 1, expert: 4}", "pretrain.batch_size=4096")),
    Case("moe-small", "v4-8", (DROPLESS, "mesh.data=4", "pretrain.batch_size=4096")),
    Case("moe-small", "v4-8", (DROPLESS, "mesh={data: 1, expert: 4}", "pretrain.batch_size=4096")),
    Case("moe-small", "v4-16", (DROPLESS, "mesh={data: 1, expert: 8}", "pretrain.batch_size=4096")),
    Case("moe-small-dense", "v4-8", ("mesh.data=4", "pretrain.batch_size=4096")),
    Case("fax-124m", "v4-16"),
    Case("fax-350m", "v4-32"),
    Case("fax-5120", "v4-16"),
    Case("fax-10240", "v4-128"),
    Case("fax-16384", "v4-512"),
    Case("gpt2-124m", "v4-16"),
    Case("gpt2-124m-tpu", "v6e-8"),
    Case("gpt2-350m", "v4-32"),
    Case("gpt2-774m", "v4-64"),
    Case("gpt2-1.5b", "v4-64", ("pretrain.gradient_accumulation_steps=5",)),
    Case("julian-100m", "v4-16"),
    Case("julian-100m", "v4-16", (DROP,)),
    Case("julian-250m", "v5p-16"),
    Case("julian-250m", "v5e-16", (DROP, BLOCK)),
    Case("julian-600m", "v4-32", (DROP,)),
    Case("julian-600m", "v6e-64", (DROP, "parallel.remat=dots")),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 8, context: 2}")),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 4, context: 4}")),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 4, context: 4}", "pretrain.attention=xla")),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 4, context: 4}", "parallel.context_attention=ring")),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 4, context: 2, tensor: 2}")),
    Case("julian-600m", "v6e-8", (DROP, "mesh={fsdp: 2, context: 4}")),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 8, pipeline: 2}", FOUR_PARTS)),
    Case("julian-600m", "v4-32", (DROP, "mesh={fsdp: 4, context: 2, pipeline: 2}", FOUR_PARTS)),
    Case("julian-600m", "v4-32", (BLOCK,)),
    Case("julian-sft", "v4-32", (DROP,), "sft"),
    Case("julian-sft", "v4-32", (DROP, "sft.lora.r=16"), "sft"),
    Case("novels-chat", "v4-8", ("mesh.data=4", "dpo.batch_size=256"), "dpo"),
    Case("julian-2b", "v4-64", (DROP, BLOCK)),
    Case("julian-2b", "v6e-64", (DROP, BLOCK)),
    Case("llama3-1b", "v5p-128"),
    Case("llama3-70b", "v5p-512"),
    Case("capacity", "v4-16", ("model.nodes.blocks.repeat=126",)),
)


def measure(case: Case) -> Result:
    """Return one line of the results."""
    settings, where = list(case.overrides), find_slice(case.slice)
    if case.stage:
        settings += only(case.stage, load_recipe(case.recipe, settings).recipe)
    loaded = load_recipe(case.recipe, settings)
    estimate = make_plan(loaded.recipe, planned_graph(loaded), where).memory.total / GiB
    report = compile_on(case.recipe, settings, where)
    return result(case.name, estimate, "GiB of a device", report.peak_bytes / GiB, fits=report.fits)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", metavar="NAME")
    options = parser.parse_args()
    results = []
    for case in [case for case in CASES if options.only in case.name][: 1 if options.quick else None]:
        try:
            results.append(measure(case))
        except UserError as error:
            print(f"{case.name}: {error.what}. {error.fix}", file=sys.stderr, flush=True)
    finish("plan_memory", results, versions={name: version(name) for name in ("jax", "libtpu")})


if __name__ == "__main__":
    main()

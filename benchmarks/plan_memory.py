"""The planner's memory estimate beside the TPU compiler's, for every preset: the same step, traced and compiled.

    python benchmarks/plan_memory.py                # minutes: some twenty compilations
    python benchmarks/plan_memory.py --quick        # one of them
    python benchmarks/plan_memory.py --only gpt2    # those whose name holds a word

Needs `pip install 'affinage[tpu]'`, and no TPU. Ends with a line of JSON; `ratio` is estimate / compiler.
"""

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"

from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.hardware.chips import GiB
from affinage.hardware.slices import find_slice
from affinage.planning.compiled import compile_on
from affinage.planning.plan import Training, make_plan, only, planned_graph

DROP = "model.nodes.blocks.attention.dropout=0"
DROPLESS = "model.nodes.blocks.ffn.capacity_factor=null"  # some four minutes of compilation each
BLOCK = "parallel.remat=block"
FOUR_PARTS = "parallel.pipeline_micro_batches=4"
CHARACTERS = ("model.nodes.embed.vocab=65", "model.nodes.logits.vocab=65")


@dataclass(frozen=True)
class Case:
    recipe: str
    slice: str
    overrides: tuple[str, ...] = ()
    stage: Training | None = None  # by default the first that the recipe has

    @property
    def name(self) -> str:
        stage = ["--training", self.stage] if self.stage else []
        return " ".join([self.recipe, "--on", self.slice, *stage, *(f"--set {one}" for one in self.overrides)])

    @property
    def settings(self) -> list[str]:
        """Overrides that leave the training that is planned."""
        own = list(self.overrides)
        return [*own, *only(self.stage, load_recipe(self.recipe, own).recipe)] if self.stage else own


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
    Case("novels-chat", "v4-8", ("mesh.data=4", "dpo.batch_size=256", "dpo.precompute_ref_log_probs=false"), "dpo"),
    Case("julian-2b", "v4-64", (DROP, BLOCK)),
    Case("julian-2b", "v6e-64", (DROP, BLOCK)),
    Case("llama3-1b", "v5p-128"),
    Case("llama3-70b", "v5p-512"),
    Case("capacity", "v4-16", ("model.nodes.blocks.repeat=126",)),
)


def estimate(case: Case) -> float:
    loaded = load_recipe(case.recipe, case.settings)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice(case.slice)).memory.total


def measure(case: Case) -> dict[str, object]:
    guess = estimate(case) / GiB
    verdict = compile_on(case.recipe, case.settings, find_slice(case.slice))
    peak = verdict.peak_bytes / GiB
    fits = "fits" if verdict.fits else "does not fit"
    print(f"{case.name:90} {guess:8.2f} {peak:8.2f} GiB {guess / peak - 1:+7.1%}  {fits}", flush=True)
    result = {"name": case.name, "ours": round(guess, 3), "peer": round(peak, 3), "unit": "GiB of a device"}
    return result | {"ratio": round(guess / peak, 4), "fits": verdict.fits, "seconds": round(verdict.seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--estimate", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name][: 1 if arguments.quick else None]
    results = []
    for case in cases:
        try:
            if arguments.estimate:
                print(f"{case.name:90} {estimate(case) / GiB:8.2f}", flush=True)
            else:
                results.append(measure(case))
        except UserError as error:
            print(f"{case.name}: {error.what}. {error.fix}", file=sys.stderr, flush=True)
    machine = {"machine": platform.machine(), "date": date.today().isoformat()}
    versions = {name: version(name) for name in ("jax", "libtpu")}
    print(json.dumps({"benchmark": "plan_memory", "results": results, **machine, "versions": versions}))


if __name__ == "__main__":
    main()

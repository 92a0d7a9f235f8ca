"""A mixture of 8 experts, 2 active, against the dense model with as many active parameters, at equal steps.

    python benchmarks/moe_twin.py [--quick] [--seeds 0 1] [--runs DIR]

Trains `moe-small` and `moe-small-dense` (if that has not been done in DIR) on the quickstart's text, once per seed, and
compares the cross entropy on validation documents, which holds nothing of the router's own losses. Under 1 is better.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

LANGUAGES = {"en": "English", "fr": "French"}


def train(recipe: str, seed: int, runs: Path, quick: bool) -> Path:
    """The folder of the trained model."""
    name = f"{recipe}-seed{seed}{'-quick' if quick else ''}"
    program = [sys.executable, "-c", "from affinage.cli import main; main()"]
    settings = [f"name={name}", f"seed={seed}", *(["pretrain.steps=20", "pretrain.eval_every=20"] if quick else [])]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [*program, "train", recipe, "--runs", str(runs), *sets]
    subprocess.run(command, check=True, stdout=sys.stderr, env={"JAX_PLATFORMS": "cpu", **os.environ})
    return runs / name / "pretrain"


def losses(folder: Path) -> dict[str, float]:
    """Nats per token of the last validation, by language."""
    validation = json.loads((folder / "summary.json").read_text())["validation"]
    return {name.rpartition(".")[2]: found["loss"] for name, found in validation.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of seed 0, which say nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else arguments.seeds
    found = {
        recipe: [losses(train(recipe, seed, arguments.runs, arguments.quick)) for seed in seeds]
        for recipe in ("moe-small", "moe-small-dense")
    }
    results = []
    for code, language in LANGUAGES.items():
        experts, dense = ([one[code] for one in found[recipe]] for recipe in found)
        ours, peer = statistics.mean(experts), statistics.mean(dense)
        results.append({"name": language, "ours": ours, "peer": peer, "unit": "nats/token", "ratio": ours / peer})
        each = ", ".join(f"{a:.4f} against {b:.4f}" for a, b in zip(experts, dense, strict=True))
        print(f"{language:8s} experts {ours:.4f}  dense {peer:.4f}  ratio {ours / peer:.4f}   by seed: {each}")
    print(json.dumps({"benchmark": "moe_twin", "results": results}))


if __name__ == "__main__":
    main()

"""What a linear probe finds in BYOL's features of the digits, over several trainings: a table and a line for programs.

    python benchmarks/byol_probe.py [--quick] [--seeds N] [--runs DIR]

Every seed is a whole run of the recipe `byol-digits`: its own split into training and held-out images, first weights,
batches, views, and draws of labels. The peers are the untrained encoder (the same architecture, the weights that
training began with) and the pixels, judged by the same probe on the same images. Errors are standard errors of the mean
over seeds; `gain` is the mean of the differences within a seed. With `--quick` two seeds are trained for 60 steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PEERS = {"random": "untrained encoder", "pixels": "pixels"}
QUICK = ("pretrain.steps=60", "probe.draws=2")


def run(runs: Path, seed: int, quick: bool) -> dict:
    """The probe of one run: {labels per class, None for all: {features: {accuracy, stderr}}}."""
    name = f"byol-digits-{'quick-' if quick else ''}{seed}"
    settings = (f"name={name}", f"seed={seed}", *(QUICK if quick else ()))
    command = [sys.executable, "-c", "from affinage.cli import main; main()", "run", "byol-digits", "--runs", str(runs)]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={"JAX_PLATFORMS": "cpu", **os.environ})
    found = json.loads((runs / name / "probe" / "result.json").read_text())["probe"]
    return {one["labels_per_class"]: one["scores"] for one in found}


def mean(values: list[float]) -> dict:
    """Mean and its standard error."""
    return {"mean": statistics.fmean(values), "stderr": statistics.stdev(values) / len(values) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    probes = [run(options.runs, seed, options.quick) for seed in range(2 if options.quick else options.seeds)]
    results = []
    print(f"accuracy on held-out digits in percent, {len(probes)} seeds, mean ± standard error")
    for per_class in probes[0]:
        labels = "all labels" if per_class is None else f"{per_class} labels per class"
        of = {who: [probe[per_class][who]["accuracy"] for probe in probes] for who in ("trained", *PEERS)}
        shown = [f"{who} {100 * (m := mean(x))['mean']:.2f} ± {100 * m['stderr']:.2f}" for who, x in of.items()]
        print(f"{labels:<22}{', '.join(shown)}")
        ours = mean(of["trained"])
        for peer, name in PEERS.items():
            other = mean(of[peer])
            gain = mean([a - b for a, b in zip(of["trained"], of[peer], strict=True)])
            results.append(
                {
                    "name": f"{labels}, against {name}",
                    "ours": ours["mean"],
                    "ours_stderr": ours["stderr"],
                    "peer": other["mean"],
                    "peer_stderr": other["stderr"],
                    "gain": gain["mean"],
                    "gain_stderr": gain["stderr"],
                    "unit": "share of held-out digits",
                    "ratio": ours["mean"] / other["mean"],
                }
            )
    print(json.dumps({"benchmark": "byol_probe", "results": results}))


if __name__ == "__main__":
    main()

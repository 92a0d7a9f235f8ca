"""CPU seconds to read a recipe, build its graph and analyse it: parameters, FLOPs, bytes kept under each remat policy.

    python benchmarks/graph_build.py [--quick]

Nothing is allocated, so a model of 340 billion parameters takes no longer than one of 600 million. The peer is the
limit of 2 seconds that planning is to stay under.
"""

import argparse
import json
import time
from statistics import median

from affinage.config.load import load_recipe
from affinage.model import parse
from affinage.model.analysis import analyse, parameters
from affinage.planning.estimate import activations

LIMIT = 2.0  # seconds
CONTEXT = 2048


def seconds(recipe: str) -> tuple[float, int]:
    """CPU seconds of the whole way from the file, and the model's parameters."""
    start = time.process_time()
    loaded = load_recipe(recipe)
    graph = parse(loaded.recipe.model, loaded.locate)
    count = parameters(graph).total
    analyse(graph, 1, CONTEXT)
    for policy in ("none", "dots", "block", "full"):
        activations(graph, 1, CONTEXT, policy)
    return time.process_time() - start, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once instead of five times")
    repeats = 1 if parser.parse_args().quick else 5
    results = []
    seconds("fax-124m")  # what is done once in a process
    for recipe in ("julian-600m", "fax-16384"):
        measured = [seconds(recipe) for _ in range(repeats)]
        took, count = median(each for each, _ in measured), measured[0][1]
        print(f"{recipe}: {count:,} parameters, {took:.2f} s")
        result = {"name": f"{recipe}, {count / 1e9:.1f}B parameters", "ours": took, "peer": LIMIT, "unit": "CPU s"}
        results.append(result | {"ratio": took / LIMIT})
    print(json.dumps({"benchmark": "graph_build", "results": results}))


if __name__ == "__main__":
    main()

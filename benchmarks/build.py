"""CPU seconds from a recipe to an analyzed graph, and to compile a step by its depth.

    python benchmarks/build.py [--quick]

analysis: read a recipe, build its graph, count parameters and FLOPs. Nothing is
allocated, so a model of 340 billion parameters takes no longer than one of 600 million; the peer is the limit of two
seconds that planning is to stay under.
depth: compile the gradient of 72 and of 18 layers. A scan compiles one layer whatever the depth, so that the ratio is
to stay below 1.2.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from twins import Size, graph_of

from affinage.config.load import load_recipe
from affinage.model import ApplyConfig, abstract_params, apply, parse
from affinage.model.analysis import analyze, parameters

LIMIT = 2.0  # seconds
SEQ_LEN = 2048


def analysis(recipe: str) -> tuple[float, int]:
    """CPU seconds of the whole way from the file, and the model's parameters."""
    start = time.process_time()
    loaded = load_recipe(recipe)
    graph = parse(loaded.recipe.model, loaded.locate)
    count = parameters(graph).total
    analyze(graph, 1, SEQ_LEN)
    return time.process_time() - start, count


def compilation(layers: int) -> float:
    """CPU seconds to trace, lower and compile a gradient; nothing is run or allocated."""
    graph = parse(graph_of("llama", Size(256, 1024, 4, layers, 32000, 512, 2), scan=True))

    def loss(params: Any, batch: Any) -> jax.Array:
        total: jax.Array = apply(graph, params, batch, ApplyConfig(compute_dtype=jnp.bfloat16)).values[graph.loss].sum
        return total

    batch = {"tokens": jax.ShapeDtypeStruct((2, 512), jnp.int32)}
    jax.clear_caches()
    start = time.process_time()
    jax.jit(jax.grad(loss)).lower(abstract_params(graph), batch).compile()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once instead of five times")
    repeats = 1 if parser.parse_args().quick else 5
    results = []
    analysis("fax-124m"), compilation(2)  # what is done once in a process
    for recipe in ("julian-600m", "fax-16384"):
        measured = [analysis(recipe) for _ in range(repeats)]
        name = f"{recipe}, {measured[0][1] / 1e9:.1f}B parameters"
        results.append((name, median(seconds for seconds, _ in measured), LIMIT))
    deep, shallow = (median(compilation(layers) for _ in range(repeats)) for layers in (72, 18))
    results.append(("72 layers against 18", deep, shallow))
    lines = [{"name": name, "ours": a, "peer": b, "unit": "CPU s", "ratio": a / b} for name, a, b in results]
    for line in lines:
        print(f"{line['name']}: {line['ours']:.2f} s, {line['peer']:.2f}: {line['ratio']:.2f}")
    print(json.dumps({"benchmark": "build", "results": lines}))


if __name__ == "__main__":
    main()

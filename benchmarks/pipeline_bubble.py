"""The idle share of a pipeline, measured on forced CPU devices, against (P - 1) / (rounds x M + P - 1).

    python benchmarks/pipeline_bubble.py [--quick] [--width 128]

A device without work computes on what is there, which nothing reads: so a step of M micro-batches of one size costs
(rounds x M + P - 1) ticks of the processor's time. A line through the costs at several M gives the cost of a
micro-batch, and what the step costs beyond M of those is the bubble. CPU seconds, so that other work does not count.
"""

import argparse
import json
import os
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from twins import Size, graph_of

from affinage.model import Call, Graph, abstract_params, apply, init_params, logical_axes, parse
from affinage.parallel import MeshLayout, Pipeline, make_mesh, param_shardings

ROWS, CONTEXT = 4, 128  # of a micro-batch


def model(width: int) -> Graph:
    """Eight Llama-like layers between a small embedding and a small head."""
    return parse(graph_of("llama", Size(width, 4 * width, width // 32, 8, 64, CONTEXT, ROWS), scan=True))


def seconds(graph: Graph, stages: int, rounds: int, parts: int, repeats: int) -> float:
    """CPU seconds of a gradient of `parts` micro-batches, the least of `repeats`."""
    mesh = make_mesh({"pipeline": stages}, jax.devices())
    call = Pipeline(micro_batches=parts, rounds=rounds).adapt(Call(layout=MeshLayout(mesh)))
    shardings = param_shardings(mesh, logical_axes(graph), abstract_params(graph))
    params = jax.device_put(init_params(graph, jax.random.key(0)), shardings)
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (parts * ROWS, CONTEXT), np.int32)}

    def loss(params: Any, batch: Any) -> jax.Array:
        total: jax.Array = apply(graph, params, batch, call).values[graph.loss].sum
        return total

    gradient = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, batch).compile()
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        jax.block_until_ready(gradient(params, batch))
        taken.append(time.process_time() - start)
    return min(taken[1:])


def main() -> None:
    """Print measured and expected idle shares for each number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="fewer micro-batches and repeats")
    arguments = parser.parse_args()
    graph, results = model(arguments.width), []
    parts = (2, 4, 8) if arguments.quick else (4, 8, 16, 32)
    repeats = 2 if arguments.quick else 5
    for stages, rounds in ((2, 1), (4, 1)) if arguments.quick else ((2, 1), (4, 1), (4, 2)):
        counts = [count for count in parts if rounds == 1 or count >= stages]
        times = [seconds(graph, stages, rounds, count, repeats) for count in counts]
        slope, _ = np.polyfit(counts, times, 1)
        for count, taken in zip(counts, times, strict=True):
            idle, expected = 1 - slope * count / taken, (stages - 1) / (rounds * count + stages - 1)
            name = f"P {stages}, M {count}, rounds {rounds}"
            print(f"{name}: {taken:.3f} CPU s, idle {idle:.1%}, (P-1)/(rounds x M+P-1) {expected:.1%}", flush=True)
            result = {"name": name, "ours": idle, "peer": expected, "unit": "share idle", "ratio": idle / expected}
            results.append(result)
    print(json.dumps({"benchmark": "pipeline_bubble", "results": results}))


if __name__ == "__main__":
    main()

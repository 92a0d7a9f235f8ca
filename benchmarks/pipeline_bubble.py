# ruff: noqa: E402 -- the allocator and the core are chosen before JAX is imported
"""The idle share of a pipeline, measured on forced CPU devices, against (P - 1) / (rounds x M + P - 1).

    python benchmarks/pipeline_bubble.py [--quick] [--case STAGES ROUNDS]... [--width 128]

A device without work computes on what is there, which nothing reads: so a step of M micro-batches of one size costs
(rounds x M + P - 1) ticks of the processor's time. A line through the costs at several M gives the cost of a
micro-batch, and what the step costs beyond M of those is the bubble: P - 1 ticks, and what a step costs whatever its
M is. CPU seconds, so that other work does not count, on one core, as two of them slow each other down by more than
the ticks that several rounds save. A case compiles a program for each M; --case, as often as wanted, runs some of them.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from affinage.hardware.devices import prepare

prepare()  # a step keeps its memory, as a training's does: pages given back and taken anew cost a quarter of the time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import numpy as np
from twins import Size, graph_of

from affinage.model import ApplyConfig, Graph, abstract_params, apply, init_params, logical_axes, parse
from affinage.parallel import MeshLayout, Pipeline, make_mesh, param_shardings

ROWS, CONTEXT = 4, 128  # of a micro-batch


def model(width: int) -> Graph:
    """Eight Llama-like layers between a small embedding and a small head."""
    return parse(graph_of("llama", Size(width, 4 * width, width // 32, 8, 64, CONTEXT, ROWS), scan=True))


def gradient_of(graph: Graph, stages: int, rounds: int, parts: int) -> Callable[[], Any]:
    """Computes a gradient of `parts` micro-batches."""
    mesh = make_mesh({"pipeline": stages}, jax.devices())
    config = Pipeline(micro_batches=parts, rounds=rounds).adapt(ApplyConfig(layout=MeshLayout(mesh)))
    shardings = param_shardings(mesh, logical_axes(graph), abstract_params(graph))
    params = jax.device_put(init_params(graph, jax.random.key(0)), shardings)
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (parts * ROWS, CONTEXT), np.int32)}

    def loss(params: Any, batch: Any) -> jax.Array:
        total: jax.Array = apply(graph, params, batch, config).values[graph.loss].sum
        return total

    gradient = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, batch).compile()
    return lambda: jax.block_until_ready(gradient(params, batch))


def seconds(gradient: Callable[[], Any], repeats: int) -> float:
    """CPU seconds of a gradient, the least of `repeats` one after the other: in turns, each would find cold memory."""
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        gradient()
        taken.append(time.process_time() - start)
    return min(taken[1:])


def main() -> None:
    """Print measured and expected idle shares for each number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="fewer cases, micro-batches and repeats")
    parser.add_argument(
        "--case", type=int, nargs=2, action="append", metavar=("STAGES", "ROUNDS"), help="this one only"
    )
    arguments = parser.parse_args()
    graph, results = model(arguments.width), []
    counts, repeats = ((2, 4, 8), 2) if arguments.quick else ((4, 8, 16), 3)
    cases = [(2, 1), (4, 1)] if arguments.quick else [(2, 1), (2, 2), (4, 1), (4, 2)]
    for stages, rounds in arguments.case or cases:
        possible = [count for count in counts if count % stages == 0]
        times = [seconds(gradient_of(graph, stages, rounds, count), repeats) for count in possible]
        slope, rest = np.polyfit(possible, times, 1)
        for count, taken in zip(possible, times, strict=True):
            idle, expected = 1 - slope * count / taken, (stages - 1) / (rounds * count + stages - 1)
            name = f"P {stages}, M {count}, rounds {rounds}"
            print(f"{name}: {taken:.3f} CPU s, idle {idle:.1%}, (P-1)/(rounds x M+P-1) {expected:.1%}", flush=True)
            result = {"name": name, "ours": idle, "peer": expected, "unit": "share idle", "ratio": idle / expected}
            results.append(result | {"cpu_seconds": round(taken, 4)})
        print(f"P {stages}, rounds {rounds}: {rest * rounds / slope:.2f} ticks without work, P-1 is {stages - 1}")
    print(json.dumps({"benchmark": "pipeline_bubble", "results": results}))


if __name__ == "__main__":
    main()

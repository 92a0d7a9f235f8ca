"""CPU seconds to compile a training step's gradient at 18 and at 72 layers, as a scan and unrolled.

    python benchmarks/compile_depth.py [--quick] [--width 256] [--unrolled]

A scan compiles one layer whatever the depth; the two times should be within 20 % of each other. The peer of 72 layers
are the 18.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from twins import Size, graph_of

from affinage.model import Call, abstract_params, apply, parse

DEPTHS = (18, 72)


def seconds(layers: int, width: int, scan: bool) -> float:
    """CPU seconds of tracing, lowering and compiling, whatever else the machine does; nothing is run or allocated."""
    graph = parse(graph_of("llama", Size(width, 4 * width, width // 64, layers, 32000, 512, 2), scan=scan))

    def loss(params: Any, batch: Any) -> jax.Array:
        total: jax.Array = apply(graph, params, batch, Call(compute_dtype=jnp.bfloat16)).values[graph.loss].sum
        return total

    batch = {"tokens": jax.ShapeDtypeStruct((2, 512), jnp.int32)}
    jax.clear_caches()
    start = time.process_time()
    jax.jit(jax.grad(loss)).lower(abstract_params(graph), batch).compile()
    return time.process_time() - start


def main() -> None:
    """Print a line for each depth, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="once instead of five times")
    parser.add_argument("--unrolled", action="store_true", help="also without a scan, which takes long")
    arguments = parser.parse_args()
    results = []
    seconds(2, arguments.width, True)  # what is done once in a process
    for scan in (True, False) if arguments.unrolled else (True,):
        times = [
            [seconds(depth, arguments.width, scan) for depth in DEPTHS] for _ in range(1 if arguments.quick else 5)
        ]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        name = "scan" if scan else "unrolled"
        for depth, median in zip(DEPTHS, medians, strict=True):
            print(f"{name} {depth} layers: {median:.2f} s")
        result = {"name": f"{name}, 72 layers against 18", "ours": medians[1], "peer": medians[0], "unit": "CPU s"}
        results.append(result | {"ratio": medians[1] / medians[0]})
    print(json.dumps({"benchmark": "compile_depth", "results": results}))


if __name__ == "__main__":
    main()

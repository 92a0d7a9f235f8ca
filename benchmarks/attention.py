"""Milliseconds of attention, forward and backward, by every implementation that this machine has.

    python benchmarks/attention.py [--quick]

The peer is `jax.nn.dot_product_attention(implementation="xla")` with the same mask. Each result and gradient is first
compared with it: rows of one document, of four, and of more documents than a GPU's call makes room for. A kernel that
let packed documents see each other would end this with an error.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from affinage.model.apply_config import Layout, local_capability
from affinage.model.layers.attention_ops import IMPLEMENTATIONS, Workload, attention, obstacles

TOLERANCE = 0.05  # largest difference over the largest value, in bfloat16


def arrays(rows: int, length: int, heads: int, kv_heads: int, width: int, dtype: Any) -> list[Any]:
    """Query, key and value."""
    random = np.random.default_rng(0)
    shapes = [(rows, length, count, width) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def documents(rows: int, length: int, number: int) -> Any:
    """Segments int32 [rows, length] of this many documents a row, other ones in every row."""
    random = np.random.default_rng(1)
    cuts = np.stack([np.sort(random.choice(np.arange(1, length), number - 1, replace=False)) for _ in range(rows)])
    return jnp.asarray((np.arange(length)[None, None] >= cuts[..., None]).sum(axis=1), jnp.int32)


def milliseconds(step: Callable[..., Any], given: list[Any], repeats: int) -> float:
    """Median of `repeats` runs after one that compiles."""
    jax.block_until_ready(step(*given))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(*given))
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def differentiated(product: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of the squares of `product`, and its gradient."""
    return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.square(product(*qkv).astype(jnp.float32))), (0, 1, 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, in under a minute on CPUs")
    quick = parser.parse_args().quick
    platform, capability = jax.default_backend(), local_capability()
    small = quick or platform == "cpu"
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    rows, length, heads, kv_heads, width = (2, 256, 4, 2, 64) if small else (8, 2048, 16, 8, 64)
    given = arrays(rows, length, heads, kv_heads, width, dtype)
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    names = [name for name in IMPLEMENTATIONS if name != "auto"]
    missing = {name: obstacles(name, Workload(platform, dtype, width, length, capability)) for name in names}
    results, wrong = [], []
    for number in (1, 4, length // 8):
        segments = None if number == 1 else documents(rows, length, number)
        mask = causal if segments is None else causal & (segments[:, :, None] == segments[:, None, :])

        def theirs(query: Any, key: Any, value: Any, mask: Any = mask) -> Any:
            return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")

        expected = differentiated(theirs)(*given)
        peer = milliseconds(differentiated(theirs), given, 5 if quick else 20)
        for name in names:
            if missing[name]:
                print(f"{name} cannot: {', '.join(missing[name])}")
                continue

            def ours(*qkv: Any, name: str = name, segments: Any = segments, mask: Any = mask) -> Any:
                return attention(*qkv, segments, impl=name, layout=Layout(), mask=mask, capability=capability)

            pairs = zip(jax.tree.leaves(differentiated(ours)(*given)), jax.tree.leaves(expected), strict=True)
            off = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
            took = milliseconds(differentiated(ours), given, 5 if quick else 20)
            print(
                f"{name}, {number} documents a row: {took:.2f} ms, jax.nn {peer:.2f} ms, off by {off:.1e}", flush=True
            )
            wrong += [] if off < TOLERANCE else [f"{name} with {number} documents"]
            results.append(
                {"name": f"{name}, {number} documents", "ours": took, "peer": peer, "unit": "ms", "off": off}
            )
    results = [result | {"ratio": result["ours"] / result["peer"]} for result in results]
    print(json.dumps({"benchmark": "attention", "platform": platform, "results": results}))
    if wrong:
        raise SystemExit(f"computes something else: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

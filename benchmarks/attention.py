"""Milliseconds of attention on packed rows, forward and backward, by every implementation that this machine has.

    python benchmarks/attention.py [--quick]

The peer is `jax.nn.dot_product_attention(implementation="xla")` with the same mask. Each result is first compared with
it, document boundaries included: a kernel that let packed documents see each other would end this with an error.
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

from affinage.model import Call
from affinage.model.kind import Context
from affinage.model.kinds.attention_choice import IMPLEMENTATIONS, Need, obstacles
from affinage.model.kinds.attention_products import attend

TOLERANCE = 0.05  # largest difference over the largest value, in bfloat16


def arrays(rows: int, length: int, heads: int, kv_heads: int, width: int, dtype: Any) -> tuple[list[Any], Any]:
    """Query, key and value, and segments of four documents a row."""
    random = np.random.default_rng(0)
    shapes = [(rows, count, length, width) for count in (heads, kv_heads, kv_heads)]
    cuts = np.sort(random.integers(1, length, (rows, 3)), axis=1)
    segments = (np.arange(length)[None, None] >= cuts[..., None]).sum(axis=1)
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes], jnp.asarray(segments, jnp.int32)


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, in under a minute on CPUs")
    quick = parser.parse_args().quick
    platform = jax.default_backend()
    small = quick or platform == "cpu"
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    rows, length, heads, kv_heads, width = (2, 256, 4, 2, 64) if small else (8, 2048, 16, 8, 64)
    given, segments = arrays(rows, length, heads, kv_heads, width, dtype)
    mask = jnp.tril(jnp.ones((length, length), bool))[None] & (segments[:, :, None] == segments[:, None, :])

    def theirs(query: Any, key: Any, value: Any) -> Any:
        swapped = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
        return jnp.swapaxes(jax.nn.dot_product_attention(*swapped, mask=mask[:, None], implementation="xla"), 1, 2)

    peer, expected = milliseconds(differentiated(theirs), given, 5 if quick else 20), differentiated(theirs)(*given)
    need = Need(platform, dtype, width, length, cached=False, dropout=0.0, softcap=None)
    results = []
    for name in IMPLEMENTATIONS[1:]:
        if wrong := obstacles(name, need):
            print(f"{name} cannot: {', '.join(wrong)}")
            continue
        prepared = {"mask": mask, "segments": segments}
        context = Context(Call(platform=platform, attention=name), {}, prepared=prepared)
        ours = differentiated(lambda *qkv: attend(*qkv, context, dropout=0.0, softcap=None, window=None))  # noqa: B023
        pairs = zip(jax.tree.leaves(ours(*given)), jax.tree.leaves(expected), strict=True)
        off = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
        if not off < TOLERANCE:
            raise SystemExit(f"{name} computes something else: {off:.3g} of the largest value")
        took = milliseconds(ours, given, 5 if quick else 20)
        print(f"{name}: {took:.2f} ms, jax.nn {peer:.2f} ms, largest difference {off:.1e}")
        results.append({"name": f"{name} on {platform}", "ours": took, "peer": peer, "unit": "ms"})
    results = [result | {"ratio": result["ours"] / result["peer"]} for result in results]
    print(json.dumps({"benchmark": "attention", "results": results}))


if __name__ == "__main__":
    main()

"""Milliseconds of attention, forward and backward, by every implementation that this machine has.

    python benchmarks/attention.py [--quick]

The peer is `jax.nn.dot_product_attention(implementation="xla")` with the same mask. Every result and gradient is first
compared with the peer's, for rows of one document, of four, and of more documents than one call of the GPU kernel
holds. A kernel that lets packed documents see each other ends the benchmark with status 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import finish, median_seconds, options_of, result

from affinage.errors import UserError
from affinage.model.apply_config import ApplyConfig
from affinage.model.layers.attention import attention, choose

TOLERANCE = 0.05  # largest difference over the largest value, in bfloat16


def segments_of(rows: int, length: int, documents: int) -> jax.Array:
    """Return segments int32 [rows, length] with the borders of documents at random places."""
    draw = np.random.default_rng(1)
    cuts = np.stack([np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False)) for _ in range(rows)])
    return jnp.asarray((np.arange(length)[None, None] >= cuts[..., None]).sum(axis=1), jnp.int32)


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled sum of squares of a function of query, key and value, with its gradient."""
    return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.square(function(*qkv).astype(jnp.float32))), (0, 1, 2)))


def main() -> None:
    quick = options_of(__doc__).parse_args().quick
    platform = jax.default_backend()
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    small = quick or platform == "cpu"
    rows, length, heads, kv_heads, width = (2, 256, 4, 2, 64) if small else (8, 2048, 16, 8, 64)
    draw, repeats = np.random.default_rng(0), 5 if quick else 20
    qkv = [jnp.asarray(draw.normal(size=(rows, length, n, width)), dtype) for n in (heads, kv_heads, kv_heads)]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    names = []
    for name in ("auto", "xla", "cudnn", "splash"):
        if name != "auto":
            try:
                names.append(choose(ApplyConfig(attention=name), dtype, width, length))
            except UserError as error:
                print(error)

    results = []
    for documents in (1, 4, length // 8):
        segments = None if documents == 1 else segments_of(rows, length, documents)
        mask = causal if segments is None else causal & (segments[:, :, None] == segments[:, None, :])

        def time_and_values(function: Callable[..., Any]) -> tuple[float, list[jax.Array]]:
            compiled = with_gradient(function)
            values = jax.tree.leaves(jax.block_until_ready(compiled(*qkv)))
            return 1000 * median_seconds(lambda: jax.block_until_ready(compiled(*qkv)), repeats), values

        def xla(query: Any, key: Any, value: Any, mask: Any = mask) -> Any:
            return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")

        peer, expected = time_and_values(xla)
        for name in names:

            def ours(*qkv: Any, name: str = name, segments: Any = segments, mask: Any = mask) -> Any:
                return attention(*qkv, segments, name, ApplyConfig(), mask=mask)

            took, values = time_and_values(ours)
            pairs = zip(values, expected, strict=True)
            off = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
            results.append(result(f"{name}, {documents} documents a row", took, "ms", peer, difference=off))
    finish("attention", results, platform=platform)
    if wrong := [line["name"] for line in results if not line["difference"] < TOLERANCE]:
        raise SystemExit(f"these compute something else: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

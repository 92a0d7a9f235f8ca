"""Which implementation computes attention's two products: what each one honours, and which of them is chosen."""

from dataclasses import dataclass
from typing import Any, get_args

import jax.extend
import jax.numpy as jnp

from affinage.errors import UserError
from affinage.model.call import AttentionImplementation
from affinage.model.kinds.attention_kernels import LANES

IMPLEMENTATIONS: tuple[str, ...] = get_args(AttentionImplementation)
# cuDNN is taken only by name: its results have not been compared on a GPU yet (benchmarks/attention.py does it), and
# its backward pass adds in another order every time unless XLA is told to be deterministic.
_FIRST_CHOICE = {"tpu": "splash"}


@dataclass(frozen=True)
class Need:
    """What a call asks of attention. Causality, documents in a row, windows and grouped queries all implementations
    honour, so they are not among it."""

    platform: str  # "cpu", "gpu" or "tpu"
    dtype: Any  # of queries, keys and values
    head_dim: int
    length: int  # tokens in a row
    cached: bool  # keys come from a KV cache
    dropout: float  # of the probabilities; 0 outside of training
    softcap: float | None
    described: bool = False  # a plan's platform, which need not be here: its GPUs are NVIDIA's


def choose(asked: str, need: Need) -> str:
    """The implementation to use: the one that is asked for, or, for `auto`, the platform's own where it can.

    Raises:
        UserError: what is asked for does not exist, or cannot honour what is needed; it never leaves anything out.
    """
    if asked not in IMPLEMENTATIONS:
        raise UserError(
            f"attention implementation {asked!r} is not known", fix=f"There are {_listed(IMPLEMENTATIONS)}."
        )
    if asked == "auto":  # of rows shorter than a kernel's smallest block it would compute padding more than anything
        first = _FIRST_CHOICE.get(need.platform, "xla")
        return first if need.length >= LANES and not obstacles(first, need) else "xla"
    found = obstacles(asked, need)
    if found:
        others = [name for name in IMPLEMENTATIONS if name != "auto" and not obstacles(name, need)]
        raise UserError(
            f"attention by {asked} cannot honour {_listed(found)}",
            where="attention",
            fix=f"{_listed(others)} can; `attention: auto` takes one that can.",
        )
    return asked


def obstacles(name: str, need: Need) -> list[str]:
    """What `name` cannot honour, in words; nothing for `xla`, which honours everything."""
    if name == "xla":
        return []
    wrong = [
        (need.cached, "a KV cache"),
        (need.dropout > 0, f"dropout of {need.dropout:g} of the probabilities"),
    ]
    dtype = jnp.dtype(need.dtype)
    if name == "splash":
        wrong += [
            (need.platform != "tpu", f"a {need.platform}: it is a kernel for TPUs"),
            (dtype not in (jnp.float32, jnp.bfloat16), f"{dtype} (float32 and bfloat16 it can)"),
        ]
    if name == "cudnn":
        wrong += [
            (need.platform != "gpu" or not (need.described or _is_cuda()), f"a {need.platform} without cuDNN"),
            (need.softcap is not None, f"a soft-cap of {need.softcap} on the scores"),
            (dtype not in (jnp.float16, jnp.bfloat16), f"{dtype} (float16 and bfloat16 it can)"),
            (need.head_dim % 8 > 0 or need.head_dim > 128, f"heads of {need.head_dim} (multiples of 8 up to 128)"),
            (need.length % 2 > 0, f"rows of {need.length} tokens (an odd number)"),
        ]
    return [what for is_wrong, what in wrong if is_wrong]


def _is_cuda() -> bool:
    try:
        return "cuda" in jax.extend.backend.get_backend("gpu").platform_version.lower()
    except RuntimeError:  # there is no GPU
        return False


def _listed(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)

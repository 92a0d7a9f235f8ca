"""How one training step is laid out over the devices of the mesh."""

from typing import Literal

from pydantic import Field

from affinage.config.settings import Settings

MeshAxis = Literal["data", "fsdp", "tensor", "expert", "context", "pipeline"]

# What the arrays of a model have along their dimensions; `affinage.parallel.sharding` says where each one is used.
# fmt: off
LogicalAxis = Literal[
    "batch", "sequence", "residual", "keys", "width", "expert_rows", "embed", "heads", "kv_heads", "head_dim", "ffn",
    "vocab", "experts", "layers",
]
# fmt: on

# What a transformer block computes on its way, in that order.
ActivationName = Literal["block_input", "query", "key", "value", "attended", "ffn_up", "ffn_gate", "ffn_hidden"]


class RematSettings(Settings):
    """Activations of a block that wait for the backward pass, by name; all others are computed again there."""

    keep: tuple[ActivationName, ...] = ()
    """Activations that stay in the accelerator's memory."""


RematPreset = Literal["none", "dots", "block"]
Remat = RematPreset | RematSettings


class ParallelSettings(Settings):
    """How the work is split over the mesh. Nothing here changes what a step computes beyond rounding."""

    sharding: dict[LogicalAxis, tuple[MeshAxis, ...]] = {}
    """Lines that replace those of the sharding table: mesh axes of a logical axis."""
    context_attention: Literal["all_gather", "ring"] = "all_gather"
    """How the parts of a sequence see each other's keys."""
    pipeline_micro_batches: int | None = Field(default=None, ge=1)
    """Parts of the batch in the pipeline, a multiple of its stages; by default the most that divide it, up to 4 for
    each stage."""
    pipeline_rounds: int = Field(default=1, ge=1)
    """Times that each part passes the stages: more make the bubble smaller, and the traffic larger."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it. none: nothing; dots: in a block all but results of
    its matrix products; block: all but a block's input. `affinage plan --search` chooses."""
    xla_flags: dict[str, bool | int | str] = {}
    """Options of XLA by their names, besides those of `affinage.parallel.strategy`."""

"""How one training step is laid out over the devices of the mesh."""

from typing import Literal

from pydantic import Field, model_validator

from affinage.config.settings import Settings

MeshAxis = Literal["data", "fsdp", "tensor", "expert", "context", "pipeline"]

# What the arrays of a model have along their dimensions; `affinage.parallel.sharding` says where each one is used.
LogicalAxis = Literal[
    "batch",
    "sequence",
    "residual",
    "keys",
    "width",
    "expert_rows",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "experts",
    "layers",
]


# What a transformer block computes on its way, in that order.
ActivationName = Literal["block_input", "query", "key", "value", "attended", "ffn_up", "ffn_gate", "ffn_hidden"]


class RematSettings(Settings):
    """Which activations of a block wait for the backward pass, by name; all others are computed again there."""

    keep: tuple[ActivationName, ...] = ()
    """Stay in the accelerator's memory."""
    offload: tuple[ActivationName, ...] = ()
    """Wait in the host's memory; not on CPUs."""

    @model_validator(mode="after")
    def _once(self) -> "RematSettings":
        twice = set(self.keep) & set(self.offload)
        if twice:
            raise ValueError(f"`{sorted(twice)[0]}` cannot be both kept and offloaded")
        return self


RematPreset = Literal["none", "dots", "block", "full"]
Remat = RematPreset | RematSettings
RematChoice = Remat | Literal["auto"]  # auto: as the planner says for the devices


class ParallelSettings(Settings):
    """Beside the mesh, how the work is split. Nothing here changes what a step computes beyond rounding."""

    sharding: dict[LogicalAxis, tuple[MeshAxis, ...]] = {}
    """Replaces lines of the sharding table."""
    context_attention: Literal["all_gather", "ring"] = "all_gather"
    """How the parts of a sequence see each other's keys."""
    pipeline_micro_batches: int | None = Field(default=None, ge=1)
    """In the pipeline at once; default: as many as divide the rows, up to 4 x its stages."""
    pipeline_rounds: int = Field(default=1, ge=1)
    """Times each goes round the stages; more: smaller bubble, more talk."""
    remat: RematChoice = "none"
    """What the backward pass computes again in place of keeping it. none: nothing; dots: in a block all but the results
    of its matrix products; block: all but a block's input; full: all but the inputs of blocks and other nodes. auto:
    the first of these that by the planner's estimate fits the devices; before `full`, block inputs go to the host."""
    xla_flags: dict[str, bool | int | str] = {}
    """Options for XLA, by their names, beside those of `affinage.hardware.xla_flags`."""

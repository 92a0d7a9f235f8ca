"""What would make a training fit that does not: each proposal is estimated before it is made."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from affinage.errors import UserError
from affinage.planning.local import Split
from affinage.planning.memory import Memory, step_memory
from affinage.training.frozen import frozen_of
from affinage.training.layerwise import check_update

if TYPE_CHECKING:
    from affinage.planning.plan import Plan

_OF_A_GPU = 0.92  # of its memory that JAX may well be given; the rest is for libraries of kernels and collectives
_TRIES = 3  # numbers of micro-batches that are estimated one by one, a second or two each
NOTHING = "take more or larger devices, or split the layers with `--set mesh.tensor=N`"


def remedy(plan: "Plan") -> str:
    """The first of a few changes by which the estimate stays below the capacity, as `--set` takes it; else NOTHING."""
    chip = plan.where.chip
    if plan.where.platform == "gpu" and plan.memory.total <= _OF_A_GPU * (chip.memory_bytes or 0):
        return f"it would with XLA_CLIENT_MEM_FRACTION={_OF_A_GPU} in the environment of the run and of this plan"
    for settings, split in _ways(plan):
        memory = _estimate(split, plan)
        if memory is None:
            continue
        if memory.total <= plan.capacity:
            return f"{' and '.join(settings)} would fit"
        parts = _parts_that_fit(split, memory, plan)
        if parts is not None:
            rows = split.rows // parts // split.row_parts
            at_once = f"{rows} row{'s' if rows > 1 else ''} at a time on a device"
            all_of_them = [*settings, f"`--set {plan.section}.gradient_accumulation_steps={parts}`"]
            return f"{' and '.join(all_of_them)} would fit, with {at_once}"
    return NOTHING


def _ways(plan: "Plan") -> Iterator[tuple[list[str], Split]]:
    """Settings beside micro-batches, from what slows a step least to what slows it most; the plan's own first."""
    settings: list[str] = []
    split = plan.split
    if plan.memory.state > plan.capacity / 2 and split.sizes["data"] > 1:
        sizes = {**split.sizes, "data": 1, "fsdp": split.sizes["fsdp"] * split.sizes["data"]}
        split = replace(split, sizes=sizes)
        settings = [f"`--set mesh.data=1 --set mesh.fsdp={sizes['fsdp']}`, which splits the weights,"]
    elif plan.memory.state > plan.capacity:
        return
    yield settings, split
    if split.parallel.remat not in ("block", "full"):
        parallel = split.parallel.model_copy(update={"remat": "block"})
        yield [*settings, "`--set parallel.remat=block`"], replace(split, parallel=parallel)


def _parts_that_fit(split: Split, memory: Memory, plan: "Plan") -> int | None:
    """The least number of micro-batches that fits, or nearly so; None where even one row at a time does not."""
    rows, now = split.rows // split.row_parts, split.micro_batches
    more = [n for n in range(now + 1, rows + 1) if rows % n == 0]
    room = plan.capacity - (memory.total - memory.transient)
    enough = [n for n in more if memory.transient * now / n <= room]  # if it all shrank with the rows

    def fits(parts: int) -> bool:
        found = _estimate(replace(split, micro_batches=parts), plan)
        return found is not None and found.total <= plan.capacity

    if not enough or not fits(enough[-1]):
        return None
    return next((parts for parts in enough[:_TRIES] if fits(parts)), enough[-1])


def _estimate(split: Split, plan: "Plan") -> Memory | None:
    """Memory of the plan's training, split so; None where a run would refuse that."""
    settings = plan.settings.model_copy(update={"gradient_accumulation_steps": split.micro_batches})
    try:
        split.check(settings.attention)
        check_update(frozen_of(split.graph, settings), settings, in_stages=split.stages > 1)
        return step_memory(split, settings, plan.where.chip, plan.where.platform)
    except UserError:
        return None

"""`parallel.remat: auto`: the least that must be computed again for a training step to fit its devices."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from affinage.config.parallel import Remat, RematSettings
from affinage.config.training import TrainSettings
from affinage.hardware.chips import Chip, chip
from affinage.hardware.slices import cpu, memory_text
from affinage.model import Graph
from affinage.planning.estimate import step_memory
from affinage.planning.per_device import PerDevice
from affinage.training.layerwise import LAYERWISE_REMAT

if TYPE_CHECKING:
    import jax

    from affinage.config.parallel import ParallelSettings
    from affinage.parallel import MeshLayout

ROOM = 0.9  # of a device's memory that the estimate may take
# What is computed again, from nothing to most; inputs of blocks can wait in the host's memory if there is another.
LADDER: tuple[Remat, ...] = ("none", "dots", "block", RematSettings(offload=("block_input",)), "full")


@dataclass(frozen=True)
class Choice:
    """The setting that `auto` stands for, and the bytes of a device that it needs (estimated) and that there are."""

    remat: Remat
    needed: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the estimate leaves some room."""
        return self.needed <= ROOM * self.capacity

    def __str__(self) -> str:
        remat = self.remat
        setting = remat if isinstance(remat, str) else remat.model_dump(mode="json", exclude_defaults=True)
        why = "the least that fits" if self.fits else "nothing fits; this needs least"
        return f"remat: {setting} ({why}: {memory_text(self.needed)} of {memory_text(self.capacity)}, estimated)"


def choose_remat(device: PerDevice) -> Choice:
    """The first setting of the ladder whose estimate stays below 90 % of a device's memory.

    If the memory is not known nothing is computed again. Layers that are updated one by one leave no choice.
    """
    capacity = device.chip.memory_per_device or 0
    choices = []
    for remat in (LAYERWISE_REMAT,) if device.settings.optimizer_in_backward else LADDER:
        if device.platform == "cpu" and not isinstance(remat, str):
            continue
        parallel = device.parallel.model_copy(update={"remat": remat})
        needed = step_memory(dataclasses.replace(device, parallel=parallel)).total
        choices.append(Choice(remat, needed, capacity))
        if not capacity or choices[-1].fits:
            return choices[-1]
    return min(choices, key=lambda choice: choice.needed)


def remat_for_devices(
    graph: Graph,
    settings: TrainSettings,
    parallel: "ParallelSettings",
    layout: "MeshLayout",
    rows: int,
    context: int,
) -> Choice:
    """The same for the devices of a mesh that are here. All hosts take what the first of them chose."""
    import jax
    from jax.experimental import multihost_utils

    devices = list(layout.mesh.devices.flat)
    sizes = dict(layout.mesh.shape)
    device = PerDevice(graph, settings, sizes, rows, context, parallel, present(devices), devices[0].platform)
    choice = choose_remat(device)
    if jax.process_count() > 1:
        index = int(multihost_utils.broadcast_one_to_all(np.int32(LADDER.index(choice.remat))))
        choice = dataclasses.replace(choice, remat=LADDER[index])
    return choice


def present(devices: Sequence["jax.Device"]) -> Chip:
    """The chip of these devices, with the memory that they report if the table does not know it."""
    first = devices[0]
    if first.platform == "cpu":
        here = [device for device in devices if device.process_index == first.process_index]
        return dataclasses.replace(cpu(), usable_bytes=(cpu().usable_bytes or 0) // len(here))
    known = chip(first.device_kind)
    if known.memory_per_device is None or first.platform == "gpu":
        limit = (first.memory_stats() or {}).get("bytes_limit")
        return known if limit is None else dataclasses.replace(known, usable_bytes=limit)
    return known

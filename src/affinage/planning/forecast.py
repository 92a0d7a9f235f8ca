"""What the planner says of a training on the devices that it runs on, or ran on."""

from collections.abc import Mapping
from dataclasses import dataclass

from affinage.config.parallel import ParallelSettings
from affinage.config.training import TrainSettings
from affinage.errors import UserError
from affinage.hardware.slices import slice_of
from affinage.model import Graph
from affinage.parallel.mesh import AXES
from affinage.planning.local import lay_out
from affinage.planning.memory import Memory, step_memory
from affinage.planning.phases import phases
from affinage.planning.plan import measured
from affinage.planning.roofline import StepTime, step_time


@dataclass(frozen=True)
class Forecast:
    """Of one device and one step.

    Attributes:
        memory: bytes by what they are for.
        time: seconds by node.
        phases: seconds of forward, loss, backward and optimizer.
    """

    memory: Memory
    time: StepTime
    phases: dict[str, float]


def forecast(
    graph: Graph,
    settings: TrainSettings,
    parallel: ParallelSettings,
    *,
    rows: int,
    context: int,
    mesh: Mapping[str, int],
    device_kind: str,
    devices: int,
) -> Forecast | None:
    """The estimate for a training of language, as `affinage plan` makes it.

    A processor is one device, however many JAX was told to see in it: they share its cores. How fast it is is measured
    now, in seconds of its own: the estimate is for an idle one.

    Args:
        graph: the model.
        settings: of the training.
        parallel: how it is split beside the mesh.
        rows: of a step.
        context: tokens of a row.
        mesh: devices along its axes.
        device_kind: as JAX calls it.
        devices: how many.

    Returns:
        None for chips that the table does not know and slices that do not exist.
    """
    where = slice_of(device_kind, devices)
    if where is None:
        return None
    where = measured(where)
    sizes = {axis: mesh.get(axis, 1) for axis in AXES} if where.platform != "cpu" else {"data": 1}
    settings = settings.model_copy(update={"batch_size": rows, "per_device_batch_size": None})
    try:
        split = lay_out(graph, settings, dict(sizes), context, where.devices, parallel)
    except UserError:
        return None
    memory = step_memory(split, settings, where.chip, where.platform)
    time = step_time(split, settings, where, memory)
    return Forecast(memory, time, phases(time, graph.loss))

"""What one device of a mesh runs, as a value that equal devices share: tracing it is most of the work of a plan."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from affinage.config.parallel import ParallelSettings
from affinage.config.training import TrainSettings
from affinage.hardware.chips import Chip
from affinage.model import Graph, parse
from affinage.parallel.mesh import AXES
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.planning.device import DeviceLayout
from affinage.planning.experts import of_one_owner
from affinage.planning.local import Split
from affinage.training.trainer import compute_dtype


@dataclass(frozen=True)
class Part:
    """The step of one device: its model, rows and settings, written out so that they can be compared and hashed.

    Attributes:
        graph_text: JSON of the model that the device multiplies with, the experts of all owners in it.
        settings_class: of the training's settings.
        settings_text: their JSON.
        parallel_text: JSON of what is recomputed, and of how a pipeline and a ring run.
        rows: of a micro-batch.
        context: tokens of a row that it has.
        dtype: that matrices are multiplied in; of a chip nothing else is in its program.
        platform: that it is compiled for.
        stages: of a pipeline; `rows` and the model are those of all of them.
        owners: devices that the experts lie on.
        neighbours: devices that the positions of a row lie on.
    """

    graph_text: str
    settings_class: type[TrainSettings]
    settings_text: str
    parallel_text: str
    rows: int
    context: int
    dtype: str
    platform: str
    stages: int = 1
    owners: int = 1
    neighbours: int = 1

    @cached_property
    def graph(self) -> Graph:
        """The model that the device multiplies with."""
        return of_one_owner(parse(json.loads(self.graph_text)), self.owners)

    @property
    def layout(self) -> DeviceLayout:
        """What is split is in the shapes; a pipeline's program says itself what one of its stages does."""
        sizes = tuple(self.stages if axis == STAGES else 1 for axis in AXES)
        mesh = AbstractMesh(sizes, AXES, (AxisType.Auto,) * len(AXES))
        return DeviceLayout(mesh, owners=self.owners, neighbours=self.neighbours)  # type: ignore[arg-type]

    @cached_property
    def settings(self) -> TrainSettings:
        """Of the training."""
        return self.settings_class.model_validate_json(self.settings_text)

    @cached_property
    def parallel(self) -> ParallelSettings:
        """What is recomputed, and how a pipeline and a ring run; the rest is as by default."""
        return ParallelSettings.model_validate_json(self.parallel_text)


def part_of(split: Split, settings: TrainSettings, chip: Chip, platform: str) -> Part:
    """The part of every device of a split; they are equal."""
    asked: dict[str, Any] = {"remat": split.parallel.remat}
    if split.stages > 1:
        settings = settings.model_copy(update={"attention": "xla"})  # what a pipeline has
        asked |= {"pipeline_rounds": split.parallel.pipeline_rounds, "pipeline_micro_batches": split.pipeline_parts}
    neighbours = split.parts("sequence")
    if neighbours > 1:
        asked["context_attention"] = split.parallel.context_attention
    return Part(
        graph_text=split.local_text,
        settings_class=type(settings),
        settings_text=settings.model_dump_json(),
        parallel_text=ParallelSettings(**asked).model_dump_json(),
        rows=split.local_rows,
        context=split.local_context,
        dtype=str(compute_dtype(settings.precision, chip)),
        platform=platform,
        stages=split.stages,
        owners=split.owners,
        neighbours=neighbours,
    )

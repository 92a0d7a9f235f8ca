"""What one device of a mesh runs, as a value that equal devices share: tracing it is most of the work of a plan."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from affinage.hardware.chips import Chip
from affinage.model import Graph, parse
from affinage.planning.local import Split
from affinage.recipe.parallel import ParallelSettings
from affinage.recipe.training import TrainSettings


@dataclass(frozen=True)
class Part:
    """The step of one device: its model, rows and settings, written out so that they can be compared and hashed.

    Attributes:
        graph_text: JSON of the model that the device multiplies with.
        settings_class: of the training's settings.
        settings_text: their JSON.
        parallel_text: JSON of what is recomputed.
        rows: of a micro-batch.
        context: tokens of a row.
        chip: that computes it.
        platform: that it is compiled for.
        stages: of a pipeline; `rows` and the model are those of all of them.
    """

    graph_text: str
    settings_class: type[TrainSettings]
    settings_text: str
    parallel_text: str
    rows: int
    context: int
    chip: Chip
    platform: str
    stages: int = 1

    @cached_property
    def graph(self) -> Graph:
        """The model that the device multiplies with."""
        return parse(json.loads(self.graph_text))

    @cached_property
    def settings(self) -> TrainSettings:
        """Of the training."""
        return self.settings_class.model_validate_json(self.settings_text)

    @cached_property
    def parallel(self) -> ParallelSettings:
        """What is recomputed, and how a pipeline runs; the rest is as by default."""
        return ParallelSettings.model_validate_json(self.parallel_text)


def part_of(split: Split, settings: TrainSettings, chip: Chip, platform: str) -> Part:
    """The part of every device of a split; they are equal."""
    asked: dict[str, Any] = {"remat": split.parallel.remat}
    if split.stages > 1:
        settings = settings.model_copy(update={"attention": "xla"})  # what a pipeline has
        asked |= {"pipeline_rounds": split.parallel.pipeline_rounds, "pipeline_micro_batches": split.pipeline_parts}
    return Part(
        graph_text=json.dumps(split.local_graph.to_dict(), sort_keys=False),
        settings_class=type(settings),
        settings_text=settings.model_dump_json(),
        parallel_text=ParallelSettings(**asked).model_dump_json(),
        rows=split.local_rows,
        context=split.local_context,
        chip=chip,
        platform=platform,
        stages=split.stages,
    )

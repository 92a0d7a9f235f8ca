"""Scaling on paper: the same training on ever larger slices of one family."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.hardware.slices import Slice, find_slice
from affinage.model import Graph
from affinage.planning.local import lay_out
from affinage.planning.plan import Plan, make_plan, training_settings
from affinage.planning.roofline import least_time
from affinage.training.frozen import frozen_of
from affinage.training.layerwise import check_remat, check_update

_TENSOR, _CONTEXT = (1, 2, 4, 8), (1, 2, 4, 8)
MOST_CHIPS = 4096


@dataclass(frozen=True)
class Point:
    """A slice on the curve; `efficiency` is tokens/s a chip, of those of the smallest slice on which it fits."""

    plan: Plan
    efficiency: float

    @property
    def why(self) -> str:
        """What a step's seconds are, in percent: products, memory, links that are waited for, stages that wait."""
        parts = {"compute": 0.0, "memory": self.plan.time.update + self.plan.time.adding, "links": 0.0}
        for node in self.plan.time.nodes:
            parts["links"] += node.exposed
            parts[node.bound if node.bound != "links" or node.hidden > node.exposed else "compute"] += (
                node.seconds - node.exposed
            )
        if self.plan.time.bubble:
            parts["bubble"] = self.plan.time.bubble
        return ", ".join(f"{name} {part / self.plan.time.seconds:.0%}" for name, part in parts.items())


def curve(recipe: Recipe, graph: Graph, kind: Literal["weak", "strong"], first: Slice) -> list[Point]:
    """The recipe on `first` and on slices of twice, four times, ... its chips, up to 4,096.

    Strong scaling keeps the batch, weak scaling the rows of a device. On each slice it is the fastest of the recipe's
    own mesh and those of `fsdp` beside up to 8 devices of `tensor` and of `context`, among those that fit; slices on
    which none does are left out.

    Raises:
        UserError: where it fits none, for settings that go with no mesh, and for a processor, of which there are no
            slices.
    """
    if first.platform == "cpu":
        raise UserError(
            "a curve goes over ever larger slices, and a processor has none",
            where="--curve",
            fix="Say with which it begins, such as --on v4-32 or --on h100x8.",
        )
    name, settings, _ = training_settings(recipe)
    check_remat(settings, recipe.parallel.remat)
    check_update(frozen_of(graph, settings), settings, in_stages=False)
    rows = settings.batch_size or (settings.per_device_batch_size or 1) * first.devices
    plans = []
    for where in _larger(first):
        batch = rows if kind == "strong" else rows * where.devices // first.devices
        sized = settings.model_copy(update={"batch_size": batch, "per_device_batch_size": None})
        best = _fastest(recipe.model_copy(update={name: sized}), graph, where)
        if best is not None:
            plans.append(best)
    if not plans:
        raise UserError(
            f"{recipe.name} fits no slice from {first.name} on",
            where="--curve",
            fix="Set more micro_batches or `parallel.remat=block`.",
        )
    base = plans[0].tokens_per_second / plans[0].where.chips
    return [Point(made, made.tokens_per_second / made.where.chips / base) for made in plans]


def _larger(first: Slice) -> Iterator[Slice]:
    if first.platform == "gpu":  # h100 or h100x8
        family, joint, count = first.name.partition("x")[0], "x", first.devices
    else:
        family, joint, number = first.name.rpartition("-")
        count = int(number)
    while True:
        try:
            where = find_slice(f"{family}{joint}{count}")
        except UserError:  # no shape of that size, or the family ends
            return
        if where.chips > MOST_CHIPS:
            return
        yield where
        count *= 2


def _fastest(recipe: Recipe, graph: Graph, where: Slice) -> Plan | None:
    own: dict[str, int | str] = {str(axis): size for axis, size in recipe.mesh.items()}
    meshes = [own]
    for tensor, context in itertools.product(_TENSOR, _CONTEXT):
        meshes.append({"fsdp": "auto", "tensor": tensor, "context": context})
    _, settings, length = training_settings(recipe)
    least = "none" if recipe.parallel.remat == "auto" else recipe.parallel.remat
    parallel = recipe.parallel.model_copy(update={"remat": least})
    bounds: list[tuple[float, int, Recipe]] = []
    for number, mesh in enumerate(meshes):
        try:
            split = lay_out(graph, settings, mesh, length, where.devices, parallel)
            bound = least_time(split, settings, where, 0.0)
        except UserError:
            continue
        bounds.append((bound, number, recipe.model_copy(update={"mesh": mesh})))
    best: Plan | None = None
    for bound, _, changed in sorted(bounds, key=lambda entry: entry[:2]):
        if best is not None and best.time.seconds <= bound:
            break  # none of the others can be faster
        try:
            made = make_plan(changed, graph, where)
        except UserError:
            continue
        if made.fits and (best is None or made.time.seconds < best.time.seconds):
            best = made
    return best

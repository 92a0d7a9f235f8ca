"""Scaling on paper: the same training on ever larger slices of one family."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.hardware.slices import Slice, find_slice
from affinage.model import Graph
from affinage.planning.per_device import PerDevice, per_device
from affinage.planning.plan import Plan, make_plan, training_settings
from affinage.planning.search import bound
from affinage.training.frozen import split_params
from affinage.training.layerwise import check_remat, check_update

_TENSOR, _CONTEXT = (1, 2, 4, 8), (1, 2, 4, 8)
MOST_CHIPS = 4096


@dataclass(frozen=True)
class Point:
    """A slice on the curve; `efficiency` is tokens/s a chip, relative to the smallest slice that fits."""

    plan: Plan
    efficiency: float

    @property
    def why(self) -> str:
        """What a step's seconds go to, in percent."""
        time = self.plan.time
        return ", ".join(f"{name} {part / time.seconds:.0%}" for name, part in time.parts.items() if part)


def curve(recipe: Recipe, graph: Graph, kind: Literal["weak", "strong"], first: Slice) -> list[Point]:
    """The recipe on `first` and on slices of twice, four times, ... its chips, up to 4,096.

    Strong scaling keeps the batch, weak scaling the rows of a device. Each slice takes the fastest of the recipe's own
    mesh and those of `fsdp` beside up to 8 devices of `tensor` and of `context` that fit; slices without one are left
    out.

    Raises:
        UserError: if it fits none, for settings that go with no mesh, and for a processor, which has no slices.
    """
    if first.platform == "cpu":
        raise UserError(
            "a curve goes over ever larger slices, and a processor has none",
            where="--curve",
            fix="Name the first of them, such as --on v4-32 or --on h100x8.",
        )
    name, settings, _ = training_settings(recipe)
    check_remat(settings, recipe.parallel.remat)
    check_update(split_params(graph, settings), settings, in_stages=False)
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
            fix=f"Set more `{name}.gradient_accumulation_steps` or `parallel.remat=block`.",
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
    """The fastest mesh that fits, best first by what it cannot stay below."""
    _, settings, length = training_settings(recipe)
    least = "none" if recipe.parallel.remat == "auto" else recipe.parallel.remat
    parallel = recipe.parallel.model_copy(update={"remat": least})
    meshes: list[dict[str, int | str]] = [{str(axis): size for axis, size in recipe.mesh.items()}]
    meshes += [{"fsdp": "auto", "tensor": t, "context": c} for t, c in itertools.product(_TENSOR, _CONTEXT)]
    bounds: list[tuple[float, int, Recipe]] = []
    wholes: dict[str, PerDevice] = {}
    for number, mesh in enumerate(meshes):
        try:
            device = per_device(graph, settings, mesh, length, where, parallel)
            bounds.append((bound(device, where, wholes), number, recipe.model_copy(update={"mesh": mesh})))
        except UserError:
            continue
    best: Plan | None = None
    for least_seconds, _, changed in sorted(bounds, key=lambda entry: entry[:2]):
        if best is not None and best.time.seconds <= least_seconds:
            break  # none of the others can be faster
        made = make_plan(changed, graph, where)
        if made.fits and (best is None or made.time.seconds < best.time.seconds):
            best = made
    return best

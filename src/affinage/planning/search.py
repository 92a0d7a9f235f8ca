"""The fastest meshes, micro-batches and recomputation of a training on a slice, and on ever larger slices."""

import itertools
import json
import math
import re
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from affinage.config.recipe import Recipe
from affinage.config.training import RematPreset
from affinage.errors import UserError
from affinage.hardware.chips import Slice, find_slice
from affinage.model import Graph
from affinage.parallel.sharding import AXES
from affinage.planning.estimate import step_time
from affinage.planning.per_device import PerDevice, per_device
from affinage.planning.plan import NEARLY_FULL, Plan, make_plan, training_settings
from affinage.training.layerwise import LAYERWISE_REMAT, check_update
from affinage.training.state import split_params
from affinage.training.trainer import rows_per_step

REMATS: tuple[RematPreset, ...] = ("none", "dots", "block")  # from what keeps most to what keeps least
MOST_MICRO_BATCHES = 64
MOST_STAGES = 16  # of a pipeline: more wait longer than other axes do
MOST_CHIPS = 4096  # of a curve
# By how much a step must be faster for twice as many micro-batches, which have costs that the estimate does not know.
_MORE_MICRO_BATCHES = 1.01
_BOUND = 0.98  # of the bound below: the parts of a divided step can be a little cheaper than its share of the whole

Order = tuple[Any, ...]


@dataclass(frozen=True)
class Candidate:
    """Settings that a search chooses: devices along each axis, parts of a batch, and what is recomputed."""

    mesh: tuple[int, ...]
    micro_batches: int
    remat: RematPreset

    @property
    def sizes(self) -> dict[str, int]:
        """Axes of more than one device, `data` if there is none."""
        return {a: n for a, n in zip(AXES, self.mesh, strict=True) if n > 1} or {"data": 1}

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        """As the recipe has them. Mappings are merged there, so axes that only the recipe names become 1."""
        mesh = dict.fromkeys(map(str, recipe.mesh), 1) | self.sizes
        training = {"gradient_accumulation_steps": self.micro_batches}
        return {"mesh": mesh, "parallel": {"remat": self.remat}, recipe.trainings[0]: training}

    def overrides(self, recipe: Recipe) -> list[str]:
        """The settings for `--set`."""
        return [f"{section}={json.dumps(values)}" for section, values in self.settings(recipe).items()]

    def put_into(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings."""
        changed = self.settings(recipe)
        sections = {key: getattr(recipe, key).model_copy(update=changed[key]) for key in changed if key != "mesh"}
        return recipe.model_copy(update={"mesh": self.sizes} | sections)

    def keeps_all_of(self, other: "Candidate") -> bool:
        """Whether it needs as much memory in every respect: a mesh that is the same, no more parts, no other remat."""
        keeps = self.micro_batches <= other.micro_batches and REMATS.index(self.remat) <= REMATS.index(other.remat)
        # Only the gradients of several micro-batches are summed in arrays of their own.
        return self.mesh == other.mesh and keeps and (self.micro_batches > 1 or other.micro_batches == 1)


def search(
    recipe: Recipe, graph: Graph, where: Slice, count: int = 3, progress: Callable[[str], None] = lambda _: None
) -> tuple[list[tuple[Candidate, Plan]], int, int]:
    """The `count` fastest settings that take at most 90 % of a device's memory, or else that fit, best first.

    Candidates are estimated in the order of a time that they cannot stay below, until the best are known: the result is
    the same as if all had been estimated. Twice the micro-batches must save 1 %. A sharding table of the recipe's is
    kept, and so are the rounds and micro-batches of its pipeline. UserError: nothing fits, or nothing divides.

    Returns the best, the number of candidates, and of those that were estimated in full.
    """
    _, settings, _ = training_settings(recipe)
    whole = settings.model_copy(update={"gradient_accumulation_steps": 1})
    check_update(split_params(graph, settings), whole, in_stages=False)  # what no candidate could change
    progress(f"the ways to split {recipe.name} over {where.name}")
    queue: list[tuple[Order, Candidate]] = []
    wholes: dict[str, PerDevice] = {}  # steps of one device with all rows at once
    for candidate, device in candidates(recipe, graph, where):
        if candidate.remat not in wholes:
            wholes[candidate.remat] = replace(device, settings=whole, sizes=dict.fromkeys(AXES, 1))
        # No step stays below its share of the whole one's operations, with its own collectives and bubble.
        least = _BOUND * step_time(device, whole=wholes[candidate.remat]).seconds
        queue.append((order(candidate, least), candidate))
    queue.sort(key=lambda entry: entry[0])
    estimated = 0
    for share in (NEARLY_FULL, 1.0):
        best: list[tuple[Order, Candidate, Plan]] = []
        refused: list[Candidate] = []
        for bound, candidate in queue:
            if len(best) >= count and best[count - 1][0] <= bound:
                break  # none of the others can be faster
            if any(candidate.keeps_all_of(other) for other in refused):
                continue
            plan, estimated = make_plan(candidate.put_into(recipe), graph, where), estimated + 1
            progress(f"{estimated} estimated in full, of {len(queue):,} ways")
            if plan.memory.total <= share * plan.capacity:
                insort(best, (order(candidate, plan.time.seconds), candidate, plan), key=lambda entry: entry[0])
            else:
                refused.append(candidate)
        if best:
            return [(candidate, plan) for _, candidate, plan in best[:count]], len(queue), estimated
    what = f"none of {len(queue)} ways to split {recipe.name} over {where.name} fits"
    if not queue:
        what = f"no mesh of {where.name} divides {recipe.name}, or its weights and moments alone fill each device"
    fix = "Take more or larger devices, or a smaller model; `affinage plan --which` compares slices."
    raise UserError(what, where="--search", fix=fix)


def candidates(recipe: Recipe, graph: Graph, where: Slice) -> Iterator[tuple[Candidate, PerDevice]]:
    """Those that divide, and whose weights and moments alone do not fill a device."""
    _, settings, seq_len = training_settings(recipe)
    # Layers that are updated one by one are one program with all of them.
    remats = (LAYERWISE_REMAT,) if settings.optimizer_in_backward else REMATS
    rows = rows_per_step(settings, where.devices)
    micro_batches = [n for n in range(1, min(rows, MOST_MICRO_BATCHES) + 1) if rows % n == 0]
    divisors = [n for n in range(1, where.devices + 1) if where.devices % n == 0]
    layers = [node.layers for node in graph.nodes if node.repeat is not None]
    stages = [n for n in divisors if layers and n <= MOST_STAGES and not any(each % n for each in layers)]
    experts = divisors if "experts" in str(graph.parameters) else [1]
    choices = dict.fromkeys(AXES, divisors) | {"pipeline": stages or [1], "expert": experts}
    meshes = (sizes for sizes in itertools.product(*choices.values()) if math.prod(sizes) == where.devices)
    for mesh, parts in itertools.product(meshes, micro_batches):
        split = Candidate(mesh, parts, "none").put_into(recipe)
        try:
            device = per_device(graph, training_settings(split)[1], split.mesh, seq_len, where, split.parallel)
            fits = device.bytes_of(device.state) <= (where.chip.memory_per_device or 0)
        except UserError:
            continue
        for remat in remats if fits else ():
            parallel = split.parallel.model_copy(update={"remat": remat})
            yield Candidate(mesh, parts, remat), replace(device, parallel=parallel)


def order(candidate: Candidate, seconds: float) -> Order:
    """Seconds with what a difference within the estimate's error must outweigh, then what is simpler."""
    return (
        seconds * _MORE_MICRO_BATCHES ** math.log2(candidate.micro_batches),
        REMATS.index(candidate.remat),
        sum(size > 1 for size in candidate.mesh),
        tuple(reversed(candidate.mesh)),
        candidate.micro_batches,
    )


# ---- curves ----


def curve(recipe: Recipe, graph: Graph, kind: Literal["weak", "strong"], first: Slice) -> list[tuple[Plan, float]]:
    """The recipe on `first` and on slices of twice, four times, ... its chips, up to 4,096.

    Strong scaling keeps the batch, weak scaling the rows of a device. Each slice takes the fastest of the recipe's own
    mesh and those of `fsdp` beside up to 8 devices of `tensor`; slices on which none fits are left out. With each plan
    comes its tokens/s a chip, relative to the smallest slice. UserError: nothing fits, or `first` is a processor.
    """
    if first.platform == "cpu":
        fix = "Name the first of them, such as --on v4-32 or --on h100x8."
        raise UserError("a curve goes over ever larger slices, and a processor has none", where="--curve", fix=fix)
    name, settings, _ = training_settings(recipe)
    meshes: list[Any] = [recipe.mesh, *({"fsdp": "auto", "tensor": size} for size in (1, 2, 4, 8))]
    rows, plans = rows_per_step(settings, first.devices), []
    refused = UserError(f"{recipe.name} fits no slice from {first.name} on", where="--curve")
    where: Slice | None = first
    while where is not None and where.chips <= MOST_CHIPS:
        batch = rows if kind == "strong" else rows * where.devices // first.devices
        sized = settings.model_copy(update={"batch_size": batch, "per_device_batch_size": None})
        fitting = []
        for mesh in meshes:
            try:
                plan = make_plan(recipe.model_copy(update={name: sized, "mesh": mesh}), graph, where)
                fitting += [plan] if plan.fits else []
            except UserError as error:
                refused = error
        plans += sorted(fitting, key=lambda plan: plan.time.seconds)[:1]
        where = _twice(where)
    if not plans:
        raise refused
    base = plans[0].tokens_per_second / plans[0].where.chips
    return [(plan, plan.tokens_per_second / plan.where.chips / base) for plan in plans]


def _twice(where: Slice) -> Slice | None:
    """The slice of twice the size: v4-16 after v4-8, h100x2 after h100; None where the family ends."""
    sized = re.fullmatch(r"(.+[-x])(\d+)", where.name)
    try:
        return find_slice(f"{sized[1]}{2 * int(sized[2])}" if sized else f"{where.name}x2")
    except UserError:
        return None

"""The fastest ways to split a training over a slice: meshes x micro-batches x recomputation x dtype of the moments.

Stages of a pipeline are an axis of the mesh like the others.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import yaml

from affinage.config.recipe import Recipe
from affinage.config.training import TrainSettings
from affinage.errors import UserError
from affinage.hardware.slices import Slice
from affinage.model import Graph
from affinage.parallel.mesh import AXES
from affinage.planning.local import Split, lay_out, state_bytes
from affinage.planning.plan import NEARLY_FULL, Plan, make_plan, measured, training_settings
from affinage.planning.roofline import least_time, time_of_nodes
from affinage.planning.wires import wires
from affinage.training.frozen import frozen_of
from affinage.training.layerwise import LAYERWISE_REMAT, check_update
from affinage.training.state import abstract_state
from affinage.training.trainer import optimizer_of

REMATS = ("none", "dots", "block", "full")  # from what keeps most to what keeps least
MOMENTS = ("float32", "bfloat16")
MOST_PARTS = 64  # micro-batches
MOST_STAGES = 16  # of a pipeline: more wait longer than other axes do
# By how much a step must be faster for other moments than the recipe's, which change its result, and for twice as many
# micro-batches, which have costs that the estimate does not know.
_FOREIGN_MOMENTS, _MORE_PARTS = 1.02, 1.01


@dataclass(frozen=True)
class Candidate:
    """Settings that a search chooses.

    Attributes:
        mesh: devices along each axis, all six.
        micro_batches: parts of a batch.
        remat: preset of what is recomputed.
        moments: dtype that the optimizer's moments are stored in.
    """

    mesh: tuple[int, ...]
    micro_batches: int
    remat: str
    moments: str

    @property
    def sizes(self) -> dict[str, int]:
        """Axes of more than one device, `data` where there is none."""
        return {a: n for a, n in zip(AXES, self.mesh, strict=True) if n > 1} or {"data": 1}

    def settings(self, section: str) -> dict[str, Any]:
        """As a recipe has them, for its training `section`."""
        training = {"gradient_accumulation_steps": self.micro_batches, "optimizer": {"state_dtype": self.moments}}
        return {"mesh": self.sizes, "parallel": {"remat": self.remat}, section: training}

    def lines(self, recipe: Recipe, section: str) -> str:
        """The YAML to paste into the recipe; axes that only the recipe names become 1."""
        settings = self.settings(section) | {"mesh": self._mesh_over(recipe)}
        return yaml.safe_dump(settings, sort_keys=False, default_flow_style=None).rstrip()

    def _mesh_over(self, recipe: Recipe) -> dict[str, int]:
        """The mesh as a mapping that is laid over the recipe's own, as mappings of recipes are."""
        return {**dict.fromkeys(map(str, recipe.mesh), 1), **self.sizes}

    def overrides(self, recipe: Recipe, section: str) -> list[str]:
        """For `--set`; axes that only the recipe names become 1."""
        mesh = ", ".join(f"{axis}: {size}" for axis, size in self._mesh_over(recipe).items())
        return [
            f"mesh={{{mesh}}}",
            f"parallel.remat={self.remat}",
            f"{section}.gradient_accumulation_steps={self.micro_batches}",
            f"{section}.optimizer.state_dtype={self.moments}",
        ]

    def put_into(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings."""
        name, settings, _ = training_settings(recipe)
        optimizer = settings.optimizer.model_copy(update={"state_dtype": self.moments})
        training = settings.model_copy(
            update={"gradient_accumulation_steps": self.micro_batches, "optimizer": optimizer}
        )
        parallel = recipe.parallel.model_copy(update={"remat": self.remat})
        return recipe.model_copy(update={"mesh": self.sizes, "parallel": parallel, name: training})


@dataclass(frozen=True)
class Found:
    """What a search came to: the best first; how many there were to choose from, and were estimated in full."""

    best: tuple[tuple[Candidate, Plan], ...]
    candidates: int
    estimated: int


def search(
    recipe: Recipe, graph: Graph, where: Slice, count: int = 3, progress: Callable[[str], None] = lambda _: None
) -> Found:
    """The `count` fastest settings that fit, by the estimate.

    Candidates are looked at in the order of a time that they cannot stay below, the most promising ones closer, until
    the best are known: what comes out is the same as if all had been estimated. Other moments than the recipe's must
    save 2 %, twice the micro-batches 1 %; equals are put in order by what recomputes less and has the simpler mesh.

    A sharding table of the recipe's is kept, and so are the rounds and micro-batches of its pipeline.
    `progress` is told in words what is being done.

    Raises:
        UserError: where nothing fits, and for settings that go with no way to split.
    """
    _, settings, _ = training_settings(recipe)
    whole = settings.model_copy(update={"gradient_accumulation_steps": 1})
    check_update(frozen_of(graph, settings), whole, in_stages=False)  # what no candidate could change
    where = measured(where)
    progress(f"the ways to split {recipe.name} over {where.name}")
    tried = list(candidates(recipe, graph, where))
    progress(f"the fastest that fit of {len(tried):,} ways")
    estimated = 0
    for share in (NEARLY_FULL, 1.0):
        best, looked = _best(recipe, graph, where, tried, share, count)
        estimated += looked
        if best:
            return Found(tuple(best), len(tried), estimated)
    what = f"nothing fits: none of {len(tried)} ways to split {recipe.name} over {where.name}"
    if not tried:
        what = f"nothing fits: weights and moments of {recipe.name} alone are more than a device of {where.name} holds"
        if next(candidates(recipe, graph, where, fitting=False), None) is None:
            what = f"no mesh of {where.name} divides {recipe.name}: its batch, its context, its layers or its heads"
    raise UserError(
        what,
        where="--search",
        fix="Take more or larger devices, or a smaller model; `affinage plan --which` compares slices.",
    )


@dataclass(frozen=True)
class Tried:
    """A candidate as far as it divides."""

    candidate: Candidate
    split: Split
    settings: TrainSettings
    updated: int  # bytes of a device that an update reads and writes


Order = tuple[Any, ...]


def order(candidate: Candidate, seconds: float, settings: TrainSettings) -> Order:
    """Seconds with what a difference within the estimate's error must outweigh, then what is simpler."""
    foreign = candidate.moments != settings.optimizer.state_dtype
    return (
        seconds * (_FOREIGN_MOMENTS if foreign else 1.0) * _MORE_PARTS ** math.log2(candidate.micro_batches),
        REMATS.index(candidate.remat),
        sum(size > 1 for size in candidate.mesh),
        tuple(reversed(candidate.mesh)),
        candidate.micro_batches,
        candidate.moments,
    )


def _best(
    recipe: Recipe, graph: Graph, where: Slice, tried: list[Tried], share: float, count: int
) -> tuple[list[tuple[Candidate, Plan]], int]:
    """Best first search: what comes first in the queue is looked at more closely, or is the next best."""
    _, own, _ = training_settings(recipe)
    queue: list[tuple[Order, int, int, Plan | None]] = []  # order, how closely looked at, index
    for index, one in enumerate(tried):
        bound = least_time(one.split, one.settings, where, one.updated)
        queue.append((order(one.candidate, bound, own), 0, index, None))
    heapq.heapify(queue)
    found: list[tuple[Candidate, Plan]] = []
    too_large: list[Candidate] = []
    looked = 0
    while queue and len(found) < count:
        _, closely, index, made = heapq.heappop(queue)
        one = tried[index]
        if made is not None:
            found.append((one.candidate, made))
        elif any(_needs_more(one.candidate, refused) for refused in too_large):
            continue
        elif closely == 0:
            bound = time_of_nodes(one.split, one.settings, where, one.updated)
            heapq.heappush(queue, (order(one.candidate, bound, own), 1, index, None))
        else:
            made, looked = make_plan(one.candidate.put_into(recipe), graph, where), looked + 1
            if made.memory.total > share * made.capacity:
                too_large.append(one.candidate)
            else:
                heapq.heappush(queue, (order(one.candidate, made.time.seconds, own), 2, index, made))
    return found, looked


def _needs_more(candidate: Candidate, refused: Candidate) -> bool:
    """Whether on the same mesh `candidate` keeps no less in any respect than what did not fit."""
    return (
        candidate.mesh == refused.mesh
        and candidate.micro_batches <= refused.micro_batches
        # Only the gradients of several parts are summed up in arrays of their own.
        and (candidate.micro_batches > 1 or refused.micro_batches == 1)
        and REMATS.index(candidate.remat) <= REMATS.index(refused.remat)
        and MOMENTS.index(candidate.moments) <= MOMENTS.index(refused.moments)
    )


def candidates(recipe: Recipe, graph: Graph, where: Slice, *, fitting: bool = True) -> Iterator[Tried]:
    """Those that divide, and, if `fitting`, whose weights and moments alone do not fill a device."""
    _, settings, context = training_settings(recipe)
    if all(name != "tokens" for name, _ in graph.inputs):
        context = 1
    capacity = where.chip.memory_per_device or 0
    # Layers that are updated one by one are one program with all of them.
    remats: tuple[str, ...] = (LAYERWISE_REMAT,) if settings.optimizer_in_backward else REMATS
    for mesh in _meshes(graph, where.devices):
        for parts, moments in itertools.product(_parts(settings, where.devices), MOMENTS):
            sizes = dict(zip(AXES, mesh, strict=True))
            settled = Candidate(mesh, parts, "none", moments).put_into(recipe)
            _, chosen, _ = training_settings(settled)
            try:
                split = lay_out(graph, chosen, sizes, context, where.devices, settled.parallel)
                state, frozen = state_of(split, chosen)
                wires(where, sizes)
            except UserError:
                continue
            if fitting and state > capacity:
                continue
            for remat in remats:
                candidate = Candidate(mesh, parts, remat, moments)
                parallel = candidate.put_into(recipe).parallel
                yield Tried(candidate, replace(split, parallel=parallel), chosen, state - frozen)


def _meshes(graph: Graph, devices: int) -> Iterator[tuple[int, ...]]:
    experts = "experts" in str(graph.parameters)
    repeated = [node.layers for node in graph.nodes if node.repeat is not None]
    searched = [axis for axis in AXES if (axis != "pipeline" or repeated) and (axis != "expert" or experts)]
    for sizes in itertools.product(_divisors(devices), repeat=len(searched)):
        if math.prod(sizes) == devices:
            named = dict(zip(searched, sizes, strict=True))
            stages = named.get("pipeline", 1)
            if stages > MOST_STAGES or any(layers % stages for layers in repeated):
                continue
            yield tuple(named.get(axis, 1) for axis in AXES)


def _parts(settings: TrainSettings, devices: int) -> list[int]:
    rows = settings.batch_size or (settings.per_device_batch_size or 1) * devices
    return [n for n in _divisors(rows) if n <= MOST_PARTS]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def state_of(split: Split, settings: TrainSettings) -> tuple[int, int]:
    """Bytes of weights and moments on one device, and how many of them no step changes."""
    dtype = jnp.dtype(settings.precision.params)
    held = frozen_of(split.graph, settings)
    state = abstract_state(held, dtype, optimizer_of(held, settings), split.layout)
    return state_bytes(state, split.sizes), state_bytes(state.frozen, split.sizes)

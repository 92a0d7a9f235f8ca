"""The largest model of a width that trains on a slice: proposed by the bytes of its state, decided by the compiler."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.hardware.slices import Slice
from affinage.model.analysis import parameters
from affinage.planning.compiled import CompileReport, compile_on
from affinage.planning.per_device import per_device
from affinage.planning.plan import NOTHING_COUNTED, Counted, Plan, make_plan, planned_graph, training_settings

HEAD = 128  # of attention
_FFN, _FFN_MULTIPLE = 8 / 3, 512  # times the width, rounded up to it: a gated layer with the parameters of 4 x width
_MOST_TENSOR = 64
_STEP = 2  # layers between two models
_SHARE_OF_STATE = 0.92  # of a device's memory, where the first proposal is


@dataclass(frozen=True)
class FaxRow:
    """A line of FAX's table 1: the largest model of a width that it trained on a slice, at batch 1 and length 2,048."""

    parameters: float
    seconds: float  # of a step


FAX = {
    ("v4-16", 5120): FaxRow(13.7e9, 0.87),
    ("v4-128", 10240): FaxRow(86.6e9, 1.52),
    ("v4-512", 16384): FaxRow(340.0e9, 6.21),
}


@dataclass(frozen=True)
class Attempt:
    """A number of layers, and what the compiler reported."""

    layers: int
    parameters: int
    report: CompileReport


@dataclass(frozen=True)
class Capacity:
    """What was tried, in that order, and the largest model that fits.

    Attributes:
        attempts: all of them.
        overrides: settings of the largest, beside the recipe's.
        plan: its estimate, for the time of a step.
    """

    attempts: tuple[Attempt, ...]
    overrides: tuple[str, ...]
    plan: Plan

    @property
    def largest(self) -> Attempt:
        """The one that `plan` is of."""
        return max((one for one in self.attempts if one.report.fits), key=lambda one: one.layers)

    @property
    def fax(self) -> FaxRow | None:
        """FAX's model of this width on this slice."""
        return FAX.get((self.plan.where.name, self.plan.device.graph.shapes["blocks"].width))


def shape(width: int, where: Slice) -> list[str]:
    """The overrides for a model of `width`, heads of 128, and a mesh of `tensor` and, beside it, `fsdp`."""
    if width % HEAD:
        below = max(HEAD, width // HEAD * HEAD)
        fix = f"The nearest widths: {below} or {below + HEAD}."
        raise UserError(f"width {width} has no whole heads of {HEAD}", where="--width", fix=fix)
    heads = width // HEAD
    tensor = math.gcd(math.gcd(heads, where.devices), _MOST_TENSOR)
    ffn = math.ceil(_FFN * width / _FFN_MULTIPLE) * _FFN_MULTIPLE
    blocks = "model.nodes.blocks"
    return [
        f"model.nodes.embed.width={width}",
        f"{blocks}.attention.heads={heads}",
        f"{blocks}.ffn.width={ffn}",
        f"mesh={{fsdp: {where.devices // tensor}, tensor: {tensor}}}",
    ]


def capacity(
    recipe: str,
    overrides: Sequence[str],
    where: Slice,
    *,
    tries: int = 6,
    on_attempt: Callable[[Attempt], None] = lambda _: None,
    counted: Counted = NOTHING_COUNTED,
    compiler: Callable[[str, Sequence[str], Slice, Counted], CompileReport] | None = None,
) -> Capacity:
    """Search the most layers, a multiple of 2, that the slice's compiler lets train.

    Args:
        recipe: with one repeated node called `blocks`.
        overrides: as `shape` gives them, and the user's.
        where: the slice.
        tries: compilations at most; the search ends when the next larger model was refused, or with these.
        on_attempt: called after each compilation.
        counted: see `planned_graph`.
        compiler: compiles; None: the slice's own.

    Raises:
        UserError: if no model was found that fits.
    """
    attempts: list[Attempt] = []
    compile_step = compiler or compile_on
    fixed, per_layer = _state_bytes(recipe, overrides, where, counted)
    room = where.chip.memory_per_device or 0
    layers: int | None = _whole((_SHARE_OF_STATE * room - fixed) / per_layer)
    while layers is not None and len(attempts) < tries:
        settings = [*overrides, f"model.nodes.blocks.repeat={layers}"]
        count = parameters(planned_graph(load_recipe(recipe, settings), counted)).total
        attempts.append(Attempt(layers, count, compile_step(recipe, settings, where, counted)))
        on_attempt(attempts[-1])
        layers = _next(attempts, per_layer, room)
    fitting = [one.layers for one in attempts if one.report.fits]
    if not fitting:
        raise UserError(
            f"none of {', '.join(str(one.layers) for one in attempts)} layers fits {where.name}",
            where="--on",
            fix="Take a larger slice or a smaller width.",
        )
    best = [*overrides, f"model.nodes.blocks.repeat={max(fitting)}"]
    loaded = load_recipe(recipe, best)
    return Capacity(tuple(attempts), tuple(best), make_plan(loaded.recipe, planned_graph(loaded, counted), where))


def _whole(layers: float) -> int:
    return max(_STEP, int(layers // _STEP) * _STEP)


def _next(attempts: list[Attempt], per_layer: float, room: float) -> int | None:
    """Layers to try next: by the peaks that the compiler reported, else in halves; None if the largest is known."""
    low = max((attempt.layers for attempt in attempts if attempt.report.fits), default=0)
    high = min((attempt.layers for attempt in attempts if not attempt.report.fits), default=0)
    if high and high - low <= _STEP:
        return None
    known = [(attempt.layers, attempt.report.peak_bytes) for attempt in attempts if attempt.report.peak_bytes]
    layers = (low + high) / 2 if high else low + _STEP
    if attempts[-1].report.peak_bytes:
        newest, peak = known[-1]
        if len(known) > 1:
            per_layer = max(0.0, (peak - known[-2][1]) / (newest - known[-2][0])) or per_layer
        predicted = newest + (room - peak) / per_layer
        layers = predicted if low <= predicted and not (high and predicted > high) else layers
    return min(max(_whole(layers), low + _STEP), high - _STEP if high else _whole(layers) + low + _STEP)


def _state_bytes(recipe: str, overrides: Sequence[str], where: Slice, counted: Counted) -> tuple[float, float]:
    """Bytes of weights and moments on a device: what does not depend on the layers, and that of one layer."""

    def state(layers: int) -> float:
        loaded = load_recipe(recipe, [*overrides, f"model.nodes.blocks.repeat={layers}"])
        _, settings, context = training_settings(loaded.recipe)
        mesh = {str(axis): size for axis, size in loaded.recipe.mesh.items()}
        graph = planned_graph(loaded, counted)
        device = per_device(graph, settings, mesh, context, where, loaded.recipe.parallel)
        return device.bytes_of(device.state)

    two, four = state(2), state(4)
    return 2 * two - four, (four - two) / 2

"""The largest model of a width that trains on a slice: proposed by the bytes of its state, decided by the compiler."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from affinage.config.load import load_recipe
from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.hardware.slices import Slice
from affinage.model import Graph
from affinage.model.analysis import parameters
from affinage.planning.compiled import CompileReport, compile_on
from affinage.planning.per_device import per_device
from affinage.planning.plan import Plan, make_plan, planned_graph, training_settings

HEAD = 128  # of attention
_FFN, _FFN_MULTIPLE = 8 / 3, 512  # times the width, rounded up to it: a gated layer with the parameters of 4 x width
_MOST_TENSOR = 64
_STEP = 2  # layers between two models
_SHARE_OF_STATE = 0.92  # of a device's memory, where the first proposal is

# FAX's table 1: (slice, width) -> parameters of the largest model that it trained, and seconds of a step, at batch 1
# and length 2,048.
FAX = {("v4-16", 5120): (13.7e9, 0.87), ("v4-128", 10240): (86.6e9, 1.52), ("v4-512", 16384): (340.0e9, 6.21)}


@dataclass(frozen=True)
class Attempt:
    """A number of layers, the model's parameters, and what the compiler reported."""

    layers: int
    parameters: int
    report: CompileReport


@dataclass(frozen=True)
class Capacity:
    """What was tried, in that order, and the largest model that fits."""

    attempts: list[Attempt]  # all of them
    largest: Attempt  # the one with the most layers that fits
    overrides: list[str]  # its settings, beside the recipe's
    plan: Plan  # its estimate, for the time of a step


def shape(width: int, where: Slice) -> list[str]:
    """The overrides for a model of `width`, heads of 128, and a mesh of `tensor` and, beside it, `fsdp`."""
    if width % HEAD:
        fix = f"Take a multiple of {HEAD}, such as {width // HEAD * HEAD + HEAD}."
        raise UserError(f"width {width} has no whole heads of {HEAD}", where="--width", fix=fix)
    heads = width // HEAD
    tensor = math.gcd(math.gcd(heads, where.devices), _MOST_TENSOR)
    ffn = math.ceil(_FFN * width / _FFN_MULTIPLE) * _FFN_MULTIPLE
    return [
        f"model.nodes.embed.width={width}",
        f"model.nodes.blocks.attention.heads={heads}",
        f"model.nodes.blocks.ffn.width={ffn}",
        f"mesh={{fsdp: {where.devices // tensor}, tensor: {tensor}}}",
    ]


def capacity(
    recipe: str,
    overrides: Sequence[str],
    where: Slice,
    *,
    tries: int = 6,
    on_attempt: Callable[[Attempt], None] = lambda _: None,
) -> Capacity:
    """Search the most layers, a multiple of 2, that the slice's compiler lets train.

    Args:
        recipe: with one repeated node called `blocks`.
        overrides: as `shape` gives them, and the user's.
        where: the slice.
        tries: compilations at most; the search ends when the next larger model was refused, or with these.
        on_attempt: called after each compilation.

    Raises:
        UserError: if no model was found that fits.
    """

    def with_layers(layers: int) -> tuple[list[str], Graph, Recipe, float]:
        """The overrides, the model, the recipe, and bytes of weights and moments on a device."""
        settings = [*overrides, f"model.nodes.blocks.repeat={layers}"]
        loaded = load_recipe(recipe, settings)
        _, training, context = training_settings(loaded.recipe)
        graph = planned_graph(loaded)
        device = per_device(graph, training, loaded.recipe.mesh, context, where, loaded.recipe.parallel)
        return settings, graph, loaded.recipe, device.bytes_of(device.state)

    two, four = with_layers(2)[-1], with_layers(4)[-1]
    per_layer, room = (four - two) / 2, where.chip.memory_per_device or 0
    layers: int | None = _whole((_SHARE_OF_STATE * room - (2 * two - four)) / per_layer)
    attempts: list[Attempt] = []
    while layers is not None and len(attempts) < tries:
        settings, graph, *_ = with_layers(layers)
        attempts.append(Attempt(layers, parameters(graph).total, compile_on(recipe, settings, where)))
        on_attempt(attempts[-1])
        layers = _next(attempts, per_layer, room)
    largest = max((each for each in attempts if each.report.fits), key=lambda each: each.layers, default=None)
    if largest is None:
        what = f"none of {', '.join(str(each.layers) for each in attempts)} layers fits {where.name}"
        raise UserError(what, where="--on", fix="Take a larger slice or a smaller width.")
    settings, graph, model, _ = with_layers(largest.layers)
    return Capacity(attempts, largest, settings, make_plan(model, graph, where))


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

"""What the figures of a recipe come to, and which claims about it cannot be true."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from affinage.config.recipe import Claims
from affinage.config.training import TrainSettings
from affinage.hardware.chips import find_slice
from affinage.model import Graph
from affinage.model.analysis import parameters
from affinage.training.state import split_params

COMPUTE_OPTIMAL = 20  # tokens a parameter (Hoffmann et al., 2022)
MANY_EPOCHS = 40  # passes over the same data after which a further one teaches nothing (Muennighoff et al., 2023)
_CLOSE = 0.015  # relative difference that rounding explains
_ROUGHLY = 0.1  # the same for what is computed by rules of thumb
_DAY = 86_400


@dataclass(frozen=True)
class Facts:
    """What follows from a recipe."""

    steps: int
    rows: int  # sequences of a step
    context: int  # tokens of a sequence
    tokens: int  # that the model is trained on
    parameters: int
    active: int  # of the parameters, what one token uses
    tokens_per_parameter: float  # of the active ones
    flops: int  # of the whole training, counted node by node (see `affinage.model.analysis`)
    flops_by_rule: int  # 6 N D (Kaplan et al., 2020), with the active parameters
    data_tokens: int | None  # of the training data, None if they are not known
    epochs: float | None  # passes over the data


def facts_of(graph: Graph, settings: TrainSettings, rows: int, context: int, data_tokens: int | None = None) -> Facts:
    """The figures of a training with `rows` sequences of `context` tokens in a step."""
    steps, total, active = settings.steps, parameters(graph).total, parameters(graph).active
    tokens, flops = steps * rows * context, split_params(graph, settings).step_flops(rows, context) * steps
    epochs = tokens / data_tokens if data_tokens else None
    ratio, by_rule = tokens / active, 6 * active * tokens
    return Facts(steps, rows, context, tokens, total, active, ratio, flops, by_rule, data_tokens, epochs)


def repetition(epochs: float) -> str:
    """Return the advice for a training that reads its data very many times over, "" for others."""
    if epochs <= MANY_EPOCHS:
        return ""
    return f"reads its data {epochs:,.0f} times: it will learn it by heart; give it more text or fewer steps"


@dataclass(frozen=True)
class Contradiction:
    """A claim that cannot be true: its key under `claims`, the figures, and what would make it true."""

    claim: str
    what: str
    reading: str = ""


def contradictions(facts: Facts, claims: Claims) -> Iterator[Contradiction]:
    """Every claim that the recipe, or another claim, contradicts."""
    where = find_slice(claims.slice) if claims.slice else None
    tokens, size = claims.tokens or facts.tokens, claims.parameters or facts.active
    # Sequences of a step that give the claimed tokens: equally many on every device.
    exact, devices = tokens / facts.steps / facts.context, where.devices if where else 1
    unit = devices if exact >= devices else 1
    rows = max(1, round(exact / unit)) * unit
    if not _close(facts.tokens, tokens):
        share = f": {rows // where.devices} on each of the {where.devices} devices of a {where.name}" if where else ""
        made = f"{facts.steps:,} steps × {facts.rows:,} sequences × {facts.context:,} tokens"
        what = f"{made} is {_count(facts.tokens)} tokens, not {_count(tokens)}"
        reading = f"{_count(facts.steps * rows * facts.context)} would be {rows:,} sequences a step{share}"
        yield Contradiction("tokens", what, reading)
    if claims.parameters is not None and not _close(facts.parameters, claims.parameters):
        what = f"the model has {facts.parameters:,} parameters, not {_count(claims.parameters)}"
        yield Contradiction("parameters", what)
    flops = 6 * size * tokens
    written = f"6 × {_count(size)} × {_count(tokens)} = {flops:.2g} FLOP"
    if claims.flops is not None and not _close(flops, claims.flops, _ROUGHLY):
        yield Contradiction("flops", f"6·N·D = {written}, not {claims.flops:.2g}")
    if where is not None and claims.days is not None and claims.mfu is not None and where.chip.bfloat16_flops:
        peak = where.chip.bfloat16_flops * where.chips  # FLOP/s
        implied = flops / (claims.days * _DAY * peak)
        if not _close(implied, claims.mfu, _ROUGHLY):
            needed = f"{flops / (claims.mfu * peak) / _DAY:.2f} days of a {where.name}"
            what = f"{written} at an MFU of {claims.mfu:.0%} take {needed}, not {claims.days:g}"
            reading = f"{claims.days:g} days would be an MFU of {implied:.1%}"
            if not _close(facts.tokens, tokens, _ROUGHLY):
                reading += f", or of {implied * facts.tokens / tokens:.0%} for {_count(facts.tokens)} tokens"
            yield Contradiction("days", what, reading)
    total = sum(claims.sources.values())
    if total and claims.tokens is not None and not claims.epochs and not _close(total, tokens):
        reading = f"{_count(tokens)} would be {tokens / total:.2f} epochs over them"
        yield Contradiction("sources", f"the sources sum to {_count(total)} tokens, not {_count(tokens)}", reading)
    data = total or facts.data_tokens
    if claims.epochs is not None and data and not _close(tokens / data, claims.epochs):
        what = f"{_count(tokens)} tokens are {tokens / data:.2f} epochs over {_count(data)}"
        yield Contradiction("epochs", f"{what}, not {claims.epochs:g}")
    true = "over" if tokens / size > COMPUTE_OPTIMAL else "under"
    for claimed in claims.compute_optimal:
        if claimed != true:
            what = f"{tokens / size:.0f} tokens a parameter are {true} the compute-optimal {COMPUTE_OPTIMAL}"
            yield Contradiction("compute_optimal", f"{what}, not {claimed}")
    of_step = rows * facts.context
    wrong = [point for point in claims.checkpoints if not _close(point.tokens / of_step, point.step, _ROUGHLY)]
    if wrong:
        reached, points = wrong[0].tokens, " and at ".join(f"step {point.step:,}" for point in claims.checkpoints)
        what = f"{_count(reached)} tokens are said to be reached at {points}"
        each = f"{rows:,} × {facts.context:,} tokens a step reach them at step {reached / of_step:,.0f}"
        yield Contradiction("checkpoints", f"{what}; {each}")
    sft = claims.sft
    total = sum(sft.sources.values())
    if sft.examples and total and not _close(total, sft.examples):
        what = f"the sources sum to {_count(total)} examples, not {_count(sft.examples)}"
        yield Contradiction("sft.sources", what)
    if sft.examples and sft.batch_size and sft.steps_per_epoch:
        steps = math.ceil(sft.examples / sft.batch_size)
        if not _close(steps, sft.steps_per_epoch):
            made = f"{_count(sft.examples)} examples at batch {sft.batch_size} are {steps:,} steps an epoch"
            packed = steps / sft.steps_per_epoch
            reading = f"packing {packed:.1f} conversations to a row makes both true" if packed > 1 else ""
            yield Contradiction("sft.steps_per_epoch", f"{made}, not {sft.steps_per_epoch:,}", reading)


def _close(one: float, other: float, tolerance: float = _CLOSE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _count(number: float) -> str:
    """629.1B, 600M: as people write such numbers."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,.0f}"

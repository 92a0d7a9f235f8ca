"""What the figures of a recipe come to, and which claims about it cannot be true."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from affinage.config.claims import Claims
from affinage.config.training import TrainSettings
from affinage.hardware.slices import Slice, find_slice
from affinage.model import Graph
from affinage.model.analysis import parameters
from affinage.training.frozen import frozen_of

COMPUTE_OPTIMAL = 20  # tokens a parameter (Hoffmann et al., 2022)
_CLOSE = 0.015  # relative difference that rounding explains
_ROUGHLY = 0.1  # the same for what is computed by rules of thumb
_DAY = 86_400


@dataclass(frozen=True)
class Facts:
    """What follows from a recipe.

    Attributes:
        steps: updates.
        rows: sequences of a step.
        context: tokens of a sequence.
        parameters: learned numbers.
        active: of these, what one token uses.
        warmup: steps.
        flops: of the whole training, counted node by node (see `affinage.model.analysis`).
        data_tokens: of the training data, None where they are not known.
    """

    steps: int
    rows: int
    context: int
    parameters: int
    active: int
    warmup: int
    flops: int
    data_tokens: int | None

    @property
    def tokens(self) -> int:
        """That the model is trained on."""
        return self.steps * self.rows * self.context

    @property
    def flops_by_rule(self) -> int:
        """6 N D (Kaplan et al., 2020), with the active parameters."""
        return 6 * self.active * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        """Of the active parameters."""
        return self.tokens / self.active

    @property
    def epochs(self) -> float | None:
        """Times that the data are gone through."""
        return self.tokens / self.data_tokens if self.data_tokens else None


def facts_of(graph: Graph, settings: TrainSettings, rows: int, context: int, data_tokens: int | None = None) -> Facts:
    """The figures of a training with `rows` sequences of `context` tokens in a step."""
    count = parameters(graph)
    return Facts(
        steps=settings.steps,
        rows=rows,
        context=context,
        parameters=count.total,
        active=count.active,
        warmup=settings.schedule.warmup(settings.steps),
        flops=frozen_of(graph, settings).step_flops(rows, context) * settings.steps,
        data_tokens=data_tokens,
    )


@dataclass(frozen=True)
class Contradiction:
    """Claims that cannot be true: which, what the figures are, and what would make them true."""

    claim: str  # the key under `claims`
    what: str
    reading: str = ""


def contradictions(facts: Facts, claims: Claims) -> list[Contradiction]:
    """Every claim that the recipe, or another claim, contradicts."""
    where = find_slice(claims.slice) if claims.slice else None
    checks: list[Callable[[Facts, Claims, Slice | None], Iterator[Contradiction]]] = [
        _tokens,
        _parameters,
        _flops,
        _time,
        _device_hours,
        _sources,
        _epochs,
        _optimal,
        _checkpoints,
        _sft_sources,
        _sft_steps,
    ]
    return [found for check in checks for found in check(facts, claims, where)]


def _tokens(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    if claims.tokens is None or _close(facts.tokens, claims.tokens):
        return
    rows = _rows_claimed(facts, claims, where)
    per_device = f": {rows // where.devices} on each of the {where.devices} devices of a {where.name}" if where else ""
    yield Contradiction(
        "tokens",
        f"{facts.steps:,} steps × {facts.rows:,} sequences × {facts.context:,} tokens is {_count(facts.tokens)} "
        f"tokens, not {_count(claims.tokens)}",
        f"{_count(facts.steps * rows * facts.context)} would be {rows:,} sequences a step{per_device}",
    )


def _rows_claimed(facts: Facts, claims: Claims, where: Slice | None) -> int:
    """Sequences of a step that give the claimed tokens: as many on every device."""
    exact = (claims.tokens or facts.tokens) / facts.steps / facts.context
    unit = where.devices if where and exact >= where.devices else 1
    return max(1, round(exact / unit)) * unit


def _parameters(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    if claims.parameters is not None and not _close(facts.parameters, claims.parameters):
        yield Contradiction(
            "parameters", f"the model has {facts.parameters:,} parameters, not {_count(claims.parameters)}"
        )


def _rule(facts: Facts, claims: Claims) -> tuple[float, str]:
    """6 N D of the claimed figures, and how it is written."""
    tokens, size = claims.tokens or facts.tokens, claims.parameters or facts.active
    return 6 * size * tokens, f"6 × {_count(size)} × {_count(tokens)} = {6 * size * tokens:.2g} FLOP"


def _flops(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    total, written = _rule(facts, claims)
    if claims.flops is not None and not _close(total, claims.flops, _ROUGHLY):
        yield Contradiction("flops", f"6·N·D = {written}, not {claims.flops:.2g}")


def _time(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    if where is None or claims.days is None or where.chip.bfloat16_flops is None:
        return
    peak = where.chip.bfloat16_flops * where.chips
    total, written = _rule(facts, claims)
    implied = total / (claims.days * _DAY * peak)
    if claims.mfu is not None and not _close(implied, claims.mfu, _ROUGHLY):
        from_recipe = 6 * (claims.parameters or facts.active) * facts.tokens
        other = from_recipe / (claims.days * _DAY * peak)
        also = "" if _close(from_recipe, total, _ROUGHLY) else f", or of {other:.0%} for {_count(facts.tokens)} tokens"
        yield Contradiction(
            "days",
            f"{written} at an MFU of {claims.mfu:.0%} take {total / (claims.mfu * peak) / _DAY:.2f} days of a "
            f"{where.name}, not {claims.days:g}",
            f"{claims.days:g} days would be an MFU of {implied:.1%}{also}",
        )


def _device_hours(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    if where is None or claims.days is None or claims.device_hours is None:
        return
    hours = claims.days * 24 * where.chips
    if not _close(hours, claims.device_hours):
        what = (
            f"{claims.days:g} days of {where.chips} chips are {hours:,.0f} chip-hours, not {claims.device_hours:,.0f}"
        )
        yield Contradiction("device_hours", what)


def _sources(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    total = sum(claims.sources.values())
    if claims.sources and claims.tokens is not None and not claims.epochs and not _close(total, claims.tokens):
        reading = f"{_count(claims.tokens)} would be {claims.tokens / total:.2f} epochs over them"
        yield Contradiction(
            "sources", f"the sources sum to {_count(total)} tokens, not {_count(claims.tokens)}", reading
        )


def _epochs(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    data = sum(claims.sources.values()) or facts.data_tokens
    tokens = claims.tokens or facts.tokens
    if claims.epochs is not None and data and not _close(tokens / data, claims.epochs):
        what = f"{_count(tokens)} tokens are {tokens / data:.2f} epochs over {_count(data)}, not {claims.epochs:g}"
        yield Contradiction("epochs", what)


def _optimal(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    ratio = (claims.tokens or facts.tokens) / (claims.parameters or facts.active)
    true = "over" if ratio > COMPUTE_OPTIMAL else "under"
    for said in claims.compute_optimal:
        if said != true:
            yield Contradiction(
                "compute_optimal",
                f"{ratio:.0f} tokens a parameter are {true} the compute-optimal {COMPUTE_OPTIMAL}, not {said}",
            )


def _checkpoints(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    of_step = _rows_claimed(facts, claims, where) * facts.context
    wrong = [point for point in claims.checkpoints if not _close(point.tokens / of_step, point.step, _ROUGHLY)]
    if wrong:
        said = " and at ".join(f"step {point.step:,}" for point in claims.checkpoints)
        rows = of_step // facts.context
        yield Contradiction(
            "checkpoints",
            f"{_count(wrong[0].tokens)} tokens are said to be reached at {said}; "
            f"{rows:,} × {facts.context:,} tokens a step reach them at step {wrong[0].tokens / of_step:,.0f}",
        )


def _sft_sources(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    total = sum(claims.sft.sources.values())
    if claims.sft.sources and claims.sft.examples is not None and not _close(total, claims.sft.examples):
        what = f"the sources sum to {_count(total)} examples, not {_count(claims.sft.examples)}"
        yield Contradiction("sft.sources", what)


def _sft_steps(facts: Facts, claims: Claims, where: Slice | None) -> Iterator[Contradiction]:
    sft = claims.sft
    if sft.examples is None or sft.batch_size is None or sft.steps_per_epoch is None:
        return
    steps = math.ceil(sft.examples / sft.batch_size)
    if not _close(steps, sft.steps_per_epoch):
        packed = steps / sft.steps_per_epoch
        reading = f"packing {packed:.1f} conversations to a row makes both true" if packed > 1 else ""
        yield Contradiction(
            "sft.steps_per_epoch",
            f"{_count(sft.examples)} examples at batch {sft.batch_size} are {steps:,} steps an epoch, "
            f"not {sft.steps_per_epoch:,}",
            reading,
        )


def _close(one: float, other: float, tolerance: float = _CLOSE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _count(number: float) -> str:
    """629.1B, 600M: as people write such numbers."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,.0f}"

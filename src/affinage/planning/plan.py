"""A plan: what a training costs on a slice, in memory, time and money, and which claims about it cannot be true."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Claims, Recipe
from affinage.config.training import DpoSettings, ParallelSettings, TrainSettings
from affinage.data.dataloader import DataLoader
from affinage.data_check import never_begun, repetition
from affinage.durations import duration
from affinage.errors import UserError
from affinage.hardware.chips import COMPARED, GiB, Slice, find_slice, memory_text, slice_of
from affinage.model import Graph, parse
from affinage.model.graph import parameters, preference_graph
from affinage.model_check import check_model
from affinage.planning.estimate import Memory, StepTime, step_memory, step_time
from affinage.planning.per_device import PerDevice, per_device
from affinage.planning.trace import padding
from affinage.training.state import split_params

Training = Literal["pretrain", "sft", "dpo"]
Feeds = Callable[[int], DataLoader]  # a training's rows, for a batch size
NEARLY_FULL = 0.9
REMEMBERED = " (remembered in 2025; set hardware.price)"
FITTING = "find settings that fit with --search, or a slice with --which"
_ANSWER = 128  # tokens of a prompt with an answer, before anybody has counted them
_HOUR = 3600
_DAY = 24 * _HOUR
COMPUTE_OPTIMAL = 20  # tokens a parameter (Hoffmann et al., 2022)
# Tokens of a step that learn best grow as D^0.383 with the tokens in all (Bergsma et al., "Power Lines", 2025). The
# point is nanochat's: 2^19 were measured to be best for its 12 layers, which read 1.3e9.
_BEST_STEP, _BEST_FOR, _GROWTH = 2**19, 1.3e9, 0.383
_TOO_LARGE, _TOO_SMALL = 8, 1 / 16  # times that; twice the critical batch of Bergsma et al., and what GPT-2 stays above
_CLOSE = 0.015  # relative difference that rounding explains
_ROUGHLY = 0.1  # the same for what is computed by rules of thumb
_WORTH_A_HINT = 0.03  # share of a step
_SMALL_BATCH = 0.25  # share of a step that does not grow with the batch


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
    flops: int  # of the whole training, counted node by node (see `affinage.model.graph`)
    flops_by_rule: int  # 6 N D (Kaplan et al., 2020), with the active parameters
    data_tokens: int | None  # of the training data, None if they are not known
    epochs: float | None  # passes over the data, of a mixture over the source that is read most often


def facts_of(graph: Graph, settings: TrainSettings, rows: int, context: int, feed: DataLoader | None = None) -> Facts:
    """The figures of a training with `rows` sequences of `context` tokens in a step."""
    steps, total, active = settings.steps, parameters(graph).total, parameters(graph).active
    tokens, flops = steps * rows * context, split_params(graph, settings).step_flops(rows, context) * steps
    epochs = max(feed.epochs(steps).values()) * context / feed.context if feed else None
    data_tokens = sum(shards.facts["tokens"] for shards in feed.shards.values()) if feed else None
    ratio, by_rule = tokens / active, 6 * active * tokens
    return Facts(steps, rows, context, tokens, total, active, ratio, flops, by_rule, data_tokens, epochs)


@dataclass(frozen=True)
class Plan:
    """A training on a slice, estimated."""

    recipe: Recipe
    section: Training  # of the recipe, its first
    where: Slice
    device: PerDevice
    memory: Memory  # of one device
    time: StepTime  # of one step
    facts: Facts
    begun: int  # steps that another training has made, which this one continues
    contradictions: dict[str, str]  # of the recipe's claims, by their keys
    price: float | None  # US dollars per chip and hour, None if it is not known
    capacity: int  # bytes that a program may take on one device
    fits: bool  # the estimate stays below the capacity
    nearly_full: bool  # it fits by less than estimates are sometimes off
    seconds: float  # of the steps that are left; validation, checkpoints and compilation are not in it
    tokens_per_second: float  # of all devices together
    mfu: float | None  # share of the datasheet's bfloat16 peak, by the convention of `affinage.model.graph`
    cost: float | None  # US dollars of these seconds
    cost_per_billion: float | None  # of 1e9 tokens, by which slices compare even if their number decides over the batch
    save_bytes: int  # of one checkpoint of the training

    @property
    def misfit(self) -> str | None:
        """That the estimate exceeds the capacity, by how much, and what to do; None if it fits."""
        excess = memory_text(self.memory.total - self.capacity)
        return None if self.fits else f"does not fit: {excess} too much; {FITTING}"

    @property
    def mesh(self) -> str:
        """The axes of more than one device, in words; "" for one device."""
        return ", ".join(f"{axis} {size}" for axis, size in self.device.sizes.items() if size > 1)

    @property
    def outcome(self) -> str:
        """Speed, time and cost in one line."""
        mfu = "" if self.mfu is None else f", an MFU of {self.mfu:.0%}"
        note = "" if self.price == self.recipe.hardware.price else REMEMBERED
        digits = max(0, 1 - math.floor(math.log10(self.cost or 10)))
        cost = "" if self.cost is None else f", ${self.cost:,.{digits}f} at ${self.price:,.2f} per chip and hour{note}"
        steps = f"for steps {self.begun + 1:,} to {self.facts.steps:,}" if self.begun else "in total"
        return f"{self.tokens_per_second:,.0f} tokens/s{mfu}; {duration(self.seconds)} {steps}{cost}"

    def row(self) -> dict[str, Any]:
        """What a table of plans has of one; JSON-able. What does not fit has no cost."""
        row: dict[str, Any] = {"slice": self.where.name, "chips": self.where.chips, "mesh": self.mesh}
        row |= {"fits": "nearly" if self.nearly_full else "yes" if self.fits else "no"}
        row |= {"memory_gib": self.memory.total / GiB, "of_gib": self.capacity / GiB, "step_time": self.time.seconds}
        row |= {"tokens_per_second": round(self.tokens_per_second), "mfu": self.mfu and round(self.mfu, 2)}
        cost, of_tokens = (self.cost, self.cost_per_billion) if self.fits else (None, None)
        row |= {"hours": self.seconds / _HOUR, "price_per_chip_hour": self.price, "cost": cost}
        return row | {"cost_per_billion_tokens": of_tokens, "bound_by": self.time.bound}

    def brief(self) -> dict[str, Any]:
        """The columns of `row` that fit a terminal beside each other, without speed and cost of what does not fit."""
        row = self.row() | {"GiB": round(self.memory.total / GiB, 1), "tokens": _count(self.facts.tokens)}
        row["mesh"] = self.mesh or "–"
        named = {"hours": "hours", "price": "price_per_chip_hour", "cost": "cost", "per 1B": "cost_per_billion_tokens"}
        made = {"tokens/s": _count(self.tokens_per_second)} | {name: row[key] for name, key in named.items()}
        made |= {} if self.fits else dict.fromkeys({*made} - {"price"})
        return {name: row[name] for name in ("slice", "mesh", "fits", "GiB", "tokens")} | made

    @property
    def warnings(self) -> Iterator[str]:
        """What may go wrong, or could go better, one line each."""
        device, time, unit = self.device, self.time, self.device.matrix_unit
        if self.misfit:
            yield self.misfit
        elif self.nearly_full:
            yield "nearly full: check with the compiler whether it fits, with --compile"
        if self.where.platform == "tpu" and any(node.hidden and node.layers == 1 for node in device.graph.nodes):
            yield "layers without `repeat` took up to a quarter more of a TPU's memory than estimated: see --compile"
        unrolled = any(node.hidden and not node.scans("gpu") for node in device.graph.nodes)
        if self.where.platform == "gpu" and unrolled and device.parallel.remat == "block":
            yield "remat `block` took up to four times the estimated memory on GPUs: set `scan: true` beside `repeat`"
        settings, steps, epochs = getattr(self.recipe, self.section), self.facts.steps, self.facts.epochs
        most = getattr(settings, "num_epochs", None)
        if steps < settings.steps:
            yield f"{self.section} makes {steps:,} of {settings.steps:,} steps: num_epochs: {most:g} allows no more"
        elif most and epochs is None:
            yield f"num_epochs: {most:g} may end {self.section} earlier: its rows have not been made yet"
        if advice := repetition(epochs or 0):
            yield f"{self.section} {advice}"
        if (each := settings.per_device_batch_size) is not None and self.where.name != _own_slice(self.recipe):
            what = f"{each} rows a device are {device.rows} a step here: on other slices the same steps read"
            yield f"{what} other amounts of text. To compare slices, give `{self.section}.batch_size`"
        products = [(op.kind == "pallas_call", op.times * op.flops) for op in device.traced.ops]
        of_kernels = sum(flops for kernel, flops in products if kernel) / max(1.0, sum(flops for _, flops in products))
        for node in device.graph.nodes:
            attention = getattr(node.layer, "attention", None)
            if attention is None or self.where.platform == "cpu":
                continue
            head = attention.head_width(device.graph.shapes[node.inputs[0]].width)
            used = 1 / padding(head, unit)
            if attention.dropout > 0:
                graph = device.graph.to_dict()
                graph["nodes"][node.name]["attention"]["dropout"] = 0.0
                without = dataclasses.replace(device, graph=parse(graph))
                then = f"{step_time(without).seconds:.3g} s and {memory_text(step_memory(without).total)}"
                now = f"{time.seconds:.3g} s and {memory_text(self.memory.total)}"
                what = f"dropout of attention in `{node.name}` costs the kernel: all pairs of tokens are kept"
                yield f"{what}. With `--set model.nodes.{node.name}.attention.dropout=0` a step takes {then}, now {now}"
            elif (share := (1 - used) * of_kernels) > _WORTH_A_HINT:
                what = f"heads of {head} use {used:.0%} of a matrix unit of {unit}"
                yield f"{what}: with fewer, wider heads about {share:.0%} of the products' time is saved"
        for vocab in {vocab for node in device.local_graph.nodes if (vocab := getattr(node.layer, "vocab", None))}:
            if (lost := 1 - 1 / padding(vocab, unit)) > _WORTH_A_HINT:
                what = f"a vocabulary of {vocab:,} does not divide by {unit}, the matrix unit"
                yield f"{what}: {lost:.0%} of the logits' products are lost"
        yield from self._for_learning()
        yield from never_begun(self.recipe, self.section)
        growing = sum(node.compute + node.memory for node in time.nodes)
        fixed = 1 - growing / time.seconds
        if fixed > _SMALL_BATCH and device.stages == 1:
            gain = 2 * time.seconds / (time.seconds + growing) - 1
            yield f"small batch: {fixed:.0%} of a step is its fixed cost; twice the rows give {gain:.0%} more tokens/s"

    def _for_learning(self) -> Iterator[str]:
        """Whether a step of a pretraining that reads as much has far more or fewer tokens elsewhere."""
        tokens, step = self.facts.tokens, self.facts.rows * self.facts.context
        best = _BEST_STEP * (tokens / _BEST_FOR) ** _GROWTH
        usual = f"{_count(step)} tokens a step; about {_count(float(f'{best:.2g}'))} learn best from {_count(tokens)}"
        if self.section == "pretrain" and step > _TOO_LARGE * best:
            yield f"large batch: {usual} (Bergsma et al., 2025): more steps of fewer rows reach a lower loss"
        elif self.section == "pretrain" and step < _TOO_SMALL * best and tokens > _BEST_FOR:
            yield f"few tokens: {usual} (Bergsma et al., 2025): more rows in fewer steps may learn as much"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        where, device = self.where, self.device
        place = {name: getattr(where, name) for name in ("name", "chips", "devices", "hosts", "shape")}
        figures = ("begun", "contradictions", "fits", "tokens_per_second", "mfu", "seconds", "cost", "save_bytes")
        return {
            "recipe": self.recipe.name,
            "stage": self.section,
            "slice": place | {"chip": where.chip.name},
            "mesh": {axis: size for axis, size in device.sizes.items() if size > 1} or {"data": 1},
            "rows": device.rows,
            "micro_batches": device.micro_batches,
            "remat": device.parallel.model_dump(mode="json")["remat"],
            "context": device.seq_len,
            "facts": dataclasses.asdict(self.facts),
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total, "capacity": self.capacity},
            "step": dataclasses.asdict(self.time),
            "price_per_chip_hour": self.price,
            "cost_per_billion_tokens": self.cost_per_billion,
            **{name: getattr(self, name) for name in figures},
            "warnings": [*self.warnings],
        }


def training_settings(recipe: Recipe) -> tuple[Training, TrainSettings, int]:
    """The training that a recipe is planned for, its first, and the tokens of a row; UserError: it trains nothing."""
    if not recipe.trainings:
        raise UserError("this recipe trains nothing", fix="Add a `pretrain:` section.")
    settings = getattr(recipe, recipe.trainings[0])
    name: Any = recipe.trainings[0]
    return name, settings, getattr(settings, "seq_len", None) or recipe.packing.seq_len


def only(stage: Training, recipe: Recipe) -> list[str]:
    """Overrides that leave `stage` alone of a recipe's trainings, so that it is planned; UserError: it has none."""
    if stage not in recipe.trainings:
        raise UserError(f"{recipe.name} has no `{stage}`", where="--training", fix=f"Add a `{stage}:` section.")
    return [f"{name}=null" for name in recipe.trainings if name != stage]


def planned_graph(loaded: LoadedRecipe) -> Graph:
    """The model of a recipe, with the loss of the training that is planned and the vocabulary that is requested."""
    recipe = loaded.recipe
    graph = parse(recipe.model, loaded.locate, vocabulary=recipe.tokenizer.vocab_size)
    check_model(graph, context := training_settings(recipe)[2])
    return preferring(graph, recipe.dpo, context) if recipe.dpo and recipe.trainings == ["dpo"] else graph


def preferring(graph: Graph, settings: DpoSettings, context: int, documents: int | None = None) -> Graph:
    """The model with the loss of preferences; `documents` of a row, None: as if each had 128 tokens."""
    return preference_graph(graph, settings, documents or 2 * max(1, round(context / (2 * _ANSWER))))


def make_plan(recipe: Recipe, graph: Graph, where: Slice, feed_of: Feeds | None = None, begun: int = 0) -> Plan:
    """Estimate a recipe's first training, with the model of `planned_graph`; nothing is compiled, no device is used.

    `feed_of` opens the training's rows, if they have been packed; of the steps, another training has made `begun`.
    UserError, as of a training: mesh, batch and model do not divide.
    """
    section, settings, seq_len = training_settings(recipe)
    device = per_device(graph, settings, recipe.mesh, seq_len, where, recipe.parallel)
    feed = feed_of(device.rows) if feed_of else None
    if feed and (most := getattr(settings, "num_epochs", None)):
        steps = feed.steps_within(most * feed.context / device.seq_len, settings.steps)
        settings = settings.model_copy(update={"steps": steps})
    facts = facts_of(graph, settings, device.rows, device.seq_len, feed)
    # The claims are about pretraining.
    claimed = dict(contradictions(facts, recipe.claims)) if recipe.claims and section == "pretrain" else {}
    # A recipe's price is that of the chips of its own slice, or, if it names none, of whatever is planned for.
    own, price = _own_slice(recipe), recipe.hardware.price
    if price is None or (own and find_slice(own).chip.name != where.chip.name):
        price = where.chip.price
    memory, time, capacity = step_memory(device), step_time(device), where.chip.memory_per_device or 0
    speed, peak = device.rows * device.seq_len / time.seconds, where.chip.flops_per_device
    seconds, hourly = time.seconds * max(0, facts.steps - begun), None if price is None else price * where.chips
    return Plan(
        recipe=recipe,
        section=section,
        where=device.where,
        device=device,
        memory=memory,
        time=time,
        facts=facts,
        begun=begun,
        contradictions=claimed,
        price=price,
        capacity=capacity,
        fits=memory.total <= capacity,
        nearly_full=NEARLY_FULL * capacity < memory.total <= capacity,
        seconds=seconds,
        tokens_per_second=speed,
        mfu=facts.flops / facts.steps / time.seconds / (peak * where.devices) if peak else None,
        cost=None if hourly is None else hourly * seconds / _HOUR,
        cost_per_billion=None if hourly is None else hourly / speed / _HOUR * 1e9,
        save_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(device.state._replace(frozen=None))),
    )


def forecast(
    graph: Graph,
    settings: TrainSettings,
    parallel: ParallelSettings,
    *,
    rows: int,
    context: int,
    mesh: Mapping[str, int],
    device_kind: str,
    devices: int,
) -> tuple[Memory, StepTime] | None:
    """The estimate for a training on the devices that it ran on, `rows` of `context` tokens in a step; None for chips
    that no table knows. A processor is one device, whose speed is measured now."""
    if (where := slice_of(device_kind, devices)) is None:
        return None
    settings = settings.model_copy(update={"batch_size": rows, "per_device_batch_size": None})
    try:
        device = per_device(graph, settings, {} if where.platform == "cpu" else mesh, context, where, parallel)
    except UserError:
        return None
    return step_memory(device), step_time(device)


def _own_slice(recipe: Recipe) -> str | None:
    return recipe.hardware.slice or (recipe.claims.slice if recipe.claims else None)


def default_slice(recipe: Recipe) -> Slice:
    """What the recipe itself says it is for; otherwise this machine's processor."""
    try:
        return find_slice(_own_slice(recipe) or "cpu")
    except UserError as error:
        error.where = "hardware.slice" if recipe.hardware.slice else "claims.slice"
        raise


def heading(recipe: Recipe, where: Slice) -> str:
    """What is planned, and for what; of this machine's processor, how to plan for another."""
    processor = ", this machine (for another: --on SLICE, such as h100x8)" if where.platform == "cpu" else ""
    return f"{recipe.name} on {where.name}{processor}"


def compare(recipe: Recipe, graph: Graph, make: Callable[..., Plan]) -> tuple[list[Plan], dict[Slice, UserError]]:
    """The plans that `make` gives for all slices of `COMPARED`: first what fits, by cost of a token; and refusals."""
    if _own_slice(recipe) is None:  # a price without a slice cannot be that of all chips
        recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"price": None})})
    plans, refused = list[Plan](), dict[Slice, UserError]()
    for where in map(find_slice, COMPARED):
        try:
            plans.append(make(recipe, graph, where))
        except UserError as error:
            refused[where] = error
    plans.sort(key=lambda plan: (not plan.fits, math.inf if plan.cost is None else plan.cost_per_billion))
    return plans, refused


# ---- claims ----


def contradictions(facts: Facts, claims: Claims) -> Iterator[tuple[str, str]]:
    """Every claim that the recipe, or another claim, contradicts: its key under `claims`, and the figures."""
    where = find_slice(claims.slice) if claims.slice else None
    tokens, size = claims.tokens or facts.tokens, claims.parameters or facts.active
    # Sequences of a step that give the claimed tokens: equally many on every device.
    exact, devices = tokens / facts.steps / facts.context, where.devices if where else 1
    unit = devices if exact >= devices else 1
    rows = max(1, round(exact / unit)) * unit
    if not _close(facts.tokens, tokens):
        made = f"{facts.steps:,} steps × {facts.rows:,} sequences × {facts.context:,} tokens is {_count(facts.tokens)}"
        share = f": {rows // where.devices} on each of the {where.devices} devices of a {where.name}" if where else ""
        would = f"{_count(facts.steps * rows * facts.context)} would be {rows:,} sequences a step{share}"
        yield "tokens", f"{made} tokens, not {_count(tokens)}; {would}"
    if claims.parameters is not None and not _close(facts.parameters, claims.parameters):
        yield "parameters", f"the model has {facts.parameters:,} parameters, not {_count(claims.parameters)}"
    flops = 6 * size * tokens
    written = f"6 × {_count(size)} × {_count(tokens)} = {flops:.2g} FLOP"
    if claims.flops is not None and not _close(flops, claims.flops, _ROUGHLY):
        yield "flops", f"6·N·D = {written}, not {claims.flops:.2g}"
    if where is not None and claims.days is not None and claims.mfu is not None and where.chip.bfloat16_flops:
        peak = where.chip.bfloat16_flops * where.chips  # FLOP/s
        implied = flops / (claims.days * _DAY * peak)
        if not _close(implied, claims.mfu, _ROUGHLY):
            needed = f"{flops / (claims.mfu * peak) / _DAY:.2f} days of a {where.name}, not {claims.days:g}"
            trained = f"{implied * facts.tokens / tokens:.0%} for {_count(facts.tokens)} tokens"
            other = "" if _close(facts.tokens, tokens, _ROUGHLY) else f", or of {trained}"
            would = f"{claims.days:g} days would be an MFU of {implied:.1%}{other}"
            yield "days", f"{written} at an MFU of {claims.mfu:.0%} take {needed}; {would}"
    listed = sum(claims.sources.values())
    if listed and claims.tokens is not None and not claims.epochs and not _close(listed, tokens):
        would = f"{_count(tokens)} would be {tokens / listed:.2f} epochs over them"
        yield "sources", f"the sources sum to {_count(listed)} tokens, not {_count(tokens)}; {would}"
    data = listed or facts.data_tokens
    if claims.epochs is not None and data and not _close(tokens / data, claims.epochs):
        epochs = f"{tokens / data:.2f} epochs over {_count(data)}, not {claims.epochs:g}"
        yield "epochs", f"{_count(tokens)} tokens are {epochs}"
    true = "over" if tokens / size > COMPUTE_OPTIMAL else "under"
    for claimed in set(claims.compute_optimal) - {true}:
        what = f"{tokens / size:.0f} tokens a parameter are {true} the compute-optimal {COMPUTE_OPTIMAL}"
        yield "compute_optimal", f"{what}, not {claimed}"
    of_step = rows * facts.context
    wrong = [point for point in claims.checkpoints if not _close(point.tokens / of_step, point.step, _ROUGHLY)]
    if wrong:
        reached, points = wrong[0].tokens, " and at ".join(f"step {point.step:,}" for point in claims.checkpoints)
        each = f"{rows:,} × {facts.context:,} tokens a step reach them at step {reached / of_step:,.0f}"
        yield "checkpoints", f"{_count(reached)} tokens are said to be reached at {points}; {each}"
    sft = claims.sft
    listed = sum(sft.sources.values())
    if sft.examples and listed and not _close(listed, sft.examples):
        yield "sft.sources", f"the sources sum to {_count(listed)} examples, not {_count(sft.examples)}"
    if sft.examples and sft.batch_size and sft.steps_per_epoch:
        steps = math.ceil(sft.examples / sft.batch_size)
        if not _close(steps, sft.steps_per_epoch):
            made = f"{_count(sft.examples)} examples at batch {sft.batch_size} are {steps:,} steps an epoch"
            packed = f"; packing {steps / sft.steps_per_epoch:.1f} conversations to a row makes both true"
            what = f"{made}, not {sft.steps_per_epoch:,}"
            yield "sft.steps_per_epoch", what + (packed if steps > sft.steps_per_epoch else "")


def _close(one: float, other: float, tolerance: float = _CLOSE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _count(number: float) -> str:
    """629.1B, 600M: as people write such numbers."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,.0f}"

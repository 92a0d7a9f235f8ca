"""A plan: what a training costs on a slice, in memory, time and money, before it is rented."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import jax

from affinage.config.load import LoadedRecipe
from affinage.config.parallel import ParallelSettings
from affinage.config.recipe import Recipe
from affinage.config.training import DpoSettings, TrainSettings, TuningSettings
from affinage.errors import UserError
from affinage.hardware.matmul import measured_bandwidth, measured_flops
from affinage.hardware.mesh import AXES
from affinage.hardware.slices import Slice, compared, find_slice, memory_text, slice_of
from affinage.model import Graph, parse
from affinage.model.graph import preference_graph
from affinage.planning.auto_remat import Choice, choose_remat
from affinage.planning.claims import Contradiction, Facts, contradictions, facts_of
from affinage.planning.estimate import Memory, StepTime, step_memory, step_time
from affinage.planning.per_device import PerDevice, per_device
from affinage.planning.trace import padding

Training = Literal["pretrain", "sft", "dpo"]
TRAININGS = get_args(Training)
NEARLY_FULL = 0.9
_ANSWER = 128  # tokens of a prompt with an answer, if nobody has counted them yet
_HOUR = 3600
_FEW_EPOCHS = 4  # repeated data are worth nearly as much as new ones up to here (Muennighoff et al., 2023)
_WORTH_A_HINT = 0.03  # share of a step
_SMALL_BATCH = 0.25  # share of a step that does not grow with the batch


@dataclass(frozen=True)
class Plan:
    """A training on a slice, estimated.

    Attributes:
        recipe: its name.
        section: of the recipe, the training: pretrain, sft or dpo.
        where: the slice.
        device: the step of one device.
        memory: of one device.
        time: of one step.
        facts: what the settings come to.
        contradictions: of the recipe's claims.
        price: US dollars per chip and hour, None if it is not known.
        price_source: where it comes from.
        unused_price: the recipe's, if it is that of other chips.
        choice: what `remat: auto` stands for here.
        data_rows: of the training data, None if they are not packed yet.
        saves: checkpoints that are kept.
    """

    recipe: str
    section: str
    where: Slice
    device: PerDevice
    memory: Memory
    time: StepTime
    facts: Facts
    contradictions: tuple[Contradiction, ...]
    price: float | None
    price_source: str = ""
    unused_price: float | None = None
    choice: Choice | None = None
    data_rows: int | None = None
    saves: int = 1

    @property
    def settings(self) -> TrainSettings:
        """Of the training."""
        return self.device.settings

    @property
    def capacity(self) -> int:
        """Bytes that a program may take on one device."""
        return self.where.chip.memory_per_device or 0

    @property
    def fits(self) -> bool:
        """Whether the estimate stays below the capacity."""
        return self.memory.total <= self.capacity

    @property
    def nearly_full(self) -> bool:
        """Whether it fits by less than estimates are sometimes off."""
        return self.fits and self.memory.total > NEARLY_FULL * self.capacity

    @property
    def seconds(self) -> float:
        """Of all steps; validation, checkpoints and compilation are not in it."""
        return self.time.seconds * self.settings.steps

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.device.rows * self.device.seq_len / self.time.seconds

    @property
    def mfu(self) -> float | None:
        """Share of the datasheet's bfloat16 peak, by the convention of `affinage.model.analysis`."""
        peak = self.where.chip.flops_per_device
        return self.facts.flops / self.seconds / (peak * self.where.devices) if peak else None

    @property
    def cost(self) -> float | None:
        """US dollars of the whole training."""
        return None if self.price is None else self.price * self.where.chips * self.seconds / _HOUR

    @property
    def cost_per_billion(self) -> float | None:
        """US dollars for 1e9 tokens, by which slices compare even if their number decides over the batch."""
        return None if self.cost is None else self.cost / self.facts.tokens * 1e9

    @cached_property
    def save_bytes(self) -> int:
        """Of one checkpoint of the training."""
        leaves = jax.tree.leaves(self.device.state._replace(frozen=None))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @cached_property
    def warnings(self) -> list[str]:
        """What may go wrong, or could go better, one line each."""
        return [*_warnings(self)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        where, device, time = self.where, self.device, self.time
        derived = ("tokens", "flops_by_rule", "tokens_per_parameter", "epochs")
        place = {name: getattr(where, name) for name in ("name", "chips", "devices", "hosts", "shape")}
        step = {"seconds": time.seconds, "bound": time.bound, "collectives": time.collectives}
        return {
            "recipe": self.recipe,
            "stage": self.section,
            "slice": place | {"chip": where.chip.name},
            "mesh": {axis: size for axis, size in device.sizes.items() if size > 1} or {"data": 1},
            "rows": device.rows,
            "micro_batches": device.micro_batches,
            "remat": device.parallel.model_dump(mode="json")["remat"],
            "context": device.seq_len,
            "facts": dataclasses.asdict(self.facts) | {name: getattr(self.facts, name) for name in derived},
            "contradictions": [dataclasses.asdict(claim) for claim in self.contradictions],
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total, "capacity": self.capacity},
            "fits": self.fits,
            "step": step | dataclasses.asdict(time),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "seconds": self.seconds,
            "price_per_chip_hour": self.price,
            "cost": self.cost,
            "cost_per_billion_tokens": self.cost_per_billion,
            "save_bytes": self.save_bytes,
            "warnings": self.warnings,
        }


def training_settings(recipe: Recipe) -> tuple[Training, TrainSettings, int]:
    """The training that a recipe is planned for, the first that it has, and the tokens of its rows.

    Raises:
        UserError: for a recipe that trains nothing.
    """
    for name in TRAININGS:
        settings = getattr(recipe, name)
        if settings is not None:
            return name, settings, getattr(settings, "seq_len", None) or recipe.packing.seq_len
    raise UserError("this recipe trains nothing", fix="Add a `pretrain:` section.")


def only(stage: Training, recipe: Recipe) -> list[str]:
    """Overrides that leave `stage` alone of a recipe's trainings, so that it is planned.

    Raises:
        UserError: if the recipe does not have it.
    """
    if getattr(recipe, stage) is None:
        raise UserError(f"{recipe.name} has no `{stage}`", where="--training", fix=f"Add a `{stage}:` section.")
    return [f"{name}=null" for name in TRAININGS if name != stage and getattr(recipe, name) is not None]


@dataclass(frozen=True)
class Counted:
    """What a run's data have shown of its model so far.

    Attributes:
        vocabulary: the size that `vocab: auto` stands for; None: what the tokenizer is to have.
        documents: of a row of pairs; None: as if each had 128 tokens.
    """

    vocabulary: int | None = None
    documents: int | None = None


NOTHING_COUNTED = Counted()


def planned_graph(loaded: LoadedRecipe, counted: Counted = NOTHING_COUNTED) -> Graph:
    """The model of a recipe, with the loss of the training that is planned."""
    recipe = loaded.recipe
    graph = parse(recipe.model, loaded.locate, vocabulary=counted.vocabulary or recipe.tokenizer.vocab_size)
    if recipe.pretrain is not None or recipe.sft is not None or recipe.dpo is None:
        return graph
    _, _, context = training_settings(recipe)
    return preferring(graph, recipe.dpo, context, counted.documents)


def preferring(graph: Graph, settings: DpoSettings, context: int, documents: int | None) -> Graph:
    """The model with the loss of preferences; `documents` as in `Counted`."""
    return preference_graph(graph, settings, documents or 2 * max(1, round(context / (2 * _ANSWER))))


def make_plan(
    recipe: Recipe, graph: Graph, where: Slice, data_tokens: int | None = None, data_rows: int | None = None
) -> Plan:
    """Estimate a recipe on a slice; nothing is compiled and no device is used.

    Args:
        recipe: its first training is planned.
        graph: as `planned_graph` makes it.
        where: the slice.
        data_tokens: of the training data, if they have been packed.
        data_rows: the same.

    Raises:
        UserError: as training would: for a mesh, a batch and a model that do not divide.
    """
    section, settings, seq_len = training_settings(recipe)
    where = measured(where)
    device = per_device(graph, settings, recipe.mesh, seq_len, where, recipe.parallel)
    choice = choose_remat(device) if recipe.parallel.remat == "auto" else None
    if choice is not None:
        parallel = recipe.parallel.model_copy(update={"remat": choice.remat})
        device = dataclasses.replace(device, parallel=parallel)
    facts = facts_of(graph, settings, device.rows, device.seq_len, data_tokens)
    # The claims are about pretraining.
    claimed = contradictions(facts, recipe.claims) if recipe.claims and section == "pretrain" else []
    # A recipe's price is that of the chips of its own slice, or, if it names none, of whatever is planned for.
    own, price, unused, source = _own_slice(recipe), recipe.hardware.price, None, "hardware.price"
    if price is None or (own and find_slice(own).chip.name != where.chip.name):
        price, unused, source = where.chip.price, price, where.chip.price_source
    return Plan(
        recipe=recipe.name,
        section=section,
        where=where,
        device=device,
        memory=step_memory(device),
        time=step_time(device, where),
        facts=facts,
        contradictions=tuple(claimed),
        price=price,
        price_source=source,
        unused_price=unused,
        choice=choice,
        data_rows=data_rows,
        saves=recipe.runtime.checkpoint.keep_last,
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
    """The estimate for a training on the devices that it runs on, or ran on; None for chips that no table knows.

    A processor is one device, however many JAX is set to see in it: they share its cores. Its speed is measured now, in
    seconds of its own: the estimate is for an idle one. `rows` are of a step, and `context` is the tokens of a row.
    """
    where = slice_of(device_kind, devices)
    if where is None:
        return None
    where = measured(where)
    sizes = {axis: mesh.get(axis, 1) for axis in AXES} if where.platform != "cpu" else {"data": 1}
    settings = settings.model_copy(update={"batch_size": rows, "per_device_batch_size": None})
    try:
        device = per_device(graph, settings, dict(sizes), context, where, parallel)
    except UserError:
        return None
    return step_memory(device), step_time(device, where)


def _own_slice(recipe: Recipe) -> str | None:
    return recipe.hardware.slice or (recipe.claims.slice if recipe.claims else None)


def default_slice(recipe: Recipe) -> Slice:
    """What the recipe itself says it is for; otherwise this machine's processor."""
    return find_slice(_own_slice(recipe) or "cpu")


def compare(recipe: Recipe, graph: Graph) -> list[Plan | tuple[Slice, UserError]]:
    """The recipe on all slices of `compared`: those that fit first, then by cost of a token; the impossible last."""
    if _own_slice(recipe) is None:  # a price without a slice cannot be that of all chips
        recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"price": None})})
    plans: list[Plan] = []
    refused: list[Plan | tuple[Slice, UserError]] = []
    for where in compared():
        try:
            plans.append(make_plan(recipe, graph, where))
        except UserError as error:
            refused.append((where, error))
    plans.sort(key=lambda plan: (not plan.fits, math.inf if plan.cost is None else plan.cost_per_billion))
    return [*plans, *refused]


def measured(where: Slice) -> Slice:
    """The slice with the speed of a processor, which has to be measured."""
    if where.platform != "cpu":
        return where
    chip = dataclasses.replace(where.chip, float32_flops=measured_flops(), memory_bandwidth=measured_bandwidth())
    return dataclasses.replace(where, chip=chip)


def _warnings(plan: Plan) -> Iterator[str]:
    device, settings, time = plan.device, plan.settings, plan.time
    if not plan.fits:
        remat = "" if plan.choice else ", or `--set parallel.remat=auto` to compute activations again"
        excess = memory_text(plan.memory.total - plan.capacity)
        yield f"does not fit: {excess} too much; find settings that fit with --search{remat}"
    elif plan.nearly_full:
        yield "nearly full: check with the compiler whether it fits, with --compile"
    if plan.unused_price is not None:
        unused, chip = f"${plan.unused_price:,.2f} per chip and hour", plan.where.chip.name
        yield f"the recipe's price of {unused} is not that of {chip}; set it with `--set hardware.price=...`"
    yield from _attention_warnings(plan)
    for vocab in {vocab for node in device.local_graph.nodes if (vocab := getattr(node.layer, "vocab", None))}:
        lost = 1 - 1 / padding(vocab, device.matrix_unit)
        if lost > _WORTH_A_HINT:
            yield (
                f"a vocabulary of {vocab:,} does not divide by {device.matrix_unit}, the matrix unit: {lost:.0%} of "
                "the logits' products are lost"
            )
    growing = sum(node.compute + node.memory for node in time.nodes)
    fixed = 1 - growing / time.seconds
    if fixed > _SMALL_BATCH and device.stages == 1:
        gain = 2 * time.seconds / (time.seconds + growing) - 1
        yield f"small batch: {fixed:.0%} of a step is its fixed cost; twice the rows give {gain:.0%} more tokens/s"
    if plan.facts.epochs is not None and plan.facts.epochs > _FEW_EPOCHS:
        yield f"{plan.facts.epochs:.1f} epochs over the data: beyond {_FEW_EPOCHS} they are worth less and less"
    if isinstance(settings, TuningSettings) and settings.num_epochs is not None and plan.data_rows is not None:
        last = max(1, int(plan.data_rows * settings.num_epochs / device.rows))
        if last < settings.steps and settings.mixture is None:
            yield f"num_epochs: {settings.num_epochs:g} ends the training after step {last:,} of {settings.steps:,}"


def _attention_warnings(plan: Plan) -> Iterator[str]:
    """What keeps attention from the chip's fast path."""
    device = plan.device
    for node in device.graph.nodes:
        attention, ffn = (getattr(node.layer, half, None) for half in ("attention", "ffn"))
        if plan.where.platform == "gpu" and getattr(ffn, "capacity_factor", 0.0) is None:
            yield (
                f"experts of `{node.name}` have no capacity: on GPUs XLA may pad their groups with zeros, which takes "
                "as many times longer as there are experts; a `capacity_factor` avoids that"
            )
        if attention is None or plan.where.platform == "cpu":
            continue
        if attention.dropout > 0:
            graph = device.graph.to_dict()
            graph["nodes"][node.name]["attention"]["dropout"] = 0.0
            without = dataclasses.replace(device, graph=parse(graph))
            then, now = (
                f"{step_time(each, plan.where).seconds:.3g} s and {memory_text(step_memory(each).total)}"
                for each in (without, device)
            )
            yield (
                f"dropout of attention in `{node.name}` costs the kernel: all pairs of tokens are computed and kept. "
                f"With `--set model.nodes.{node.name}.attention.dropout=0` a step takes {then}, now {now}"
            )
            continue
        head = attention.head_width(device.graph.shapes[node.inputs[0]].width)
        lost = 1 - 1 / padding(head, device.matrix_unit)
        share = lost * sum(op.times * op.flops for op in device.traced.ops if op.kind == "pallas_call")
        share /= max(1.0, sum(op.times * op.flops for op in device.traced.ops))
        if share > _WORTH_A_HINT:
            yield (
                f"heads of {head} use {1 - lost:.0%} of a matrix unit of {device.matrix_unit}: with fewer, wider heads "
                f"about {share:.0%} of the products' time is saved"
            )

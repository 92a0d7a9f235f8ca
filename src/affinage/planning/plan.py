"""A plan: what a training costs on a slice, in memory, time and money, before it is rented."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax

from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.config.training import DpoSettings, ParallelSettings, TrainSettings
from affinage.errors import UserError
from affinage.hardware.chips import COMPARED, Slice, find_slice, memory_text, slice_of
from affinage.model import Graph, parse
from affinage.model.graph import preference_graph
from affinage.planning.claims import Contradiction, Facts, contradictions, facts_of
from affinage.planning.estimate import Choice, Memory, StepTime, choose_remat, step_memory, step_time
from affinage.planning.per_device import PerDevice, per_device
from affinage.planning.trace import padding

Training = Literal["pretrain", "sft", "dpo"]
NEARLY_FULL = 0.9
_ANSWER = 128  # tokens of a prompt with an answer, before anybody has counted them
_HOUR = 3600
_REMEMBERED = "on demand as remembered in 2025; set hardware.price to yours"
_WORTH_A_HINT = 0.03  # share of a step
_SMALL_BATCH = 0.25  # share of a step that does not grow with the batch


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
    contradictions: tuple[Contradiction, ...]  # of the recipe's claims
    price: float | None  # US dollars per chip and hour, None if it is not known
    price_source: str  # where it comes from
    choice: Choice | None  # what `remat: auto` stands for here
    capacity: int  # bytes that a program may take on one device
    fits: bool  # the estimate stays below the capacity
    nearly_full: bool  # it fits by less than estimates are sometimes off
    seconds: float  # of all steps; validation, checkpoints and compilation are not in it
    tokens_per_second: float  # of all devices together
    mfu: float | None  # share of the datasheet's bfloat16 peak, by the convention of `affinage.model.analysis`
    cost: float | None  # US dollars of the whole training
    cost_per_billion: float | None  # of 1e9 tokens, by which slices compare even if their number decides over the batch
    save_bytes: int  # of one checkpoint of the training

    @cached_property
    def warnings(self) -> list[str]:
        """What may go wrong, or could go better, one line each."""
        return [*_warnings(self)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        where, device = self.where, self.device
        place = {name: getattr(where, name) for name in ("name", "chips", "devices", "hosts", "shape")}
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
            "contradictions": [dataclasses.asdict(claim) for claim in self.contradictions],
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total, "capacity": self.capacity},
            "step": dataclasses.asdict(self.time),
            "price_per_chip_hour": self.price,
            "cost_per_billion_tokens": self.cost_per_billion,
            **{name: getattr(self, name) for name in ("fits", "tokens_per_second", "mfu", "seconds", "cost")},
            "save_bytes": self.save_bytes,
            "warnings": self.warnings,
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
    if recipe.trainings != ["dpo"] or recipe.dpo is None:
        return graph
    return preferring(graph, recipe.dpo, training_settings(recipe)[2])


def preferring(graph: Graph, settings: DpoSettings, context: int, documents: int | None = None) -> Graph:
    """The model with the loss of preferences; `documents` of a row, None: as if each had 128 tokens."""
    return preference_graph(graph, settings, documents or 2 * max(1, round(context / (2 * _ANSWER))))


def make_plan(recipe: Recipe, graph: Graph, where: Slice, data_tokens: int | None = None) -> Plan:
    """Estimate a recipe's first training, with the model of `planned_graph`; nothing is compiled, no device is used.

    `data_tokens` are those of the training data, if they have been packed. UserError, as of a training: mesh, batch and
    model do not divide.
    """
    section, settings, seq_len = training_settings(recipe)
    device = per_device(graph, settings, recipe.mesh, seq_len, where, recipe.parallel)
    choice = choose_remat(device) if recipe.parallel.remat == "auto" else None
    if choice is not None:
        parallel = recipe.parallel.model_copy(update={"remat": choice.remat})
        device = dataclasses.replace(device, parallel=parallel)
    facts = facts_of(graph, settings, device.rows, device.seq_len, data_tokens)
    # The claims are about pretraining.
    claimed = tuple(contradictions(facts, recipe.claims)) if recipe.claims and section == "pretrain" else ()
    # A recipe's price is that of the chips of its own slice, or, if it names none, of whatever is planned for.
    own, price, source = _own_slice(recipe), recipe.hardware.price, "hardware.price"
    if price is None or (own and find_slice(own).chip.name != where.chip.name):
        price, source = where.chip.price, _REMEMBERED
    memory, time, capacity = step_memory(device), step_time(device), where.chip.memory_per_device or 0
    seconds, peak = time.seconds * facts.steps, where.chip.flops_per_device
    cost = None if price is None else price * where.chips * seconds / _HOUR
    return Plan(
        recipe=recipe,
        section=section,
        where=device.where,
        device=device,
        memory=memory,
        time=time,
        facts=facts,
        contradictions=claimed,
        price=price,
        price_source=source,
        choice=choice,
        capacity=capacity,
        fits=memory.total <= capacity,
        nearly_full=NEARLY_FULL * capacity < memory.total <= capacity,
        seconds=seconds,
        tokens_per_second=device.rows * device.seq_len / time.seconds,
        mfu=facts.flops / seconds / (peak * where.devices) if peak else None,
        cost=cost,
        cost_per_billion=None if cost is None else cost / facts.tokens * 1e9,
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
    """The estimate for a training on the devices that it runs on, or ran on; None for chips that no table knows.

    A processor is one device, however many JAX is set to see in it: they share its cores. Its speed is measured now, in
    seconds of its own: the estimate is for an idle one. `rows` are of a step, and `context` is the tokens of a row.
    """
    where = slice_of(device_kind, devices)
    if where is None:
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
    return find_slice(_own_slice(recipe) or "cpu")


def compare(recipe: Recipe, graph: Graph) -> tuple[list[Plan], list[tuple[Slice, UserError]]]:
    """The recipe on all slices of `COMPARED`, those that fit first, then by cost of a token; and the impossible."""
    if _own_slice(recipe) is None:  # a price without a slice cannot be that of all chips
        recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"price": None})})
    plans, refused = [], []
    for where in map(find_slice, COMPARED):
        try:
            plans.append(make_plan(recipe, graph, where))
        except UserError as error:
            refused.append((where, error))
    plans.sort(key=lambda plan: (not plan.fits, math.inf if plan.cost is None else plan.cost_per_billion))
    return plans, refused


def _warnings(plan: Plan) -> Iterator[str]:
    device, time, unit = plan.device, plan.time, plan.device.matrix_unit
    if not plan.fits:
        remat = "" if plan.choice else ", or `--set parallel.remat=auto` to compute activations again"
        excess = memory_text(plan.memory.total - plan.capacity)
        yield f"does not fit: {excess} too much; find settings that fit with --search{remat}"
    elif plan.nearly_full:
        yield "nearly full: check with the compiler whether it fits, with --compile"
    products = [(op.kind == "pallas_call", op.times * op.flops) for op in device.traced.ops]
    of_kernels = sum(flops for kernel, flops in products if kernel) / max(1.0, sum(flops for _, flops in products))
    for node in device.graph.nodes:
        attention = getattr(node.layer, "attention", None)
        if attention is None or plan.where.platform == "cpu":
            continue
        head = attention.head_width(device.graph.shapes[node.inputs[0]].width)
        used = 1 / padding(head, unit)
        if attention.dropout > 0:
            graph = device.graph.to_dict()
            graph["nodes"][node.name]["attention"]["dropout"] = 0.0
            without = dataclasses.replace(device, graph=parse(graph))
            then = f"{step_time(without).seconds:.3g} s and {memory_text(step_memory(without).total)}"
            yield (
                f"dropout of attention in `{node.name}` costs the kernel: all pairs of tokens are computed and kept. "
                f"With `--set model.nodes.{node.name}.attention.dropout=0` a step takes {then}, now "
                f"{time.seconds:.3g} s and {memory_text(plan.memory.total)}"
            )
        elif (share := (1 - used) * of_kernels) > _WORTH_A_HINT:
            yield (
                f"heads of {head} use {used:.0%} of a matrix unit of {unit}: with fewer, wider heads about "
                f"{share:.0%} of the products' time is saved"
            )
    for vocab in {vocab for node in device.local_graph.nodes if (vocab := getattr(node.layer, "vocab", None))}:
        lost = 1 - 1 / padding(vocab, unit)
        if lost > _WORTH_A_HINT:
            yield (
                f"a vocabulary of {vocab:,} does not divide by {unit}, the matrix unit: {lost:.0%} of the logits' "
                "products are lost"
            )
    growing = sum(node.compute + node.memory for node in time.nodes)
    fixed = 1 - growing / time.seconds
    if fixed > _SMALL_BATCH and device.stages == 1:
        gain = 2 * time.seconds / (time.seconds + growing) - 1
        yield f"small batch: {fixed:.0%} of a step is its fixed cost; twice the rows give {gain:.0%} more tokens/s"

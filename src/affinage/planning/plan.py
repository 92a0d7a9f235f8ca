"""A plan: what a training costs on a slice, in memory, time and money, before it is rented."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.config.training import TrainSettings
from affinage.config.tuning import DpoSettings
from affinage.errors import UserError
from affinage.hardware.chips import GiB
from affinage.hardware.matmul import measured_bandwidth, measured_flops
from affinage.hardware.slices import Slice, chip_called, compared, find_slice
from affinage.model import Graph, parse
from affinage.model.kinds.attention_choice import Need, obstacles
from affinage.model.preferred import preference_graph
from affinage.parallel.mesh import axis_sizes
from affinage.parallel.sharding import table_with
from affinage.parallel.used_axes import without_experts
from affinage.planning.consistency import Contradiction, Facts, contradictions, facts_of
from affinage.planning.experts import is_dropless
from affinage.planning.guard import epoch_guard
from affinage.planning.local import Split, lay_out
from affinage.planning.memory import Memory, step_memory
from affinage.planning.remedy import remedy
from affinage.planning.roofline import StepTime, step_time
from affinage.planning.settle import Choice, choose_remat
from affinage.training.trainer import compute_dtype

Training = Literal["pretrain", "sft", "dpo"]
TRAININGS = get_args(Training)
ANSWER = 128  # tokens of a prompt with an answer, where nobody has counted them yet
_HOUR = 3600
NEARLY_FULL = 0.9


@dataclass(frozen=True)
class Plan:
    """A training on a slice, estimated.

    Attributes:
        recipe: its name.
        section: of the recipe, the training: pretrain, sft or dpo.
        where: the slice.
        split: how it is split.
        settings: of the training.
        memory: of one device.
        time: of one step.
        facts: what the settings come to.
        contradictions: of the recipe's claims.
        price: US dollars per chip and hour, None where it is not known.
        price_source: what is known of where it comes from; empty for the recipe's own.
        choice: what `remat: auto` stands for here.
        guard: what `num_epochs` does to the steps, in words; empty where it does nothing.
    """

    recipe: str
    section: str
    where: Slice
    split: Split
    settings: TrainSettings
    memory: Memory
    time: StepTime
    facts: Facts
    contradictions: tuple[Contradiction, ...]
    price: float | None
    price_source: str = ""
    choice: Choice | None = None
    guard: str = ""

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
        """Whether it fits by less than estimates are off now and then."""
        return self.fits and self.memory.total > NEARLY_FULL * self.capacity

    @property
    def seconds(self) -> float:
        """Of all steps; validation, checkpoints and compilation are not in it."""
        return self.time.seconds * self.settings.steps

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.split.rows * self.split.context / self.time.seconds

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
        """US dollars for 1e9 tokens: what slices compare by, also where their number decides over the batch."""
        return None if self.cost is None else self.cost / self.facts.tokens * 1e9

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What may go wrong, or could go better."""
        found = []
        if not self.fits:
            missing = (self.memory.total - self.capacity) / GiB
            found.append(f"does not fit: {missing:.2f} GiB too much; {remedy(self)}")
        elif self.nearly_full:
            found.append("nearly full: let the compiler say whether it fits, with --compile")
        # A GPU's kernel is taken only by name, and then refuses what it cannot do.
        dropping = self._attention_with_dropout() if self.where.platform == "tpu" else []
        if dropping:
            setting = f"model.nodes.{dropping[0]}.attention.dropout=0"
            found.append(
                f"dropout of attention in `{dropping[0]}` keeps the chip's own kernel from being used: all "
                f"pairs of positions are computed and kept. See what `--set {setting}` does to this plan"
            )
        if self.where.platform == "gpu" and any(map(is_dropless, self.split.graph.nodes)):
            found.append(
                "planned is what experts without a capacity have to multiply; on GPUs XLA may fill their groups up "
                "with zeros, which takes as many times longer as there are experts: a `capacity_factor` avoids that"
            )
        if self._attention_by_name():
            found.append(
                "attention is computed without a kernel: all pairs of positions are, and are kept. See what "
                f"`--set {self.section}.attention=cudnn` does to this plan"
            )
        if self.split.sizes["expert"] > 1 and (said := without_experts(self.split.graph, self.split.table)):
            found.append(said)
        return (*found, *([self.guard] if self.guard else []))

    def _attention_by_name(self) -> bool:
        """Whether a GPU's own kernel would take all of this model's attention, if it were asked for."""
        if self.where.platform != "gpu" or self.settings.attention != "auto" or self.split.stages > 1:
            return False
        graph, dtype = self.split.graph, compute_dtype(self.settings.precision, self.where.chip)
        needs = [
            Need(
                "gpu",
                dtype,
                attention.head_width(graph.shapes[node.inputs[0]].width),
                self.split.context,
                cached=False,
                dropout=attention.dropout,
                softcap=attention.softcap,
                described=True,
            )
            for node in graph.nodes
            if (attention := getattr(node.kind, "attention", None)) is not None
        ]
        return bool(needs) and not any(obstacles("cudnn", need) for need in needs)

    def _attention_with_dropout(self) -> list[str]:
        kinds = {node.name: getattr(node.kind, "attention", None) for node in self.split.graph.nodes}
        return [name for name, attention in kinds.items() if attention is not None and attention.dropout > 0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        where, chip = self.where, self.where.chip
        return {
            "recipe": self.recipe,
            "stage": self.section,
            "slice": {
                "name": where.name,
                "chip": chip.name,
                "chips": where.chips,
                "devices": where.devices,
                "hosts": where.hosts,
                "shape": list(where.shape),
            },
            "mesh": {axis: size for axis, size in self.split.sizes.items() if size > 1} or {"data": 1},
            "rows": self.split.rows,
            "micro_batches": self.split.micro_batches,
            "remat": self.split.parallel.model_dump(mode="json")["remat"],
            "context": self.split.context,
            "facts": dataclasses.asdict(self.facts)
            | {
                "tokens": self.facts.tokens,
                "flops_by_rule": self.facts.flops_by_rule,
                "tokens_per_parameter": self.facts.tokens_per_parameter,
                "epochs": self.facts.epochs,
            },
            "contradictions": [dataclasses.asdict(found) for found in self.contradictions],
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total, "capacity": self.capacity},
            "fits": self.fits,
            "step": {
                "seconds": self.time.seconds,
                "update": self.time.update,
                "adding": self.time.adding,
                "sums_again": self.time.again,
                "bubble": self.time.bubble,
                "bound": self.time.bound,
                "collectives": self.time.collectives,
                "nodes": [dataclasses.asdict(node) | {"bound": node.bound} for node in self.time.nodes],
            },
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "seconds": self.seconds,
            "price_per_chip_hour": self.price,
            "cost": self.cost,
            "cost_per_billion_tokens": self.cost_per_billion,
            "warnings": list(self.warnings),
        }


def training_settings(recipe: Recipe) -> tuple[Training, TrainSettings, int]:
    """The training that a recipe is planned for, the first that it has, and the tokens of its rows.

    Raises:
        UserError: for a recipe that trains nothing.
    """
    if recipe.pretrain is not None:
        return "pretrain", recipe.pretrain, recipe.packing.seq_len
    if recipe.sft is not None:
        return "sft", recipe.sft, recipe.sft.seq_len or recipe.packing.seq_len
    if recipe.dpo is not None:
        return "dpo", recipe.dpo, recipe.dpo.seq_len or recipe.packing.seq_len
    raise UserError("this recipe trains nothing", fix="Add a `pretrain:` section.")


def only(stage: Training, recipe: Recipe) -> list[str]:
    """Settings that leave of a recipe's trainings `stage`, and so have it planned.

    Raises:
        UserError: where the recipe has none.
    """
    if getattr(recipe, stage) is None:
        has = [name for name in TRAININGS if getattr(recipe, name) is not None]
        fix = f"It has: {', '.join(has)}." if has else f"Add a `{stage}:` section."
        raise UserError(f"{recipe.name} has no `{stage}`", where="--training", fix=fix)
    return [f"{name}=null" for name in TRAININGS if name != stage and getattr(recipe, name) is not None]


@dataclass(frozen=True)
class Counted:
    """What only a run's data can tell of its model, as far as it has told.

    Attributes:
        vocabulary: what `vocab: auto` is; None: what the tokenizer is to have.
        documents: of a row of pairs; None: as many as have ANSWER tokens each.
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
    return preference_graph(graph, settings, documents or 2 * max(1, round(context / (2 * ANSWER))))


def make_plan(
    recipe: Recipe, graph: Graph, where: Slice, data_tokens: int | None = None, data_rows: int | None = None
) -> Plan:
    """Estimate a recipe on a slice; nothing is compiled and no device is used.

    Of the training data `data_tokens` and `data_rows` are known where they have been packed.

    Raises:
        UserError: as training would: for a mesh, a batch and a model that do not divide.
    """
    section, settings, context = training_settings(recipe)
    if all(name != "tokens" for name, _ in graph.inputs):
        context = 1
    where = measured(where)
    mesh = {str(axis): size for axis, size in recipe.mesh.items()}
    split = lay_out(graph, settings, mesh, context, where.devices, recipe.parallel)
    choice = choose_remat(split, settings, where.chip, where.platform) if recipe.parallel.remat == "auto" else None
    if choice is not None:
        split = dataclasses.replace(split, parallel=recipe.parallel.model_copy(update={"remat": choice.remat}))
    memory = step_memory(split, settings, where.chip, where.platform)
    facts = facts_of(graph, settings, split.rows, context, data_tokens)
    # What is claimed is claimed of the pretraining.
    claimed = contradictions(facts, recipe.claims) if recipe.claims and section == "pretrain" else []
    time = step_time(split, settings, where, memory)
    own = own_price(recipe, where)
    price, source = (where.chip.price, where.chip.price_source) if own is None else (own, "")
    return Plan(
        recipe.name,
        section,
        where,
        split,
        settings,
        memory,
        time,
        facts,
        tuple(claimed),
        price,
        source,
        choice,
        epoch_guard(settings, split.rows, context, data_rows),
    )


def own_price(recipe: Recipe, where: Slice) -> float | None:
    """What the recipe says that a chip of the slice costs in an hour, in US dollars; None where it says nothing of it.

    A single price is that of the chips of the recipe's own slice, or, where it names none, of whatever is planned for.

    Raises:
        UserError: for a price of a kind of chip that there is not.
    """
    price = recipe.hardware.price
    if isinstance(price, dict):
        return {chip_called(kind).name: value for kind, value in price.items()}.get(where.chip.name)
    own = _own_slice(recipe)
    return price if own is None or find_slice(own).chip.name == where.chip.name else None


def _own_slice(recipe: Recipe) -> str | None:
    return recipe.hardware.slice or (recipe.claims.slice if recipe.claims else None)


def dividing_batch(recipe: Recipe, where: Slice) -> int | None:
    """The batch nearest to the recipe's that divides over its mesh on a slice; None where its own does.

    Also None where there is no telling: for a mesh that is refused, and for rows that are given per device.
    """
    _, settings, _ = training_settings(recipe)
    try:
        pieces = _row_parts(recipe, where) * settings.gradient_accumulation_steps
    except UserError:
        return None
    if settings.batch_size is None or settings.batch_size % pieces == 0:
        return None
    return max(1, round(settings.batch_size / pieces)) * pieces


def micro_batches_that_keep(recipe: Recipe, where: Slice) -> int | None:
    """The most micro-batches below the recipe's over which its batch divides on a slice; None where none do."""
    _, settings, _ = training_settings(recipe)
    pieces, fewer = _row_parts(recipe, where), range(settings.gradient_accumulation_steps - 1, 0, -1)
    return next((parts for parts in fewer if (settings.batch_size or 1) % (pieces * parts) == 0), None)


def _row_parts(recipe: Recipe, where: Slice) -> int:
    """Into how many parts the mesh splits the rows of a batch on a slice; raises UserError if there is no such mesh."""
    sizes = axis_sizes({str(axis): size for axis, size in recipe.mesh.items()}, where.devices)
    return math.prod(sizes[axis] for axis in table_with(recipe.parallel.sharding)["batch"])


def compare(recipe: Recipe, graph: Graph) -> list[Plan | tuple[Slice, UserError]]:
    """The recipe on all slices of `compared`: what fits first, then by cost of a token; the impossible last."""
    if not isinstance(recipe.hardware.price, dict) and _own_slice(recipe) is None:
        # One price and nothing that says whose: it cannot be that of all chips.
        recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"price": None})})
    found: list[Plan] = []
    refused: list[Plan | tuple[Slice, UserError]] = []
    for where in compared():
        try:
            found.append(make_plan(recipe, graph, where))
        except UserError as error:
            refused.append((where, error))
    found.sort(key=lambda plan: (not plan.fits, math.inf if plan.cost is None else plan.cost_per_billion))
    return [*found, *refused]


def default_slice(recipe: Recipe) -> Slice:
    """What the recipe itself says it is for; otherwise this machine's processor."""
    return find_slice(_own_slice(recipe) or "cpu")


def measured(where: Slice) -> Slice:
    """The slice with figures for a processor, which have to be measured."""
    if where.platform != "cpu":
        return where
    chip = dataclasses.replace(where.chip, float32_flops=measured_flops(), memory_bandwidth=measured_bandwidth())
    return dataclasses.replace(where, chip=chip)

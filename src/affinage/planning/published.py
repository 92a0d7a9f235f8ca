"""What others measured of steps and trainings that can be planned here, and the plans."""

from collections.abc import Sequence
from dataclasses import dataclass

from affinage.config.load import load_recipe
from affinage.hardware.slices import find_slice
from affinage.planning.phases import phases
from affinage.planning.plan import Plan, make_plan, planned_graph

# "Scalable Training of Language Models using JAX pjit and TPUv4" (Yoo et al., 2022), figure 4: how many times faster
# one step of a 124M model is on TPU v4 than on v3, 32 rows of 2,048 tokens. Taken are 4 chips of each.
STEP_RECIPE = "fax-124m"
OLD, NEW = "v3-8", "v4-8"
SPEED_UPS = {"step": 1.7, "forward": 2.0, "backward": 1.6}

# Figure 3 of the same: tensor against pipeline parallelism of a 350M model.
LAYOUT_RECIPE = "fax-350m"
LAYOUT_SLICE = "v4-32"
PADDED = "model.nodes.embed.vocab=50304"  # the next number of ids that divides over a tensor axis
LAYOUTS = (
    {"data": 16},
    {"data": 4, "tensor": 4},
    {"data": 4, "pipeline": 4},
    {"data": 2, "tensor": 8},
    {"data": 2, "pipeline": 8},
)

# Recipe, slice, hours: see the recipe for where they are from, and for what is assumed.
TRAININGS = (("gpt2-124m-tpu", "v3-8", 7.0), ("gpt2-124m-tpu", "v6e-8", 1.5))
KERNEL, PLAIN = "kernel", "plain"  # how attention is computed
_ATTENTION = {KERNEL: (), PLAIN: ("pretrain.attention=xla",)}


@dataclass(frozen=True)
class SpeedUp:
    """A planned step on the older and on the newer chips.

    Attributes:
        attention: by the chip's kernel, or by plain products, as in 2022.
        old: plan for `OLD`.
        new: plan for `NEW`.
    """

    attention: str
    old: Plan
    new: Plan

    @property
    def ratios(self) -> dict[str, float]:
        """How many times faster: the step, and its parts."""
        before, after = (phases(plan.time, plan.split.graph.loss) for plan in (self.old, self.new))
        parts = {name: before[name] / after[name] for name in before}
        return {"step": self.old.time.seconds / self.new.time.seconds, **parts}


def speed_ups(overrides: Sequence[str] = ()) -> list[SpeedUp]:
    """The paper's step on both kinds of chips, with the kernel and without."""
    found = []
    for attention, settings in _ATTENTION.items():
        old, new = (plan_of(STEP_RECIPE, [*settings, *overrides], name) for name in (OLD, NEW))
        found.append(SpeedUp(attention, old, new))
    return found


def trainings() -> list[tuple[Plan, str, float]]:
    """(plan, how attention is computed, hours as published) of whole trainings."""
    return [
        (plan_of(recipe, settings, where), attention, hours)
        for recipe, where, hours in TRAININGS
        for attention, settings in _ATTENTION.items()
    ]


def plan_of(recipe: str, overrides: Sequence[str], where: str) -> Plan:
    """A recipe's plan on the slice called `where`."""
    loaded = load_recipe(recipe, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice(where))

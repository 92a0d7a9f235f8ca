"""Why a comparison has no plan for some slices, told once for all that have the same reason."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.hardware.mesh import axis_to_free
from affinage.hardware.slices import Slice
from affinage.planning.plan import dividing_batch, training_settings


@dataclass(frozen=True)
class LeftOut:
    """Slices that are left out for one reason, and what to do about it."""

    slices: tuple[str, ...]
    what: str
    fix: str


def left_out(recipe: Recipe, refused: Sequence[tuple[Slice, UserError]]) -> list[LeftOut]:
    """The reasons for which a recipe could not be planned, each with all slices that it holds for."""
    section, settings, _ = training_settings(recipe)
    sizes = recipe.mesh.values()
    devices = 0 if "auto" in sizes else math.prod(int(size) for size in sizes)
    groups: dict[tuple[str, str], list[str]] = {}
    batches = [batch for where, _ in refused if (batch := dividing_batch(recipe, where))]
    for where, error in refused:
        if devices and devices != where.devices:
            axis = axis_to_free({str(name): size for name, size in recipe.mesh.items()})
            of = f"{devices} device{'s' if devices > 1 else ''}"
            reason = (f"the recipe's mesh is of {of}", f"--set mesh.{axis}=auto takes all there are")
        elif dividing_batch(recipe, where):
            every = math.lcm(*batches)
            what = f"a batch of {settings.batch_size} does not divide over their devices"
            reason = (what, f"--set {section}.batch_size={every} does, over all of them")
        else:
            reason = (error.what, error.fix)
        groups.setdefault(reason, []).append(where.name)
    return [LeftOut(tuple(names), *reason) for reason, names in groups.items()]

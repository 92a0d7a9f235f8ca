"""A grid of settings: one run for each of its points, which share what they have in common."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from affinage.config.load import LoadedRecipe, load_recipe
from affinage.errors import UserError


@dataclass(frozen=True)
class Point:
    """One choice of every setting of the grid."""

    number: int  # from 1
    settings: dict[str, Any]  # key of the recipe -> value
    loaded: LoadedRecipe


def points(recipe: str, overrides: Sequence[str]) -> list[Point]:
    """The points of a recipe's `sweep`, the last setting varying fastest, each with its recipe.

    Raises:
        UserError: there is no grid, or a point of it is no recipe.
    """
    loaded = load_recipe(recipe, overrides)
    grid = loaded.recipe.sweep
    if not grid:
        raise UserError(
            "this recipe has no `sweep`",
            where=str(loaded.path),
            fix="Give settings and values: --set 'sweep={sft.steps: [100, 300], sft.schedule.peak_lr: [1e-3, 3e-4]}'",
        )
    found = []
    for number, values in enumerate(itertools.product(*grid.values()), 1):
        chosen = dict(zip(grid, values))
        words = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        name = f"name={loaded.recipe.name}-{number:03}"
        found.append(Point(number, chosen, load_recipe(recipe, [*overrides, *words, name, "sweep={}"])))
    return found

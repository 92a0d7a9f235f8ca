"""The learning rate of a recipe's trainings, drawn in the terminal."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from affinage.config.load import LoadedRecipe
from affinage.config.training import TrainSettings

_LINES = 24  # at most, for one training
_WIDTH = 48  # characters of the longest bar


def learning_rates(loaded: LoadedRecipe) -> dict[str, list[dict[str, Any]]]:
    """Of every training: steps (counted from 0, the first and the last among them) with their learning rates."""
    from affinage.training.choices import check_choices

    recipe = loaded.recipe
    rates = {}
    for name, settings in (("pretrain", recipe.pretrain), ("sft", recipe.sft), ("dpo", recipe.dpo)):
        if settings is not None:
            check_choices(settings, partial(_located, loaded, name))
            rates[name] = _rates(settings)
    return rates


def _located(loaded: LoadedRecipe, section: str, path: Sequence[str | int]) -> str:
    return loaded.locate((section, *path))


def drawn(name: str, rates: list[dict[str, Any]]) -> str:
    """One line for each step, with a bar that is as long as its learning rate is high."""
    top = max(row["learning_rate"] for row in rates)
    lines = [f"{name}: learning rate by step"]
    for row in rates:
        rate = row["learning_rate"]
        lines.append(f"{row['step']:>10,}  {rate:9.3e}  {'█' * max(round(_WIDTH * rate / top), 0)}")
    return "\n".join(lines)


def _rates(settings: TrainSettings) -> list[dict[str, Any]]:
    import jax.numpy as jnp

    from affinage.training.schedule import learning_rate

    rate, last = learning_rate(settings.schedule, settings.steps), settings.steps - 1
    warmup = max(settings.schedule.warmup(settings.steps) - 1, 0)
    even = {round(last * i / (_LINES - 2)) for i in range(_LINES - 1)}
    steps = sorted(even | {0, min(warmup, last), last})
    return [{"step": step, "learning_rate": float(rate(jnp.int32(step)))} for step in steps]

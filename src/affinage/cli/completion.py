"""What the shell proposes when a verb waits for a recipe, a run or a slice."""

import os
from collections.abc import Iterable
from pathlib import Path

import typer


def recipes(incomplete: str) -> list[str]:
    """Names of the packaged recipes; where none fits, the shell goes on with files."""
    from affinage.config.layers import packaged_recipes

    return _beginning(incomplete, packaged_recipes())


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, and after a slash those of their trainings."""
    from affinage.pipeline.models import TRAININGS, run_names

    folder = Path(ctx.params.get("runs") or os.environ.get("AFFINAGE_RUNS") or "runs")
    run, slash, _ = incomplete.partition("/")
    if slash:
        return _beginning(incomplete, (f"{run}/{name}" for name in TRAININGS if (folder / run / name).is_dir()))
    return _beginning(incomplete, run_names(folder))


def recipes_or_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of packaged recipes and of runs."""
    return [*dict.fromkeys([*recipes(incomplete), *models(ctx, incomplete)])]


def slices(incomplete: str) -> list[str]:
    """Common slices of TPUs and boxes of GPUs by their names."""
    from affinage.hardware.slices import compared

    return _beginning(incomplete, (one.name for one in compared()))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]

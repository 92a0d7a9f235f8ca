"""What the shell proposes when a verb waits for a recipe, a run or a slice."""

import os
from collections.abc import Iterable
from pathlib import Path

import typer


def recipes(incomplete: str) -> list[str]:
    """Names of the recipes that come along; where none fits, the shell goes on with files."""
    from affinage.config.layers import packaged_recipes

    return _beginning(incomplete, packaged_recipes())


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, and after a slash those of their trainings."""
    folder = _runs(ctx)
    run, slash, _ = incomplete.partition("/")
    if slash:
        return _beginning(
            incomplete, (f"{run}/{stage}" for stage in ("pretrain", "sft", "dpo") if (folder / run / stage).is_dir())
        )
    return _beginning(incomplete, _names(folder))


def recipes_or_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Both."""
    return [*dict.fromkeys([*recipes(incomplete), *models(ctx, incomplete)])]


def slices(incomplete: str) -> list[str]:
    """Common slices of TPUs and boxes of GPUs by their names."""
    from affinage.hardware.slices import compared

    return _beginning(incomplete, (one.name for one in compared()))


def _runs(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("runs") or os.environ.get("AFFINAGE_RUNS") or "runs")


def _names(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("*/recipe.json")) if folder.is_dir() else []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]

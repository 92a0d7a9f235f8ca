"""From a recipe file to one checked, frozen `Recipe` that knows where each of its values was written."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from affinage.config.layers import Layers, find_recipe, put_override, read_file
from affinage.config.mistakes import explain, settings_at, written
from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.paths import from_home
from affinage.secrets import secret_in


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, the file it came from, and where in it (or in its bases, or on the command line) each value stands."""

    recipe: Recipe
    path: Path
    raw: dict[str, Any]
    """What was written, after bases and overrides, before defaults."""
    locate: Callable[[Sequence[str | int]], str]
    """("pretrain", "steps") -> "recipes/quickstart.yaml:31"."""
    command: str = ""
    """The command that runs it again."""
    base: Path | None = None
    """The recipe that its file starts from."""

    def beside(self, path: str, key: Sequence[str | int]) -> Path:
        """Where a path is that stands under `key`: relative to the file it was written in, which may be a base.

        One that is not there is relative to the recipe, or to the working directory.
        """
        written = Path(self.locate(key).rpartition(":")[0])
        folders = (*([written.parent] if written.is_file() else []), self.path.parent, Path())
        candidates = [folder / from_home(path) for folder in folders]
        return next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe by path, or by name if it comes with affinage, with `key=value` overrides laid over it.

    `base: other.yaml` in a file starts from another recipe (beside it, or one that comes with affinage): mappings
    merge, lists and single values replace. Null switches off what can be off, such as a section or a limit; in a
    mapping with keys of the user's, such as `mesh` or the nodes of the model, it takes away what the base says.

    Raises:
        UserError: with one line for each thing that is wrong and where it was written.
    """
    path, layers = _layers(path_or_name, overrides)
    try:
        recipe = Recipe.model_validate(layers.value)
    except ValidationError as error:
        raise explain(error, Recipe, layers.value, layers.locate) from None
    return LoadedRecipe(recipe, path, layers.value, layers.locate, _command(path_or_name, overrides), layers.base)


def load_saved(path: Path, overrides: Sequence[str] = ()) -> tuple[LoadedRecipe, list[str]]:
    """Load the recipe.json of a run that any version made, and the names of the settings that were left out.

    Those are the ones that this version does not have, and the sections that are not complete without them.

    Raises:
        UserError: nothing can be made of it.
    """
    path, layers = _layers(path, overrides)
    left_out: list[str] = []
    while True:
        try:
            recipe = Recipe.model_validate(layers.value)
            loaded = LoadedRecipe(recipe, path, layers.value, layers.locate, _command(path, overrides), layers.base)
            return loaded, left_out
        except ValidationError as error:
            unknown = [found for found in error.errors() if found["type"] == "extra_forbidden"]
            wrong = {written(found["loc"], layers.value) for found in unknown or error.errors()}
            if () in wrong:
                raise explain(error, Recipe, layers.value, layers.locate) from None
            for *above, key in sorted(
                wrong, key=lambda path: (len(path), [str(step).rjust(9) for step in path]), reverse=True
            ):
                around: Any = layers.value
                for step in above:
                    around = around[step]
                del around[key]
                left_out.append(".".join(map(str, (*above, key))))


def _layers(path_or_name: str | Path, overrides: Sequence[str]) -> tuple[Path, Layers]:
    path = find_recipe(path_or_name)
    layers = read_file(path)
    for override in overrides:
        put_override(layers, override)
    layers.share()
    layers.value = _without_nulls(layers.value, ())
    _refuse_secrets(layers.value, (), layers.locate)
    return path, layers


def _refuse_secrets(value: Any, path: tuple[str | int, ...], locate: Callable[[Sequence[str | int]], str]) -> None:
    """What a recipe says stands in manifests, reports and model cards."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_secrets(child, (*path, key), locate)
    elif isinstance(value, str) and secret_in(value):
        raise UserError(
            "this holds a password or a token, which would be written into manifests and reports",
            where=locate(path),
            fix="Leave it to the environment: ~/.netrc for https, HF_TOKEN, WANDB_API_KEY, the clouds' own for gs, s3.",
        )


def _command(path_or_name: str | Path, overrides: Sequence[str]) -> str:
    # It is printed in reports and model cards, where nobody wants to read how this machine's folders are called.
    name = Path(path_or_name).name if Path(path_or_name).is_absolute() else str(path_or_name)
    return shlex.join(["affinage", "run", name, *(word for override in overrides for word in ("--set", override))])


def _without_nulls(value: Any, path: tuple[str, ...]) -> Any:
    """Drop the nulls in mappings with keys of the user's, which take away what the base says."""
    if not isinstance(value, dict):
        return value
    free = settings_at(Recipe, path) is None
    return {key: _without_nulls(child, (*path, key)) for key, child in value.items() if child is not None or not free}

"""From a recipe file to one checked, frozen `Recipe` that knows where each of its values was written."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from affinage.config.layers import find_recipe, put_override, read_file
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
    """Load a recipe by path, or a packaged one by name, with `key=value` overrides laid over it.

    `base: other.yaml` in a file starts from another recipe (beside it, or a packaged one): mappings merge, lists and
    single values replace. Null switches off what can be off, such as a section or a limit; in a mapping with keys of
    the user's, such as `mesh` or the nodes of the model, it removes what the base has.

    Raises:
        UserError: with one line for each thing that is wrong and where it was written.
    """
    return _load(path_or_name, overrides, None)


def load_saved(path: Path, overrides: Sequence[str] = ()) -> tuple[LoadedRecipe, list[str]]:
    """Load the recipe.json of a run that any version made, and the names of the settings that were left out.

    Those are the ones that this version does not have, and the sections that are not complete without them.

    Raises:
        UserError: nothing can be made of it.
    """
    left_out: list[str] = []
    return _load(path, overrides, left_out), left_out


def _load(path_or_name: str | Path, overrides: Sequence[str], left_out: list[str] | None) -> LoadedRecipe:
    path = find_recipe(path_or_name)
    layers = read_file(path)
    for override in overrides:
        put_override(layers, override)
    layers.share()
    layers.value = _without_nulls(layers.value, ())
    _refuse_secrets(layers.value, (), layers.locate)
    # It is printed in reports and model cards, where nobody wants to read how this machine's folders are called.
    name = Path(path_or_name).name if Path(path_or_name).is_absolute() else str(path_or_name)
    command = shlex.join(["affinage", "run", name, *(word for override in overrides for word in ("--set", override))])
    while True:
        try:
            recipe = Recipe.model_validate(layers.value)
            return LoadedRecipe(recipe, path, layers.value, layers.locate, command, layers.base)
        except ValidationError as error:
            unknown = [found for found in error.errors() if found["type"] == "extra_forbidden"]
            wrong = {written(found["loc"], layers.value) for found in unknown or error.errors()}
            if left_out is None or () in wrong:
                raise explain(error, Recipe, layers.value, layers.locate) from None
            deepest_first = sorted(wrong, key=lambda keys: (len(keys), [str(key).rjust(9) for key in keys]))[::-1]
            for *above, key in deepest_first:
                around: Any = layers.value
                for step in above:
                    around = around[step]
                del around[key]
                left_out.append(".".join(map(str, (*above, key))))


def _refuse_secrets(value: Any, path: tuple[str | int, ...], locate: Callable[[Sequence[str | int]], str]) -> None:
    """Refuse passwords and tokens: a recipe is copied into manifests, reports and model cards."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_secrets(child, (*path, key), locate)
    elif isinstance(value, str) and secret_in(value):
        raise UserError(
            "this holds a password or a token, which would be written into manifests and reports",
            where=locate(path),
            fix="Leave it to the environment: ~/.netrc for https, HF_TOKEN, WANDB_API_KEY, the clouds' own for gs, s3.",
        )


def _without_nulls(value: Any, path: tuple[str, ...]) -> Any:
    """Drop the nulls in mappings with keys of the user's, which remove what the base has."""
    if not isinstance(value, dict):
        return value
    free = settings_at(Recipe, path) is None
    return {key: _without_nulls(child, (*path, key)) for key, child in value.items() if child is not None or not free}

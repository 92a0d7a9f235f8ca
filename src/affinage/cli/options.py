"""Arguments and options that several verbs have, and what they stand for."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from affinage.cli import completion
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.pipeline.models import Target

RUNS = Path("runs")
_EXAMPLE = re.compile(r"^Examples?: (.+)$", re.MULTILINE)  # in the docstring of a verb
_DIFFERENCES = 3  # settings in which a run differs from the packaged recipe of its name, in a warning


def opt(help: str, *names: str, **more: Any) -> Any:
    """An option of a verb: its help, its names if they are not the parameter's, and what else typer takes."""
    return typer.Option(*names, help=help, **more)


def _argument(metavar: str, help: str, complete: Callable[..., list[str]]) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


RecipeArgument = Annotated[
    str, _argument("RECIPE|RUN", "A recipe file, a run, or a packaged recipe.", completion.recipes_or_models)
]
ModelArgument = Annotated[
    str,
    _argument(
        "MODEL",
        "A run (quickstart), a training of it (quickstart/pretrain), a checkpoint (quickstart/pretrain@1000), an "
        "import, or a Hugging Face folder.",
        completion.models,
    ),
]
RunArgument = Annotated[str, _argument("RUN", "A run, or its recipe.", completion.models)]
SetOption = Annotated[
    list[str] | None, opt("Change a setting, e.g. pretrain.steps=100. May be repeated.", "--set", metavar="KEY=VALUE")
]


def _is_a_folder(runs: Path) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(runs)):
        raise UserError(
            f"runs are kept in a folder, and {str(runs).replace(':/', '://', 1)} is a URL",
            where="--runs",
            fix="Mount the bucket (gcsfuse, mountpoint-s3, rclone mount) and name the folder that it is mounted at.",
        )
    return runs


RunsOption = Annotated[
    Path, opt("The folder of all runs.", "--runs", metavar="DIR", envvar="AFFINAGE_RUNS", callback=_is_a_folder)
]
LangOption = Annotated[Literal["en", "fr"] | None, opt("The language of the output.", "--lang", show_default=False)]
JsonOption = Annotated[bool, opt("Print JSON, for scripts.", "--json")]
ProfileOption = Annotated[
    str | None, opt("Write a trace of these steps of each training, e.g. 20-25.", "--profile", metavar="STEPS")
]
DryRunOption = Annotated[bool, opt("List what would run and why, and do nothing.", "--dry-run")]
UntilOption = Annotated[list[str] | None, opt("Stop after this step. May be repeated.", "--until", metavar="STEP")]
ForceOption = Annotated[
    list[str] | None, opt("Run this step again, and those that read it. May be repeated.", "--force", metavar="STEP")
]


@dataclass(frozen=True)
class PipelineOptions:
    """Options of the verbs that run the steps of a recipe."""

    overrides: SetOption = None
    runs: RunsOption = RUNS
    force: ForceOption = None
    profile: ProfileOption = None
    dry_run: DryRunOption = False
    as_json: JsonOption = False


def with_options(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options that dataclasses list; it gets those of each together, under the name given here.

    For example `@with_options(how=PipelineOptions)`.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(verb).parameters.values()
        own = [each.replace(kind=keyword) for each in parameters if each.name not in groups]
        shared = [
            inspect.Parameter(option.name, keyword, default=option.default, annotation=option.type)
            for group in groups.values()
            for option in fields(group)
        ]

        @functools.wraps(verb)
        def wrapped(**values: Any) -> None:
            together = {
                name: group(**{option.name: values.pop(option.name) for option in fields(group)})
                for name, group in groups.items()
            }
            verb(**values, **together)

        vars(wrapped)["__signature__"] = inspect.Signature([*own, *shared])
        return wrapped

    return decorate


class Verb(TyperCommand):
    """A command whose message about a missing argument or option ends with the first example of its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as the base class does; of a missing parameter the error has the example, too."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            example = _EXAMPLE.search(self.help or "")
            if example and not error.message:  # a parameter with a wrong value has a message of its own
                error.message = f"For example: {example[1]}"
            raise


def warn(message: str) -> None:
    """Print a warning in one line of standard error."""
    print(f"Warning: {message}", file=sys.stderr)


def find(name: str, runs: Path) -> "Target":
    """What a name stands for, with a warning where it may stand for something else."""
    from affinage.pipeline.models import resolve

    target = resolve(name, runs)
    if target.warning:
        warn(target.warning)
    return target


def load(name: str, overrides: Sequence[str] | None, runs: Path, *, lenient: bool = False) -> "LoadedRecipe":
    """The recipe that a name stands for, with `overrides` laid over it.

    With `lenient`, settings of a run that are gone are left out, with a warning. A run that has the name of a packaged
    recipe and other settings is warned of.
    """
    from affinage.config.layers import packaged_recipes
    from affinage.pipeline.models import recipe_of

    target = find(name, runs)
    loaded = recipe_of(target, runs, overrides or (), warn=warn if lenient else None)
    packaged = packaged_recipes().get(name) if target.kind == "run" else None
    if packaged is not None and (differences := _differences(loaded, name, overrides or ())):
        warn(f"`{name}` is the run {target.path}, made with {differences}; the packaged recipe is {packaged}")
    return loaded


def _differences(loaded: "LoadedRecipe", packaged: str, overrides: Sequence[str]) -> str:
    """The settings of a run that are not those of a packaged recipe, as `--set` takes them."""
    import json

    from affinage.config.load import load_recipe
    from affinage.differing import differing

    try:
        both = [each.recipe.model_dump(mode="json") for each in (loaded, load_recipe(packaged, overrides))]
    except UserError:
        return ""
    found = [f"{key}={json.dumps(values[0], ensure_ascii=False)}" for key, values in differing(both)]
    more = f" and {len(found) - _DIFFERENCES} other settings" if len(found) > _DIFFERENCES else ""
    return ", ".join(found[:_DIFFERENCES]) + more

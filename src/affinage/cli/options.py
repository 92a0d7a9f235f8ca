"""The program `affinage`, to which every verb registers itself, and what verbs share: options, names, opened models."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from affinage.cli.output import working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.generation.engine import LoadedModel
    from affinage.pipeline.models import Target

RUNS = Path("runs")
MAX_RESERVED = 4096  # tokens of context for which memory is reserved, of a model from elsewhere that reads more
HELP: dict[str, Any] = {"no_args_is_help": True, "context_settings": {"help_option_names": ["-h", "--help"]}}

app = typer.Typer(
    name="affinage",
    help="From raw text in two languages to a released, evaluated chat model.\n\nBegin with: affinage run quickstart",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    **HELP,
)


def verbs(name: str, help: str, **more: Any) -> typer.Typer:
    """A group of verbs."""
    group = typer.Typer(help=help, **HELP, **more)
    app.add_typer(group, name=name)
    return group


def opt(help: str, *names: str, **more: Any) -> Any:
    """An option of a verb: its help, its names if they are not the parameter's, and what else typer takes."""
    return typer.Option(*names, help=help, **more)


def arg(metavar: str, help: str) -> Any:
    """An argument of a verb."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def _is_a_folder(runs: Path) -> Path:
    scheme, colon, _ = str(runs).partition(":/")
    if colon and scheme.isalnum():
        fix = "Mount the bucket (gcsfuse, mountpoint-s3, rclone mount) and name the folder that it is mounted at."
        what = f"runs are kept in a folder, and {str(runs).replace(':/', '://', 1)} is a URL"
        raise UserError(what, where="--runs", fix=fix)
    return runs


def _mesh(text: str) -> dict[str, int | str]:
    """The devices along each axis, from `fsdp=4,tensor=2`."""
    sizes: dict[str, int | str] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis in sizes or not (size.isdecimal() or size == "auto"):
            fix = "For example: --mesh tensor=2, or --mesh fsdp=4,tensor=2; one size may be auto."
            raise UserError(f"`{text}` is not a mesh", where="--mesh", fix=fix)
        sizes[axis] = size if size == "auto" else int(size)
    return sizes


RecipeArgument = Annotated[str, arg("RECIPE|RUN", "A recipe file, a run, or a packaged recipe.")]
_MODEL = (
    "A run (quickstart), a training of it (quickstart/pretrain), a checkpoint (quickstart/pretrain@1000), an average "
    "(quickstart/pretrain@ema or @mean:5), an import, or a Hugging Face folder."
)
ModelArgument = Annotated[str, arg("MODEL", _MODEL)]
RunArgument = Annotated[str, arg("RUN", "A run, or its recipe.")]
SetOption = Annotated[
    list[str] | None, opt("Change a setting, e.g. pretrain.steps=100. May be repeated.", "--set", metavar="KEY=VALUE")
]
RunsOption = Annotated[
    Path, opt("The folder of all runs.", "--runs", metavar="DIR", envvar="AFFINAGE_RUNS", callback=_is_a_folder)
]
LangOption = Annotated[Literal["en", "fr"] | None, opt("The language of the output.", "--lang", show_default=False)]
JsonOption = Annotated[bool, opt("Print JSON, for scripts.", "--json")]
DryRunOption = Annotated[bool, opt("List what would run and why, and do nothing.", "--dry-run")]
UntilOption = Annotated[list[str] | None, opt("Stop after this step. May be repeated.", "--until", metavar="STEP")]
ForceOption = Annotated[
    list[str] | None, opt("Run this step again, and those that read it. May be repeated.", "--force", metavar="STEP")
]
_MESH = "Split the weights over devices, e.g. tensor=2 or fsdp=4,tensor=2. Default: each has a copy."
_MAX_LEN = (
    "Longest prompt and answer together. Default: what the model was trained on; for a model from elsewhere "
    f"{MAX_RESERVED} where memory is reserved for it (serve, eval)."
)
MeshOption = Annotated[Any, opt(_MESH, "--mesh", metavar="AXIS=DEVICES,...", parser=_mesh, show_default=False)]
MaxLenOption = Annotated[int | None, opt(_MAX_LEN, "--max-model-len", metavar="TOKENS", min=2, show_default=False)]


class PipelineOptions(NamedTuple):
    """Options of the verbs that run the steps of a recipe."""

    overrides: list[str] | None = None
    runs: Path = RUNS
    force: list[str] | None = None
    dry_run: bool = False
    as_json: bool = False


def warn(message: str) -> None:
    """Print a warning in one line of standard error."""
    print(f"Warning: {message}", file=sys.stderr)


def find(name: str, runs: Path) -> "Target":
    """Returns what a name stands for; warns if it may stand for something else."""
    from affinage.pipeline.models import resolve

    target = resolve(name, runs)
    if target.warning:
        warn(target.warning)
    return target


def load(
    name: str, overrides: Sequence[str] | None, runs: Path, *, lenient: bool = False
) -> "tuple[LoadedRecipe, Path | None]":
    """Returns the recipe that a name stands for, with `overrides` laid over it, and the folder of a run that is named.

    With `lenient`, settings of a run that no longer exist are left out, with a warning. Another warning is printed for
    a run that has the name of a packaged recipe and other settings.
    """
    from affinage.config.load import load_recipe, packaged_recipes
    from affinage.pipeline.models import recipe_of

    target = find(name, runs)
    loaded = recipe_of(target, runs, overrides or (), warn=warn if lenient else None)
    packaged = packaged_recipes().get(name) if target.kind == "run" else None
    if packaged is not None and recipe_of(target, runs, warn=lambda _: None).recipe != load_recipe(packaged).recipe:
        warn(f"`{name}` is the run {target.path}, whose settings are not those of the packaged recipe {packaged}")
    return loaded, target.run


def model_of(name: str, runs: Path, *, announce: bool = True) -> "tuple[Target, dict[str, Any]]":
    """Returns the model that a name stands for, and how far it is trained (`state_of`), which is printed (`announce`).

    Raises:
        UserError: there is none, or it is a run that is not complete; with the command that completes it.
    """
    from affinage.cluster.processes import is_first
    from affinage.pipeline.models import check_complete, checkpoints_of, locate, resolve, state_of

    target = find(name, runs) if announce else resolve(name, runs)
    check_complete(target, runs)
    state, model = state_of(target, runs), locate(target, runs)
    is_there = not isinstance(model.step, int) or (checkpoints_of(model.path, model.step) / str(model.step)).is_dir()
    if announce and state and is_there and is_first():
        print(f"Model: {describe(state)}", file=sys.stderr)
    return model, state


def describe(state: dict[str, Any]) -> str:
    """How far a model is trained, in words."""
    return f"{state['model']}, step {state['step']:,} of {state['steps']:,}"


def opened(
    name: str, runs: Path, mesh: Any, max_model_len: int | None, *, reserves: bool = False, announce: bool = True
) -> "tuple[LoadedModel, dict[str, Any]]":
    """Returns the model that a name stands for, opened on a mesh for texts of a length, and how far it is trained.

    With `reserves`, memory is held for the whole context: a model from elsewhere, whose context may be far longer than
    anybody needs, is limited to `MAX_RESERVED` unless a limit is given, and this is printed.

    Raises:
        UserError: as `model_of` and `open_model`, and for a context that is longer than the model's.
    """
    target, state = model_of(name, runs, announce=announce)  # before JAX is imported
    from affinage.cluster.processes import is_first
    from affinage.pipeline.opening import open_model

    with working(f"opening {name}"):
        model = open_model(target, runs, mesh=mesh)
    longest, length = model.context, max_model_len
    if length is not None and length > longest:
        what = f"`{name}` reads {longest:,} tokens at once, not {length:,}"
        raise UserError(what, where="--max-model-len", fix=f"Write {longest} at most, or leave it out.")
    if length is None and reserves and longest > MAX_RESERVED and not state:
        length = MAX_RESERVED
        if is_first():
            limited = f"`{name}` can read {longest:,} tokens at once; {length:,} are used"
            print(f"{limited}. More take more memory: --max-model-len {longest}", file=sys.stderr)
    return replace(model, context=length or longest), state

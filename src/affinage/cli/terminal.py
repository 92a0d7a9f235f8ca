"""What verbs share: the program and its options, names and opened models, and the one way to print a result."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import rich
import typer
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.table import Table

from affinage.cluster.processes import is_first
from affinage.durations import duration
from affinage.errors import UserError, plain

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
    if re.match("[a-z0-9]+:/", str(runs)):
        what = f"runs are kept in a folder, and {str(runs).replace(':/', '://', 1)} is a URL"
        raise UserError(what, where="--runs", fix="Mount the bucket (gcsfuse, mountpoint-s3), and name that folder.")
    return runs


def _mesh(text: str) -> dict[str, int | str]:
    """The devices along each axis, from `fsdp=4,tensor=2`."""
    from affinage.config.training import MeshAxis

    parts, axes = dict(part.strip().partition("=")[::2] for part in text.split(",")), get_args(MeshAxis)
    sizes_are_valid = all(size.isdecimal() or size == "auto" for size in parts.values())
    if not sizes_are_valid or not parts.keys() <= {*axes} or len(parts) <= text.count(","):
        fix = f"For example: --mesh fsdp=4,tensor=2. One size may be auto; the axes are {', '.join(axes)}."
        raise UserError(f"`{text}` is not a mesh", where="--mesh", fix=fix)
    return {axis: size if size == "auto" else int(size) for axis, size in parts.items()}


RecipeArgument = Annotated[str, arg("RECIPE|RUN", "A recipe file, a run, or a packaged recipe.")]
_MODEL = "A run, a training (RUN/pretrain), a checkpoint (...@1000, @ema, @mean:5), an import, a Hugging Face folder."
ModelArgument = Annotated[str, arg("MODEL", _MODEL)]
RunArgument = Annotated[str, arg("RUN", "A run, or its recipe.")]
SetOption = Annotated[list[str] | None, opt("Change a setting. May be repeated.", "--set", metavar="KEY=VALUE")]
_RUNS: dict[str, Any] = {"metavar": "DIR", "envvar": "AFFINAGE_RUNS", "callback": _is_a_folder}
RunsOption = Annotated[Path, opt("The folder of all runs.", "--runs", **_RUNS)]
LangOption = Annotated[Literal["en", "fr"] | None, opt("The language of the output.", "--lang", show_default=False)]
JsonOption = Annotated[bool, opt("Print JSON, for scripts.", "--json")]
DryRunOption = Annotated[bool, opt("List what would run and why, and do nothing.", "--dry-run")]
UntilOption = Annotated[list[str] | None, opt("Stop after this step. May be repeated.", "--until", metavar="STEP")]
ForceOption = Annotated[list[str] | None, opt("Run this step, and its readers, again.", "--force", metavar="STEP")]
_MESH = "Split the weights over devices, e.g. tensor=2 or fsdp=4,tensor=2. Default: each has a copy."
MeshOption = Annotated[Any, opt(_MESH, "--mesh", metavar="AXIS=DEVICES,...", parser=_mesh, show_default=False)]
_MAX_LEN = f"Longest prompt and answer together. Default: the model's; serve, eval of other models: {MAX_RESERVED}."
MaxLenOption = Annotated[int | None, opt(_MAX_LEN, "--max-model-len", metavar="TOKENS", min=2, show_default=False)]
TrainingName = Literal["pretrain", "sft", "dpo"]


class PipelineOptions(NamedTuple):
    """Options of the verbs that run the steps of a recipe."""

    overrides: list[str] | None = None
    runs: Path = RUNS
    force: list[str] | None = None
    dry_run: bool = False
    as_json: bool = False


def must_be_new(path: Path) -> None:
    """Raise UserError if a path that is to be written is there already."""
    if path.exists():
        raise UserError("this is there already", where=str(path), fix="Choose another name, or remove it first.")


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
    """Returns the recipe that a name stands for, under `overrides`, and the folder of a run that is named.

    With `lenient`, settings of a run that no longer exist are left out, with a warning.
    """
    from affinage.config.load import load_recipe, packaged_recipes
    from affinage.pipeline.models import recipe_of

    target = find(name, runs)
    loaded = recipe_of(target, runs, overrides or (), warn=warn if lenient else None)
    packaged = packaged_recipes().get(name) if target.kind == "run" else None
    if packaged is not None and recipe_of(target, runs, warn=lambda _: None).recipe != load_recipe(packaged).recipe:
        warn(f"`{name}` is the run {target.path}, whose settings are not those of the packaged recipe {packaged}")
    return loaded, target.run


def characters_of(loaded: "LoadedRecipe", run: Path) -> int | None:
    """Returns the number of ids of a run's tokenizer of characters; None of another kind, or before it is made."""
    from affinage.results import TokenizerResult, read_result

    made = read_result(run / "train-tokenizer", TokenizerResult)
    return made.vocabulary if made and loaded.recipe.tokenizer.kind == "char" else None


def model_of(target: "Target", runs: Path) -> "tuple[Target, dict[str, Any]]":
    """Returns the model that a target stands for, and its `state_of`; UserError: there is none, or it is incomplete."""
    from affinage.pipeline.models import check_complete, locate, state_of

    check_complete(target, runs)
    return locate(target, runs), state_of(target, runs)


def describe(state: dict[str, Any]) -> str:
    """Returns how far a model is trained, in words."""
    return f"{state['model']}, step {state['step']:,} of {state['steps']:,}"


def announce(state: dict[str, Any]) -> None:
    """Print how far a model that has been opened is trained, on standard error."""
    if state and is_first():
        print(f"Model: {describe(state)}", file=sys.stderr)


def opened(
    name: "str | Target", runs: Path, mesh: Any, max_model_len: int | None, *, reserves: bool = False
) -> "tuple[LoadedModel, dict[str, Any]]":
    """Returns a model, opened on a mesh for texts of a length, and how far it is trained, which is printed.

    With `reserves`, memory is held for the whole context: without a length, a model from elsewhere is limited to
    `MAX_RESERVED` tokens. UserError: as `model_of` and `open_model`, and for a length above the model's context.
    """
    target, state = model_of(find(name, runs) if isinstance(name, str) else name, runs)  # before JAX is imported
    from affinage.pipeline.opening import open_model

    with working(f"opening {target.name}"):
        model = open_model(target, runs, mesh=mesh)
    longest, length = model.context, max_model_len
    if length is not None and length > longest:
        what = f"`{target.name}` reads {longest:,} tokens at once, not {length:,}"
        raise UserError(what, where="--max-model-len", fix=f"Write {longest} at most, or leave it out.")
    if length is None and reserves and longest > MAX_RESERVED and not state:
        length = MAX_RESERVED
        if is_first():
            warn(f"of {longest:,} tokens of context, {length:,} are used; for all of them: --max-model-len {longest}")
    announce(state)
    return replace(model, context=length or longest), state


# ---- what is printed ----

console = rich.get_console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 10_000  # a program reads lines, and one that is folded is two
_WORD = 24  # letters
_LONG = 10**12  # numbers from here on, such as FLOPs, are written with an exponent
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def emit(result: Any, as_json: bool, view: Iterable[RenderableType] | None = None) -> None:
    """Print a result, values of JSON: as one JSON document, or as `view`; without a view, as `described(result)`."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=1, default=list))
        return
    for part in described(result) if view is None else view:
        write(part)


def write(part: RenderableType) -> None:
    """Print a line or a table for people."""
    console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str), crop=False)


def described(data: Any, indent: str = "") -> Iterator[RenderableType]:
    """Yield the text of any result: rows as a table, a mapping as a line for each of its keys.

    Values of keys that end in `bytes`, `seconds` and `flops` have units; empty values are left out.
    """
    if isinstance(data, list):
        yield table(data)
        return
    for key, value in data.items():
        inner = [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else []
        if value in _EMPTY:
            continue
        if inner and all(isinstance(each, Mapping) for each in inner):
            rows = [{"": name, **each} for name, each in value.items()] if isinstance(value, Mapping) else value
            yield f"\n{_title(key)}"
            yield table(rows)
        elif isinstance(value, Mapping) and any(isinstance(each, Mapping | list) for each in inner):
            yield f"{indent}{_title(key)}:"
            yield from described(value, indent + "  ")
        else:
            yield f"{indent}{_title(key)}: {_in_words(key, value)}"


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a column for each key that has a value in any of the rows; numbers are on the right.

    Where it is wider than the terminal, cells are folded between words, and inside those of over `_WORD` letters.
    """
    drawn, columns = Table(box=None, pad_edge=False), []
    for key in dict.fromkeys(key for row in rows for key, value in row.items() if value not in _EMPTY):
        cells = [_in_words(key, row.get(key)) for row in rows]
        numbers = all(re.match(r"$|[-–$\d]", cell) for cell in cells)
        longest = max(len(word) for cell in (_title(key), *cells) for word in (cell.split() or [""]))
        justify: Literal["left", "right"] = "right" if numbers else "left"
        drawn.add_column(_title(key), justify=justify, overflow="fold", min_width=min(longest, _WORD))
        columns.append(cells)
    for row in zip(*columns):
        drawn.add_row(*row)
    return drawn


def _title(key: str) -> str:
    name = plain(str(key))  # with a dot it is that of a setting, which is left as it is written
    return name if "." in name else name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


_UNITS: dict[str, Callable[[Any], str]] = {"bytes": decimal, "seconds": duration, "flops": "{:.3g}".format}


def _in_words(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, Mapping):
        has_unit = key.endswith((*_UNITS,))
        return ", ".join(f"{plain(str(at))} {_in_words(key if has_unit else at, each)}" for at, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_in_words(key, each) for each in value)
    if not isinstance(value, int | float):
        return plain(str(value))
    for ending, form in _UNITS.items():
        if key.endswith(ending):
            return form(value)
    whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if whole and abs(value) < _LONG else f"{value:.4g}"


def only_data_on_stdout(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Inside, if wanted, text for people goes to standard error, so that standard output holds the JSON alone."""
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


def counted(count: int, thing: str) -> str:
    """A number of things, named in the singular: "1 step", "2,000 steps"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def listed(names: Sequence[str], most: int) -> str:
    """Names with commas; of several more than `most` the first ones."""
    return ", ".join(names) if len(names) <= most + 1 else f"{', '.join(names[:most])} and {len(names) - most} more"


@contextlib.contextmanager
def working(name: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done; yields a function that shows a phase, such as "30 of 90 choices"."""
    with Console(file=sys.stderr).status(f"{name} ...") as status:
        yield lambda phase: status.update(f"{name}: {phase}")

"""The verb `checkpoint`: what a training saved, and whether it is still what was saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RunsOption
from affinage.cli.working import Working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore

group = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, show, compare and verify the checkpoints of a training.\n\nExample: affinage checkpoint ls quickstart",
)

CUT_OFF = "not complete: a save was cut off here"

TrainingArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run (quickstart) or a training of it (quickstart/pretrain).",
        show_default=False,
        autocompletion=completion.models,
    ),
]
OneArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[@STEP]",
        help="A checkpoint; the newest if no step is named.",
        show_default=False,
        autocompletion=completion.models,
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.add_typer(group, name="checkpoint")


@group.command("ls")
def ls(training: TrainingArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """List the checkpoints of a training.

    Example: affinage checkpoint ls quickstart/pretrain
    """
    from affinage.checkpoint.looking import listing

    found = listing(_store(training, runs)[0])
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for each in found:
        said = (each["saved"] or "damaged") if each["complete"] else CUT_OFF
        print(f"{each['step']:>10,}  {each['bytes'] / 1e6:10,.1f} MB  {said}")


@group.command("show")
def show(checkpoint: OneArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays.

    Example: affinage checkpoint show quickstart/pretrain@300
    """
    from affinage.checkpoint.looking import arrays

    store, step = _checkpoint(checkpoint, runs)
    facts = {"step": step, "fingerprint": store.fingerprint(step), "arrays": arrays(store, step), **store.meta(step)}
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    facts.pop("settings", None)  # those that decide over numbers are in the identity
    _print_nested(facts)


@group.command("diff")
def diff(
    one: OneArgument,
    other: OneArgument,
    numbers: Annotated[bool, typer.Option("--arrays", help="Compare the arrays, too; reads both whole.")] = False,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Say in what two checkpoints differ: settings, data, versions, mesh; with --arrays, bit for bit.

    Example: affinage checkpoint diff quickstart/pretrain@200 quickstart/pretrain@300 --arrays
    """
    from affinage.checkpoint.looking import compare

    with Working("reading checkpoints"):
        found = compare(_checkpoint(one, runs), _checkpoint(other, runs), numbers=numbers)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for each in found["facts"]:
        print(f"{each['name']}: {each['saved']} -> {each['now']}")
    if not found["facts"]:
        print("saved by the same settings, data and versions")
    if not numbers:
        return
    for each in found["arrays"]["different"]:
        most = "another shape, or not finite" if each["most"] is None else f"differs by {each['most']:.3g} at most"
        print(f"{each['name']} {each['shape']}: {most}")
    for name in found["arrays"]["only"]:
        print(f"{name}: in one of them only")
    print(f"{found['arrays']['same']} arrays are the same bit for bit")


@group.command("verify")
def verify(checkpoint: OneArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every file of one checkpoint, or of all of a training, and compare it with what was written.

    The exit status is 2 if one is damaged, or none is complete. `sha256sum -c SHA256SUMS` in its folder does the same
    without affinage.

    Example: affinage checkpoint verify quickstart
    """
    store, step = _store(checkpoint, runs)
    steps = _steps(store)
    asked = steps if step is None else [_known(store, step)]
    found = {}
    with Working("reading checkpoints") as working:
        for place, number in enumerate(asked):
            working.progressed(f"{place} of {len(asked)}")
            found[number] = store.damage(number)
    if as_json:
        print(json.dumps([{"step": number, "damage": said or None} for number, said in found.items()], indent=1))
    else:
        for number, said in found.items():
            print(f"{number:>10,}  {said or 'whole'}")
        for number in (number for number, _ in store.entries() if step is None and number not in steps):
            print(f"{number:>10,}  {CUT_OFF}")
    damaged = [number for number, said in found.items() if said]
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(found)} checkpoints are damaged",
            where=str(store.folder),
            fix="A training goes on from the newest whole one by itself; copy a damaged one again if it has a copy.",
        )


def _store(spec: str, runs: Path) -> "tuple[CheckpointStore, int | None]":
    from affinage.stages.models import is_hub_folder, locate_model

    folder, step = locate_model(spec, runs)
    if is_hub_folder(folder):
        raise UserError("a Hugging Face folder has no checkpoints", where=spec)
    from affinage.checkpoint.looking import store_of

    return store_of(folder), step


def _checkpoint(spec: str, runs: Path) -> "tuple[CheckpointStore, int]":
    store, step = _store(spec, runs)
    steps = _steps(store)
    return store, steps[-1] if step is None else _known(store, step)


def _steps(store: "CheckpointStore") -> list[int]:
    """The complete steps; raises UserError if there are none."""
    if steps := store.steps():
        return steps
    where = str(store.folder)
    if cut_off := ", ".join(str(step) for step, _ in store.entries()):
        fix = "Every folder of a whole checkpoint has a SHA256SUMS. Train the model again, or copy them again."
        raise UserError(f"no checkpoint is complete, only parts of these are there: {cut_off}", where=where, fix=fix)
    raise UserError("there is no checkpoint", where=where, fix="Train the model first.")


def _known(store: "CheckpointStore", step: int) -> int:
    if step not in store.steps():
        listed = ", ".join(f"@{known}" for known in store.steps())
        raise UserError(f"there is no checkpoint of step {step}", where=str(store.folder), fix=f"There are {listed}.")
    return step


def _print_nested(facts: Mapping[str, Any], indent: int = 0) -> None:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            print(f"{' ' * indent}{name}:")
            _print_nested(value, indent + 2)
        else:
            print(f"{' ' * indent}{name}: {value}")

"""The verb `checkpoint`: what a training saved, and whether it is still what was saved."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RunsOption
from affinage.cli.terminal import counted
from affinage.cli.working import Working
from affinage.errors import UserError, plain

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore
    from affinage.checkpoint.remote_steps import RemoteSteps

group = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, show, compare and verify the checkpoints of a training.\n\nExample: affinage checkpoint ls quickstart",
)

_SEEN = ("step", "seal", "fingerprint", "arrays")  # of a checkpoint, whatever it says of itself
CUT_OFF = "it is not complete: a save, or a copy, was cut off here"

TrainingArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run (quickstart), a training of it (quickstart/pretrain), or the URL of a copy.",
        show_default=False,
        autocompletion=completion.models,
    ),
]
OneArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[@STEP]",
        help="A checkpoint, here or at a URL; the newest if no step is named.",
        show_default=False,
        autocompletion=completion.models,
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.add_typer(group, name="checkpoint")


@group.callback()
def on_the_processor() -> None:
    """What all of them do first."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerator may be taken by the training whose checkpoints these are


@group.command("ls")
def ls(training: TrainingArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """List the checkpoints of a training.

    Example: affinage checkpoint ls quickstart/pretrain
    """
    from affinage.checkpoint.looking import listing

    found = _remote_listing(training) if "://" in training else listing(_store(training, runs)[0])
    if as_json:
        print(json.dumps(found, indent=1))
        return
    _say_which(training, runs)
    if not found:
        print("no checkpoint yet", file=sys.stderr)
    for each in found:
        said = each["why_not"] or plain(str(each["saved"] or "damaged"))
        print(f"{each['step']:>10,}  {each['bytes'] / 1e6:10,.1f} MB  {said}")


@group.command("show")
def show(
    checkpoint: OneArgument,
    numbers: Annotated[bool, typer.Option("--arrays", help="Read the arrays whole, for their fingerprint.")] = False,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays; with --arrays, their fingerprint.

    The fingerprint is of the numbers alone: checkpoints of the same state have the same one, whoever saved them, when,
    and on which mesh. The seal is of the files: this save and its copies have it, and no other save.
    The contents of its arrays are only read with --arrays; `affinage checkpoint verify` reads them, too.

    Example: affinage checkpoint show quickstart/pretrain@2200
    """
    from affinage.checkpoint.looking import arrays, fingerprint, fingerprints

    seen: dict[str, Any]
    with contextlib.ExitStack() as stack:
        if numbers:
            stack.enter_context(Working("reading a checkpoint"))
        store, step = stack.enter_context(_checkpoint(checkpoint, runs))
        seen, held = {"step": step, "seal": store.seal_hash(step)}, arrays(store, step)
        if numbers:
            trees = fingerprints(store, step)
            seen["fingerprint"] = fingerprint(trees)
            held = {name: tree | {"fingerprint": trees[name]} for name, tree in held.items()}
        seen["arrays"] = held
        # What it says of itself does not take the place of what was seen.
        said = {name: fact for name, fact in store.meta(step).items() if name not in _SEEN}
    if not numbers and "://" not in checkpoint:  # of a copy all was compared
        name = checkpoint.partition("@")[0]
        looks = f"`affinage checkpoint verify {name}@{step}` looks at them"
        print(f"its arrays were not read: {looks}, `show --arrays` has their fingerprint", file=sys.stderr)
    facts = seen | said
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

    Example: affinage checkpoint diff quickstart/pretrain@2100 quickstart/pretrain@2200 --arrays
    """
    from affinage.checkpoint.looking import compare
    from affinage.config.yaml import brief

    with (
        Working("reading checkpoints"),
        _checkpoint(one, runs) as first,
        _checkpoint(other, runs) as second,
    ):
        found = compare(first, second, numbers=numbers)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for each in found["facts"]:
        print(plain(f"{each['name']}: {brief(each['saved'], 80)} -> {brief(each['now'], 80)}"))
    if not found["facts"]:
        print("saved by the same settings, data and versions")
    if not numbers:
        return
    for each in found["arrays"]["different"]:
        most = "another shape, or not finite" if each["most"] is None else f"differs by {each['most']:.3g} at most"
        torn = f", numbers that are not finite: {each['not_finite']}" if each["not_finite"] else ""
        print(plain(f"{each['name']} {each['shape']}: {most}{torn}"))
    for name in found["arrays"]["only"]:
        print(plain(f"{name}: in one of them only"))
    same = found["arrays"]["same"]
    print(f"{counted(same, 'array')} {'is' if same == 1 else 'are'} the same bit for bit")


@group.command("verify")
def verify(checkpoint: OneArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every file of one checkpoint, or of all of a training, and compare it with what was written.

    Of a run it is the last training.

    The exit status is 2 if one is damaged, or none is complete. `sha256sum -c SHA256SUMS` in its folder does the same
    without affinage. Where $AFFINAGE_SEAL_KEY_FILE names a key, one that is not signed with it is as good as damaged.

    Example: affinage checkpoint verify quickstart
    """
    from affinage.checkpoint.seal import UNSIGNED
    from affinage.signing import signing_key

    whole = "whole, and signed" if signing_key() else "whole"
    found: dict[int, str] = {}
    if "://" in checkpoint:
        with Working("reading checkpoints"):
            where, found, not_read = _verified_remote(checkpoint)
    else:
        store, step = _store(checkpoint, runs)
        steps, where = _steps(store), str(store.folder)
        asked = steps if step is None else [_known(store, step)]
        with Working("reading checkpoints") as working:
            for place, number in enumerate(asked):
                working.progressed(f"{place} of {len(asked)}")
                found[number] = store.damage(number)
        there = [number for number, _ in store.entries() if step is None]
        not_read = {number: why for number in there if (why := store.why_not_read(number))}
    if as_json:
        rows = [
            {"step": number, "damage": found.get(number) or None, "why_not": not_read.get(number, "")}
            for number in sorted({*found, *not_read})
        ]
        print(json.dumps(rows, indent=1))
    else:
        _say_which(checkpoint, runs)
        for number, said in found.items():
            print(f"{number:>10,}  {plain(said) or whole}")
        for number, why in not_read.items():
            print(f"{number:>10,}  {why}")
    damaged = [number for number, said in found.items() if said]
    which = f"{len(damaged)} of {counted(len(found), 'checkpoint')} {'is' if len(damaged) == 1 else 'are'}"
    if damaged and all(found[number] == UNSIGNED for number in damaged):
        raise UserError(
            f"{which} not signed with this key",
            where=where,
            fix="`affinage checkpoint sign` signs those that are yours; if others may write there, they may be theirs.",
        )
    if damaged:
        raise UserError(
            f"{which} damaged",
            where=where,
            fix="A training goes on from the newest whole one by itself; copy a damaged one again if it has a copy.",
        )


@group.command("sign")
def sign(checkpoint: OneArgument, runs: RunsOption = RUNS) -> None:
    """Sign one checkpoint, or all of a training, with the key in the file that $AFFINAGE_SEAL_KEY_FILE names.

    For those that were saved while it was not set, or with another key; each is compared with its seal before. With the
    variable set every save is signed, and nothing else is restored.

    Example: AFFINAGE_SEAL_KEY_FILE=~/seal.key affinage checkpoint sign quickstart
    """
    if "://" in checkpoint:
        fix = "Sign it in the folder of its run: what is there is copied to the URL when the training goes on."
        raise UserError("a copy at a URL is not signed there", where=checkpoint, fix=fix)
    store, step = _store(checkpoint, runs)
    _say_which(checkpoint, runs)
    for number in _steps(store) if step is None else [_known(store, step)]:
        with Working("reading a checkpoint"):
            store.sign(number)
        print(f"{number:>10,}  signed")


def _say_which(spec: str, runs: Path) -> None:
    """Where a run of several trainings is named: which of them follows."""
    from affinage.pipeline.models import trainings_of

    name = spec.partition("@")[0]
    trainings = [] if "://" in spec else trainings_of(name, runs)
    if len(trainings) > 1:
        print(f"{trainings[0]}, the last training of {name}; others: {', '.join(trainings[1:])}", file=sys.stderr)


def _store(spec: str, runs: Path) -> "tuple[CheckpointStore, int | None]":
    from affinage.pipeline.models import is_hub_folder, locate_model

    folder, step = locate_model(spec, runs)
    if is_hub_folder(folder):
        raise UserError("a Hugging Face folder has no checkpoints", where=spec)
    from affinage.checkpoint.looking import store_of

    return store_of(folder), step


@contextlib.contextmanager
def _checkpoint(spec: str, runs: Path) -> "Iterator[tuple[CheckpointStore, int]]":
    """The store and the step of a checkpoint; of one at a URL, a copy that is there for a while."""
    if "://" not in spec:
        store, step = _store(spec, runs)
        steps = _steps(store)
        yield store, steps[-1] if step is None else _known(store, step)
        return
    from affinage.checkpoint import CheckpointStore

    remote, asked = _remote(spec)
    with TemporaryDirectory() as folder, _reached(spec):
        step = _complete(remote, asked)
        if damage := remote.fetch(step, Path(folder)):
            raise UserError(f"the checkpoint of step {step} is damaged: {damage}", where=remote.folder.url)
        yield CheckpointStore(Path(folder)), step


def _remote(spec: str) -> "tuple[RemoteSteps, int | None]":
    """The checkpoints at a URL, and the step that is asked for."""
    from affinage.checkpoint.remote_steps import find_steps

    url, at, step = spec.rpartition("@")
    return (find_steps(url), int(step)) if at and step.isdecimal() else (find_steps(spec), None)


def _reached(spec: str) -> "AbstractContextManager[None]":
    from affinage.checkpoint.remote import reached

    return reached(spec)


def _complete(remote: "RemoteSteps", step: int | None) -> int:
    """The step that is asked for, or the newest one. Raises UserError if it is not there."""
    steps, where = remote.steps(), remote.folder.url
    if not steps:
        raise UserError("no checkpoint is complete", where=where)
    if step is not None and step not in steps:
        listed = ", ".join(f"@{known}" for known in steps)
        raise UserError(f"there is no checkpoint of step {step}", where=where, fix=f"There are {listed}.")
    return steps[-1] if step is None else step


def _remote_listing(spec: str) -> list[dict[str, Any]]:
    remote, _ = _remote(spec)
    with _reached(spec):
        return [
            {"step": step, "saved": _saved(remote, step), **facts, "why_not": ""}
            if facts["complete"]
            else {"step": step, "saved": None, **facts, "why_not": CUT_OFF}
            for step, facts in remote.listing().items()
        ]


def _saved(remote: "RemoteSteps", step: int) -> str | None:
    """When a step was saved; its facts are of nobody known, and may be of any form."""
    facts = remote.meta(step).get("facts")
    saved = facts.get("saved") if isinstance(facts, dict) else None
    return saved if isinstance(saved, str) else None


def _verified_remote(spec: str) -> tuple[str, dict[int, str], dict[int, str]]:
    """Where they are, what is wrong with each, and why others are not read."""
    remote, step = _remote(spec)
    with _reached(spec):
        chosen = _complete(remote, step)
        steps = remote.steps() if step is None else [chosen]
        not_read = {number: CUT_OFF for number in remote.listing() if step is None and number not in steps}
        return remote.folder.url, {number: remote.damage(number) for number in steps}, not_read


def _steps(store: "CheckpointStore") -> list[int]:
    """The complete steps; raises UserError if there are none."""
    if steps := store.steps():
        return steps
    where = str(store.folder)
    if not_read := [f"step {step}: {store.why_not_read(step)}" for step, _ in store.entries()]:
        fix = "Every folder of a whole checkpoint has a SHA256SUMS. Train the model again, or copy them again."
        raise UserError("no checkpoint is complete; " + "; ".join(not_read), where=where, fix=fix)
    raise UserError("there is no checkpoint", where=where, fix="Train the model first.")


def _known(store: "CheckpointStore", step: int) -> int:
    if step not in store.steps():
        listed = ", ".join(f"@{known}" for known in store.steps())
        why = store.why_not_read(step)
        what = f"the checkpoint of step {step} is not read: {why}" if why else f"there is no checkpoint of step {step}"
        raise UserError(what, where=str(store.folder), fix=f"There are {listed}.")
    return step


def _print_nested(facts: Mapping[str, Any], indent: int = 0) -> None:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            print(f"{' ' * indent}{plain(str(name))}:")
            _print_nested(value, indent + 2)
        else:
            print(f"{' ' * indent}{plain(f'{name}: {value}')}")

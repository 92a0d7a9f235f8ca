"""The verb `checkpoint`: what a training saved, and whether it is still what was saved."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RunsOption, find, opt
from affinage.cli.output import counted, emit
from affinage.cli.working import Working
from affinage.errors import UserError, plain

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore
    from affinage.checkpoint.uploader import RemoteSteps

group = typer.Typer(
    no_args_is_help=True,
    help="List, show, compare and verify the checkpoints of a training.\n\nExample: affinage checkpoint ls quickstart",
)
_SEEN = ("step", "fingerprint", "arrays")  # of a checkpoint, whatever its own facts hold

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[@STEP]",
        help="A run, a training of it (quickstart/pretrain), a checkpoint (...@1000), or the URL of a copy.",
        show_default=False,
        autocompletion=completion.models,
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.add_typer(group, name="checkpoint")


@group.callback()
def on_the_processor() -> None:
    """Run on the CPU: the accelerator may be taken by the training whose checkpoints these are."""
    os.environ["JAX_PLATFORMS"] = "cpu"


@group.command("ls")
def ls(training: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """List the checkpoints of a training.

    Example: affinage checkpoint ls quickstart/pretrain
    """
    if "://" in training:
        found = _remote_listing(training)
    else:
        from affinage.checkpoint.browse import listing

        found = listing(_store(training, runs, quiet=as_json)[0])
    if not found:
        print("no checkpoint yet", file=sys.stderr)
    states = (each["why_not"] or plain(str(each["saved"] or "")) for each in found)
    lines = (f"{each['step']:>10,}  {each['bytes'] / 1e6:10,.1f} MB  {state}" for each, state in zip(found, states))
    emit(found, as_json, lines)


@group.command("show")
def show(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays.

    The fingerprint is of the numbers alone: checkpoints of the same state have the same one, on any mesh.

    Example: affinage checkpoint show quickstart/pretrain@2200
    """
    with Working("reading a checkpoint"), _checkpoint(checkpoint, runs) as (store, step):
        from affinage.checkpoint.browse import arrays

        metadata = store.metadata(step)
        facts: dict[str, Any] = {"step": step, "fingerprint": metadata.fingerprint, "arrays": arrays(metadata)}
        # Its own facts do not take the place of what was seen.
        facts |= {name: fact for name, fact in metadata.facts.items() if name not in _SEEN}
    # The settings that decide about numbers are in the identity.
    emit(facts, as_json, _nested({name: fact for name, fact in facts.items() if name != "settings"}))


@group.command("diff")
def diff(
    one: CheckpointArgument,
    other: CheckpointArgument,
    numbers: Annotated[bool, opt("Read the arrays that differ, to say how far they are apart.", "--arrays")] = False,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: settings, data, versions, mesh, and arrays by their checksums.

    Example: affinage checkpoint diff quickstart/pretrain@2100 quickstart/pretrain@2200 --arrays
    """
    with (
        Working("reading checkpoints"),
        _checkpoint(one, runs) as first,
        _checkpoint(other, runs) as second,
    ):
        from affinage.checkpoint.browse import compare

        found = compare(first, second, numbers=numbers)
    emit(found, as_json, _differences(found))


def _differences(found: dict[str, Any]) -> Iterator[str]:
    from affinage.config.yaml import brief

    for each in found["facts"]:
        yield plain(f"{each['name']}: {brief(each['saved'], 80)} -> {brief(each['now'], 80)}")
    if not found["facts"]:
        yield "saved by the same settings, data and versions"
    arrays = found["arrays"]
    for each in arrays["different"]:
        how = "differs"
        if "most" in each:
            how = "another shape, or not finite" if each["most"] is None else f"differs by {each['most']:.3g} at most"
        bad = f", numbers that are not finite: {each['not_finite']}" if each.get("not_finite") else ""
        yield plain(f"{each['name']} {each['shape']}: {how}{bad}")
    for name in arrays["only"]:
        yield plain(f"{name}: in one of them only")
    yield f"{counted(arrays['same'], 'array')} {'is' if arrays['same'] == 1 else 'are'} the same bit for bit"


@group.command("verify")
def verify(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every array of one checkpoint, or of all of a training, and compare it with its checksum.

    The exit status is 2 if one is corrupted, or none is complete. One at a URL is copied to this machine for it.

    Example: affinage checkpoint verify quickstart
    """
    found: dict[int, str] = {}
    incomplete: dict[int, str] = {}
    with Working("reading checkpoints") as working:
        if "://" in checkpoint:
            where = checkpoint
            steps, named = _remote_steps(checkpoint)
            for number in [named] if named is not None else [each["step"] for each in _remote_listing(checkpoint)]:
                with TemporaryDirectory() as folder:
                    found[number] = steps.download(number, Path(folder)) or _new_store(Path(folder)).verify(number)
        else:
            store, named = _store(checkpoint, runs, quiet=as_json)
            where, chosen = str(store.folder), _chosen(store, named)
            for place, number in enumerate(chosen):
                working.progressed(f"{place} of {len(chosen)}")
                found[number] = store.verify(number)
            others = (number for number, _ in store.entries() if number not in store.steps() and named is None)
            incomplete = dict.fromkeys(others, "incomplete: its save was cut off")
    rows = [
        {"step": number, "corruption": found.get(number) or None, "why_not": incomplete.get(number, "")}
        for number in sorted({*found, *incomplete})
    ]
    words = (plain(str(row["corruption"] or row["why_not"] or "intact")) for row in rows)
    emit(rows, as_json, (f"{row['step']:>10,}  {word}" for row, word in zip(rows, words)))
    corrupted = [number for number, what in found.items() if what]
    if corrupted:
        which = f"{len(corrupted)} of {counted(len(found), 'checkpoint')} {'is' if len(corrupted) == 1 else 'are'}"
        fix = "A training resumes from the newest intact one by itself; copy a corrupted one again if it has a copy."
        raise UserError(f"{which} corrupted", where=where, fix=fix)


def _new_store(folder: Path) -> "CheckpointStore":
    from affinage.checkpoint import CheckpointStore

    return CheckpointStore(folder)


def _store(name: str, runs: Path, *, quiet: bool = False) -> "tuple[CheckpointStore, int | None]":
    """The checkpoints that a name stands for, and the step it names. Of a run with several trainings, prints which."""
    from affinage.pipeline.models import locate, run_of, trainings_of

    target = find(name, runs)  # before JAX is imported
    folder, wanted = locate(target, runs)
    if target.kind == "hub":
        raise UserError("a Hugging Face folder has no checkpoints", where=name, fix="Name a run or a training.")
    if target.kind in ("recipe", "run") and not quiet:
        last, *others = (f"{name.partition('@')[0]}/{each}" for each in trainings_of(run_of(target, runs)))
        if others:
            print(f"{last}, the last training; others: {', '.join(others)}", file=sys.stderr)
    return _new_store(folder / "checkpoints"), wanted


def _chosen(store: "CheckpointStore", step: int | None) -> list[int]:
    """The step that was named, or all that are complete, oldest first. Raises UserError if there are none."""
    steps = store.steps()
    if not steps:
        raise UserError("no checkpoint is complete", where=str(store.folder), fix="Train the model, or copy it again.")
    if step is not None and step not in steps:
        fix = f"There are {', '.join(f'@{known}' for known in steps)}."
        raise UserError(f"there is no complete checkpoint of step {step}", where=str(store.folder), fix=fix)
    return steps if step is None else [step]


def _remote_steps(name: str) -> "tuple[RemoteSteps, int | None]":
    """The checkpoints at a URL, and the step that it names."""
    from affinage.checkpoint.uploader import find_steps

    url, at, step = name.rpartition("@")
    return (find_steps(url), int(step)) if at and step.isdecimal() else (find_steps(name), None)


def _remote_listing(name: str) -> list[dict[str, Any]]:
    """{step, saved, bytes, why_not} of the checkpoints at a URL, oldest first."""
    from affinage.checkpoint.remote import reached

    steps, _ = _remote_steps(name)
    with reached(name):
        return steps.described()


@contextlib.contextmanager
def _checkpoint(name: str, runs: Path) -> "Iterator[tuple[CheckpointStore, int]]":
    """The store and the step of a checkpoint; of one at a URL, a temporary copy."""
    if "://" not in name:
        store, step = _store(name, runs, quiet=True)
        yield store, _chosen(store, step)[-1]
        return
    from affinage.checkpoint.remote import reached

    steps, wanted = _remote_steps(name)
    with reached(name), TemporaryDirectory() as folder:
        step = max(steps.listing()) if wanted is None else wanted
        if corruption := steps.download(step, Path(folder)):
            fix = "Copy it again, or name another step."
            raise UserError(f"checkpoint {step} cannot be read: {corruption}", where=name, fix=fix)
        yield _new_store(Path(folder)), step


def _nested(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{plain(str(name))}:"
            yield from _nested(value, indent + "  ")
        else:
            yield f"{indent}{plain(f'{name}: {value}')}"

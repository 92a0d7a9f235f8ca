"""The verb `checkpoint`: what a training saved, and whether it is still what was saved."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from affinage.cli.options import RUNS, JsonOption, RunsOption, arg, complete_model, find, opt, verb, verbs
from affinage.cli.output import counted, emit, table, working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore
    from affinage.checkpoint.uploader import RemoteSteps

_HELP = "A run, a training of it (quickstart/pretrain), a checkpoint (...@1000), or the URL of a copy."
CheckpointArgument = Annotated[str, arg("MODEL[@STEP]", _HELP, complete_model)]
group = verbs(
    "checkpoint",
    "List, show, compare and verify the checkpoints of a training.\n\nExample: affinage checkpoint ls quickstart",
)


@group.callback()
def on_the_processor() -> None:
    """Run on the CPU: the accelerator may be taken by the training whose checkpoints these are."""
    os.environ["JAX_PLATFORMS"] = "cpu"


@verb(within=group)
def ls(training: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """List the checkpoints of a training.

    Example: affinage checkpoint ls quickstart/pretrain
    """
    if "://" in training:
        with _remote(training) as (steps, _):
            found = steps.described()
    else:
        store, _ = _store(training, runs, quiet=as_json)
        from affinage.checkpoint.browse import listing

        found = listing(store)
    if not found:
        print("no checkpoint yet", file=sys.stderr)
    emit(found, as_json)


@verb(within=group)
def show(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays.

    The fingerprint depends on the numbers alone: checkpoints of the same state have the same one, on any mesh.

    Example: affinage checkpoint show quickstart/pretrain@2200
    """
    with working("reading a checkpoint"), _opened(checkpoint, runs) as (store, step):
        from affinage.checkpoint.browse import arrays

        metadata = store.metadata(step)
        facts: dict[str, Any] = {"step": step, "fingerprint": metadata.fingerprint, "arrays": arrays(metadata)}
        facts = metadata.facts | facts
    shown = {name: fact for name, fact in facts.items() if name != "settings"}  # those that decide are in `identity`
    emit(facts if as_json else shown, as_json)


@verb(within=group)
def diff(
    one: CheckpointArgument,
    other: CheckpointArgument,
    numbers: Annotated[
        bool, opt("Read the arrays that differ, to measure how far they are apart.", "--arrays")
    ] = False,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: settings, data, versions, mesh, and arrays by their checksums.

    Example: affinage checkpoint diff quickstart/pretrain@2100 quickstart/pretrain@2200 --arrays
    """
    with working("reading checkpoints"), _opened(one, runs) as first, _opened(other, runs) as second:
        from affinage.checkpoint.browse import compare

        found = compare(first, second, numbers=numbers)
    emit(found, as_json)


@verb(within=group)
def verify(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every array of one checkpoint, or of all of a training, and compare it with its checksum.

    The exit status is 2 if one is corrupted, or none is complete. One at a URL is copied to this machine for it.

    Example: affinage checkpoint verify quickstart
    """
    found: dict[int, str] = {}
    incomplete: list[int] = []
    with working("reading checkpoints") as progressed:
        if "://" in checkpoint:
            with _remote(checkpoint) as (remote, named):
                for step in [named] if named is not None else remote.listing():
                    with TemporaryDirectory() as folder:
                        found[step] = remote.download(step, Path(folder)) or _new_store(Path(folder)).verify(step)
        else:
            store, asked = _store(checkpoint, runs, quiet=as_json)
            chosen = _chosen(store, asked)
            for place, kept in enumerate(chosen):
                progressed(f"{place} of {len(chosen)}")
                found[kept] = store.verify(kept)
            incomplete = [step for step, _ in store.entries() if step not in store.steps() and asked is None]
    rows = [{"step": step, "corruption": what or None, "why_not": ""} for step, what in found.items()]
    rows += [{"step": step, "corruption": None, "why_not": "incomplete: its save was cut off"} for step in incomplete]
    rows.sort(key=lambda row: int(row["step"] or 0))
    shown = [{"step": row["step"], "state": row["corruption"] or row["why_not"] or "intact"} for row in rows]
    emit(rows, as_json, [table(shown)])
    if corrupted := [step for step, what in found.items() if what]:
        what = f"corrupted: {len(corrupted)} of {counted(len(found), 'checkpoint')}"
        fix = "A training resumes from the newest intact one by itself; copy a corrupted one again if it has a copy."
        raise UserError(what, where=checkpoint, fix=fix)


def _new_store(folder: Path) -> "CheckpointStore":
    from affinage.checkpoint import CheckpointStore

    return CheckpointStore(folder)


def _store(name: str, runs: Path, *, quiet: bool = False) -> "tuple[CheckpointStore, int | str | None]":
    """The checkpoints that a name stands for, and the step it names. Of a run with several trainings, prints which."""
    from affinage.pipeline.models import locate, run_of, trainings_of

    target = find(name, runs)  # before JAX is imported
    folder, step = locate(target, runs)
    if target.kind == "hub":
        raise UserError("a Hugging Face folder has no checkpoints", where=name, fix="Name a run or a training.")
    if target.kind in ("recipe", "run") and not quiet:
        last, *others = (f"{name.partition('@')[0]}/{each}" for each in trainings_of(run_of(target, runs)))
        if others:
            print(f"{last}, the last training; others: {', '.join(others)}", file=sys.stderr)
    return _new_store(folder / "checkpoints"), step


def _chosen(store: "CheckpointStore", step: int | str | None) -> list[int]:
    """The step that was named, or all that are complete, oldest first. Raises UserError if there are none."""
    steps = store.steps()
    if not steps:
        raise UserError("no checkpoint is complete", where=str(store.folder), fix="Train the model, or copy it again.")
    if step is not None and step not in steps:
        fix = f"There are {', '.join(f'@{known}' for known in steps)}."
        raise UserError(f"there is no complete checkpoint of step {step}", where=str(store.folder), fix=fix)
    return steps if step is None else [step]


@contextlib.contextmanager
def _remote(name: str) -> "Iterator[tuple[RemoteSteps, int | None]]":
    """The checkpoints at a URL, and the step that it names. Inside, a network that fails is one message."""
    from affinage.checkpoint.remote import reached
    from affinage.checkpoint.uploader import find_steps

    url, at, step = name.rpartition("@")
    with reached(name):
        yield (find_steps(url), int(step)) if at and step.isdecimal() else (find_steps(name), None)


@contextlib.contextmanager
def _opened(name: str, runs: Path) -> "Iterator[tuple[CheckpointStore, int]]":
    """The store and the step of a checkpoint; of one at a URL, a temporary copy."""
    if "://" not in name:
        store, wanted = _store(name, runs, quiet=True)
        yield store, _chosen(store, wanted)[-1]
        return
    with _remote(name) as (steps, wanted), TemporaryDirectory() as folder:
        step = max(steps.listing()) if wanted is None else wanted
        if corruption := steps.download(step, Path(folder)):
            fix = "Copy it again, or name another step."
            raise UserError(f"checkpoint {step} cannot be read: {corruption}", where=name, fix=fix)
        yield _new_store(Path(folder)), step

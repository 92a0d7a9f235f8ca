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
    from affinage.checkpoint.remote_steps import RemoteSteps

group = typer.Typer(
    no_args_is_help=True,
    help="List, show, compare and verify the checkpoints of a training.\n\nExample: affinage checkpoint ls quickstart",
)
_SEEN = ("step", "seal", "fingerprint", "arrays")  # of a checkpoint, whatever its own facts hold
CUT_OFF = "it is not complete: a save, or a copy, was cut off here"

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
    found = _remote_listing(training) if "://" in training else _listing(training, runs, quiet=as_json)
    if not found:
        print("no checkpoint yet", file=sys.stderr)
    states = (each["why_not"] or plain(str(each["saved"] or "damaged")) for each in found)
    lines = (f"{each['step']:>10,}  {each['bytes'] / 1e6:10,.1f} MB  {state}" for each, state in zip(found, states))
    emit(found, as_json, lines)


@group.command("show")
def show(
    checkpoint: CheckpointArgument,
    numbers: Annotated[bool, opt("Read the arrays whole, for their fingerprint.", "--arrays")] = False,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays; with --arrays, their fingerprint.

    The fingerprint is of the numbers alone: checkpoints of the same state have the same one, on any mesh. The seal is
    of the files: this save and its copies have it, and no other save.

    Example: affinage checkpoint show quickstart/pretrain@2200
    """
    with Working("reading a checkpoint"), _checkpoint(checkpoint, runs) as (store, step):
        from affinage.checkpoint.looking import arrays, fingerprint, fingerprints

        facts: dict[str, Any] = {"step": step, "seal": store.seal_hash(step)}
        held = arrays(store, step)
        if numbers:
            trees = fingerprints(store, step)
            facts["fingerprint"] = fingerprint(trees)
            held = {name: tree | {"fingerprint": trees[name]} for name, tree in held.items()}
        facts["arrays"] = held
        # Its own facts do not take the place of what was seen.
        facts |= {name: fact for name, fact in store.meta(step).items() if name not in _SEEN}
    if not numbers and "://" not in checkpoint:  # a copy was compared as a whole
        from affinage.pipeline.names import command

        name = checkpoint.partition("@")[0]
        verify = f"`{command('checkpoint verify', f'{name}@{step}', runs=runs)}` reads them"
        print(f"its arrays were not read: {verify}, `show --arrays` has their fingerprint", file=sys.stderr)
    # The settings that decide over numbers are in the identity.
    emit(facts, as_json, _nested({name: fact for name, fact in facts.items() if name != "settings"}))


@group.command("diff")
def diff(
    one: CheckpointArgument,
    other: CheckpointArgument,
    numbers: Annotated[bool, opt("Compare the arrays, too; reads both whole.", "--arrays")] = False,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: settings, data, versions, mesh; with --arrays, bit for bit.

    Example: affinage checkpoint diff quickstart/pretrain@2100 quickstart/pretrain@2200 --arrays
    """
    with (
        Working("reading checkpoints"),
        _checkpoint(one, runs) as first,
        _checkpoint(other, runs) as second,
    ):
        from affinage.checkpoint.looking import compare

        found = compare(first, second, numbers=numbers)
    emit(found, as_json, _differences(found))


def _differences(found: dict[str, Any]) -> Iterator[str]:
    from affinage.config.yaml import brief

    for each in found["facts"]:
        yield plain(f"{each['name']}: {brief(each['saved'], 80)} -> {brief(each['now'], 80)}")
    if not found["facts"]:
        yield "saved by the same settings, data and versions"
    arrays = found.get("arrays") or {"different": (), "only": ()}
    for each in arrays["different"]:
        most = "another shape, or not finite" if each["most"] is None else f"differs by {each['most']:.3g} at most"
        bad = f", numbers that are not finite: {each['not_finite']}" if each["not_finite"] else ""
        yield plain(f"{each['name']} {each['shape']}: {most}{bad}")
    for name in arrays["only"]:
        yield plain(f"{name}: in one of them only")
    if "same" in arrays:
        yield f"{counted(arrays['same'], 'array')} {'is' if arrays['same'] == 1 else 'are'} the same bit for bit"


@group.command("verify")
def verify(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every file of one checkpoint, or of all of a training, and compare it with what was written.

    The exit status is 2 if one is damaged, or none is complete. `sha256sum -c SHA256SUMS` in its folder does the same
    without affinage. Where $AFFINAGE_SEAL_KEY_FILE names a key, one that is not signed with it counts as damaged.

    Example: affinage checkpoint verify quickstart
    """
    from affinage.signing import signing_key

    found: dict[int, str] = {}
    with Working("reading checkpoints") as working:
        if "://" in checkpoint:
            where, found, not_read = _verified_remote(checkpoint)
        else:
            store, step = _store(checkpoint, runs, quiet=as_json)
            steps, where = _steps(store), str(store.folder)
            for place, number in enumerate(chosen := steps if step is None else [_known(store, step)]):
                working.progressed(f"{place} of {len(chosen)}")
                found[number] = store.damage(number)
            entries = [number for number, _ in store.entries() if step is None]
            not_read = {number: why for number in entries if (why := store.why_not_read(number))}
    rows = [
        {"step": number, "damage": found.get(number) or None, "why_not": not_read.get(number, "")}
        for number in sorted({*found, *not_read})
    ]
    whole = "whole, and signed" if signing_key() else "whole"
    emit(rows, as_json, (f"{row['step']:>10,}  {plain(str(row['damage'] or row['why_not'] or whole))}" for row in rows))
    from affinage.checkpoint.seal import UNSIGNED

    damaged = [number for number, what in found.items() if what]
    which = f"{len(damaged)} of {counted(len(found), 'checkpoint')} {'is' if len(damaged) == 1 else 'are'}"
    if damaged and all(found[number] == UNSIGNED for number in damaged):
        fix = "`affinage checkpoint sign` signs your own; where others may write, they may be from somebody else."
        raise UserError(f"{which} not signed with this key", where=where, fix=fix)
    if damaged:
        fix = "A training resumes from the newest whole one by itself; copy a damaged one again if it has a copy."
        raise UserError(f"{which} damaged", where=where, fix=fix)


@group.command("sign")
def sign(checkpoint: CheckpointArgument, runs: RunsOption = RUNS) -> None:
    """Sign one checkpoint, or all of a training, with the key in the file that $AFFINAGE_SEAL_KEY_FILE names.

    For those that were saved while it was not set, or with another key; each is compared with its seal before. With the
    variable set every save is signed, and nothing else is restored.

    Example: AFFINAGE_SEAL_KEY_FILE=~/seal.key affinage checkpoint sign quickstart
    """
    if "://" in checkpoint:
        fix = "Sign it in the folder of its run: it is copied to the URL when the training resumes."
        raise UserError("a copy at a URL is not signed there", where=checkpoint, fix=fix)
    store, step = _store(checkpoint, runs)
    for number in _steps(store) if step is None else [_known(store, step)]:
        with Working("reading a checkpoint"):
            store.sign(number)
        print(f"{number:>10,}  signed")


def _store(name: str, runs: Path, *, quiet: bool = False) -> "tuple[CheckpointStore, int | None]":
    """The checkpoints of a model, and the step that is named. Of a run with several trainings, prints which it is."""
    from affinage.pipeline.names import locate, run_of, trainings_of

    target = find(name, runs)  # before JAX is imported
    folder, step = locate(target, runs)
    if target.kind == "hub":
        raise UserError("a Hugging Face folder has no checkpoints", where=name, fix="Name a run or a training.")
    if target.kind in ("recipe", "run") and not quiet:
        last, *others = (f"{name.partition('@')[0]}/{each}" for each in trainings_of(run_of(target, runs)))
        if others:
            print(f"{last}, the last training; others: {', '.join(others)}", file=sys.stderr)
    from affinage.checkpoint.looking import store_of

    return store_of(folder), step


def _listing(name: str, runs: Path, *, quiet: bool) -> list[dict[str, Any]]:
    store, _ = _store(name, runs, quiet=quiet)
    from affinage.checkpoint.looking import listing

    return listing(store)


@contextlib.contextmanager
def _checkpoint(name: str, runs: Path) -> "Iterator[tuple[CheckpointStore, int]]":
    """The store and the step of a checkpoint; of one at a URL, a temporary copy."""
    if "://" not in name:
        store, step = _store(name, runs, quiet=True)
        steps = _steps(store)
        yield store, steps[-1] if step is None else _known(store, step)
        return
    from affinage.checkpoint import CheckpointStore
    from affinage.checkpoint.remote import reached

    remote, wanted = _remote(name)
    with TemporaryDirectory() as folder, reached(name):
        step = _complete(remote, wanted)
        if damage := remote.fetch(step, Path(folder)):
            fix = "Copy it again, or name another step."
            raise UserError(f"the checkpoint of step {step} is damaged: {damage}", where=remote.folder.url, fix=fix)
        yield CheckpointStore(Path(folder)), step


def _remote(name: str) -> "tuple[RemoteSteps, int | None]":
    """The checkpoints at a URL, and the step that is named."""
    from affinage.checkpoint.remote_steps import find_steps

    url, at, step = name.rpartition("@")
    return (find_steps(url), int(step)) if at and step.isdecimal() else (find_steps(name), None)


def _complete(remote: "RemoteSteps", step: int | None) -> int:
    """The step that is named, or the newest one. Raises UserError if it is not there."""
    steps, where = remote.steps(), remote.folder.url
    if not steps:
        fix = "Let the training save one, or name another URL."
        raise UserError("no checkpoint is complete", where=where, fix=fix)
    if step is not None and step not in steps:
        raise _no_step(step, steps, where)
    return steps[-1] if step is None else step


def _remote_listing(name: str) -> list[dict[str, Any]]:
    from affinage.checkpoint.remote import reached

    def saved(step: int) -> str | None:
        """When a step was saved; its facts may be written by anybody, and be of any form."""
        facts = remote.meta(step).get("facts")
        found = facts.get("saved") if isinstance(facts, dict) else None
        return found if isinstance(found, str) else None

    remote, _ = _remote(name)
    with reached(name):
        return [
            {"step": step, "saved": saved(step), **facts, "why_not": ""}
            if facts["complete"]
            else {"step": step, "saved": None, **facts, "why_not": CUT_OFF}
            for step, facts in remote.listing().items()
        ]


def _verified_remote(name: str) -> tuple[str, dict[int, str], dict[int, str]]:
    """The URL, what is wrong with each checkpoint there, and why others are not read."""
    from affinage.checkpoint.remote import reached

    remote, step = _remote(name)
    with reached(name):
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
        raise _no_step(step, store.steps(), str(store.folder), store.why_not_read(step))
    return step


def _no_step(step: int, steps: list[int], where: str, why: str = "") -> UserError:
    what = f"the checkpoint of step {step} is not read: {why}" if why else f"there is no checkpoint of step {step}"
    return UserError(what, where=where, fix=f"There are {', '.join(f'@{known}' for known in steps)}.")


def _nested(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{plain(str(name))}:"
            yield from _nested(value, indent + "  ")
        else:
            yield f"{indent}{plain(f'{name}: {value}')}"

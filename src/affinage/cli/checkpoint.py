"""The verb `checkpoint`: what a training saved, and whether it is still what was saved."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
    with _source(training, runs, quiet=as_json) as source:
        found = source.listing()
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

    with Working("reading checkpoints") as working, _source(checkpoint, runs, quiet=as_json) as source:
        found: dict[int, str] = {}
        for place, number in enumerate(chosen := source.chosen()):
            working.progressed(f"{place} of {len(chosen)}")
            found[number] = source.store.damage(number)
        not_read = {number: why for number, why in source.states().items() if why and source.step is None}
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
        raise UserError(f"{which} not signed with this key", where=source.where, fix=fix)
    if damaged:
        fix = "A training resumes from the newest whole one by itself; copy a damaged one again if it has a copy."
        raise UserError(f"{which} damaged", where=source.where, fix=fix)


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
    with _source(checkpoint, runs) as source:
        for number in source.chosen():
            with Working("reading a checkpoint"):
                source.store.sign(number)  # type: ignore[union-attr]
            print(f"{number:>10,}  signed")


class _Source(NamedTuple):
    """The checkpoints of a training, here or at a URL."""

    store: "CheckpointStore | RemoteSteps"
    where: str
    step: int | None  # that was named

    def states(self) -> dict[int, str]:
        """Why each thing that is called like a step is not read; "" if it is complete."""
        from affinage.checkpoint import CheckpointStore

        if isinstance(self.store, CheckpointStore):
            return {number: self.store.why_not_read(number) for number, _ in self.store.entries()}
        return {number: "" if facts["complete"] else CUT_OFF for number, facts in self.store.listing().items()}

    def listing(self) -> list[dict[str, Any]]:
        """{step, saved, bytes, complete, why_not} of everything that is called like a step, oldest first."""
        from affinage.checkpoint import CheckpointStore
        from affinage.checkpoint.looking import listing

        if isinstance(self.store, CheckpointStore):
            return listing(self.store)
        remote, states = self.store, self.states()

        def saved(step: int) -> str | None:
            """When a step was saved; its facts may be written by anybody, and be of any form."""
            facts = {} if states[step] else remote.meta(step).get("facts")
            found = facts.get("saved") if isinstance(facts, dict) else None
            return found if isinstance(found, str) else None

        found = remote.listing().items()
        return [{"step": step, "saved": saved(step), **facts, "why_not": states[step]} for step, facts in found]

    def chosen(self) -> list[int]:
        """The step that was named, or all that are complete, oldest first. Raises UserError if there are none."""
        states = self.states()
        steps = [number for number, why in states.items() if not why]
        if not steps:
            incomplete = "; ".join(f"step {number}: {why}" for number, why in states.items())
            what = f"no checkpoint is complete; {incomplete}" if incomplete else "there is no checkpoint"
            fix = "Every folder of a whole checkpoint has a SHA256SUMS. Train the model, or copy them again."
            raise UserError(what, where=self.where, fix=fix)
        if self.step is None or self.step in steps:
            return steps if self.step is None else [self.step]
        why = states.get(self.step)
        what = f"the checkpoint of step {self.step} is not read: {why}" if why else f"there is no step {self.step}"
        raise UserError(what, where=self.where, fix=f"There are {', '.join(f'@{known}' for known in steps)}.")


@contextlib.contextmanager
def _source(name: str, runs: Path, *, quiet: bool = False) -> Iterator[_Source]:
    """The checkpoints that a name stands for. Of a run with several trainings, prints which it is."""
    if "://" in name:
        from affinage.checkpoint.remote import reached
        from affinage.checkpoint.remote_steps import find_steps

        url, at, step = name.rpartition("@")
        wanted = int(step) if at and step.isdecimal() else None
        with reached(name):
            remote = find_steps(name if wanted is None else url)
            yield _Source(remote, remote.folder.url, wanted)
        return
    from affinage.pipeline.names import locate, run_of, trainings_of

    target = find(name, runs)  # before JAX is imported
    folder, wanted = locate(target, runs)
    if target.kind == "hub":
        raise UserError("a Hugging Face folder has no checkpoints", where=name, fix="Name a run or a training.")
    if target.kind in ("recipe", "run") and not quiet:
        last, *others = (f"{name.partition('@')[0]}/{each}" for each in trainings_of(run_of(target, runs)))
        if others:
            print(f"{last}, the last training; others: {', '.join(others)}", file=sys.stderr)
    from affinage.checkpoint.looking import store_of

    store = store_of(folder)
    yield _Source(store, str(store.folder), wanted)


@contextlib.contextmanager
def _checkpoint(name: str, runs: Path) -> "Iterator[tuple[CheckpointStore, int]]":
    """The store and the step of a checkpoint; of one at a URL, a temporary copy."""
    with _source(name, runs, quiet=True) as source, TemporaryDirectory() as folder:
        from affinage.checkpoint import CheckpointStore

        step = source.chosen()[-1]
        if isinstance(source.store, CheckpointStore):
            yield source.store, step
            return
        if damage := source.store.fetch(step, Path(folder)):
            fix = "Copy it again, or name another step."
            raise UserError(f"the checkpoint of step {step} is damaged: {damage}", where=source.where, fix=fix)
        yield CheckpointStore(Path(folder)), step


def _nested(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{plain(str(name))}:"
            yield from _nested(value, indent + "  ")
        else:
            yield f"{indent}{plain(f'{name}: {value}')}"

"""The verb `checkpoint`: what a training saved, and whether it is still what was saved."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from affinage.cli.terminal import RUNS, JsonOption, RunsOption, arg, counted, emit, find, table, verbs, working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore

CheckpointArgument = Annotated[str, arg("MODEL[@STEP]", "A run, a training of it (quickstart/pretrain), a checkpoint.")]
group = verbs("checkpoint", "List, show, compare and verify the checkpoints of a training.")


@group.callback()
def on_the_processor() -> None:
    """Run on the CPU: the accelerator may be taken by the training whose checkpoints these are."""
    os.environ["JAX_PLATFORMS"] = "cpu"


@group.command()
def ls(training: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """List the checkpoints of a training.

    Example: affinage checkpoint ls quickstart/pretrain
    """
    emit(_steps(training, runs, complete=False)[0].listing(), as_json)


@group.command()
def show(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays.

    The fingerprint depends on the numbers alone: checkpoints of the same state have the same one, on any mesh.

    Example: affinage checkpoint show quickstart/pretrain@1900
    """
    store, steps = _steps(checkpoint, runs)
    metadata = store.metadata(steps[-1])
    arrays = {path: f"{dtype} {shape}" for path, (dtype, shape, _) in metadata.checksums.items()}
    facts = {"step": steps[-1], "fingerprint": metadata.fingerprint, "arrays": arrays}
    emit(metadata.facts | facts, as_json)


@group.command()
def diff(
    one: CheckpointArgument, other: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False
) -> None:
    """Compare two checkpoints: settings, data, versions, mesh, and arrays by their checksums.

    Example: affinage checkpoint diff quickstart/pretrain@1800 quickstart/pretrain@1900
    """
    chosen = [_steps(name, runs) for name in (one, other)]
    from affinage.checkpoint.store import compare

    emit(compare(*(store.metadata(steps[-1]) for store, steps in chosen)), as_json)


@group.command()
def verify(checkpoint: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every array of one checkpoint, or of all of a training, and compare it with its checksum.

    The exit status is 2 if one is corrupted, or none is complete.

    Example: affinage checkpoint verify quickstart
    """
    store, steps = _steps(checkpoint, runs)
    with working("reading checkpoints"):
        rows = [{"step": step, "corruption": store.verify(step) or None} for step in steps]
    emit(rows, as_json, [table([row | {"corruption": row["corruption"] or "intact"} for row in rows])])
    if corrupted := [row["step"] for row in rows if row["corruption"]]:
        what = f"corrupted: {len(corrupted)} of {counted(len(rows), 'checkpoint')}"
        fix = "A training resumes from the newest intact one by itself; copy a corrupted one again if it has a copy."
        raise UserError(what, where=checkpoint, fix=fix)


def _steps(name: str, runs: Path, *, complete: bool = True) -> "tuple[CheckpointStore, list[int]]":
    """The checkpoints of a training, which is printed, and the step that was named, or all `complete` ones."""
    from affinage.pipeline.models import locate

    target = find(name, runs)  # before JAX is imported
    if target.kind == "hub":
        raise UserError("a Hugging Face folder has no checkpoints", where=name, fix="Name a run or a training.")
    training = locate(target, runs)
    print(f"checkpoints of {training.path.name}", file=sys.stderr)
    from affinage.checkpoint import CheckpointStore

    store, step = CheckpointStore(training.path / "checkpoints"), training.step
    steps = store.steps()
    if complete and (not steps or step not in (None, *steps)):
        what = "no checkpoint is complete" if step is None else f"there is no complete checkpoint of step {step}"
        fix = f"There are {', '.join(f'@{known}' for known in steps)}." if steps else "Train the model first."
        raise UserError(what, where=str(store.folder), fix=fix)
    return store, [known for known in steps if step in (None, known)]

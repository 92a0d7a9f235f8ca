"""The verbs `data` and `checkpoint`: run the data steps, and look at what a run has read, made and saved."""

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer.core import TyperGroup

from affinage.cli import terminal
from affinage.cli.run import verb_until
from affinage.cli.terminal import RUNS, JsonOption, RunArgument, RunsOption, arg, emit, find, opt, verbs, working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore

_SHOWN = 200  # characters of a text in a list
CheckpointArgument = Annotated[str, arg("MODEL[@STEP]", "A run, a training of it (quickstart/pretrain), a checkpoint.")]


class _RunByDefault(TyperGroup):
    """A group in which `affinage data RECIPE` is `affinage data run RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


data = verbs("data", "Run the data steps of a recipe, or look at the documents of a run.", cls=_RunByDefault)
checkpoint = verbs("checkpoint", "List, show, compare and verify the checkpoints of a training.")
verb_until(
    "run",
    ("tokenize", "sft-data", "preference-data"),
    "tokenize",
    "Run the data steps: from the sources to sequences of tokens. `affinage data RECIPE` does the same.\n\n"
    "Example: affinage data quickstart --set data.sources='\\[my_folder/]'",  # a bracket alone is a style to rich
    data,
)


@data.command()
def lineage(
    run: RunArgument,
    step: Annotated[int, opt("Of training, from 1, as in metrics.jsonl.", show_default=False)],
    row: Annotated[int | None, opt("Of the batch, from 0; shows its text too.")] = None,
    training: Annotated[terminal.TrainingName, opt("The training whose step it is.")] = "pretrain",
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Print the documents that a training step read.

    Example: affinage data lineage quickstart --step 100 --row 3
    """
    folder, part = _run_and_step(run, runs)
    from affinage.pipeline.lineage import TrainingRows

    name = part if part in ("sft", "dpo") else training
    rows = TrainingRows(folder, name).where(step, row)
    flat = [
        {"row": each["row"], "shard": f"{each['folder']} {each['number']}"} | document
        for each in rows
        for document in each["documents"]
    ]
    emit({"run": str(folder), "training": name, "step": step, "rows": rows}, as_json, terminal.described(flat))


@data.command()
def search(
    run: RunArgument,
    text: Annotated[str, arg("TEXT", "In any letter case.")],
    limit: Annotated[int, opt("Maximum number of documents.", min=1)] = 20,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Find the documents that hold a text, and the steps of pretraining that read them.

    Example: affinage data search quickstart "the continent of France"
    """
    if not text:
        raise UserError("there is nothing to look for", where="TEXT", fix="Give a text of at least one character.")
    folder, _ = _run_and_step(run, runs)
    from affinage.pipeline.lineage import TrainingRows

    with working(f"reading the documents of {folder.name}"):
        documents = list(itertools.islice(TrainingRows(folder, "pretrain").find(text), limit + 1))
    facts = {"run": str(folder), "text": text, "documents": documents[:limit], "more": len(documents) > limit}
    held_out: list[dict[str, Any]] = [{"folder": "held out", "number": None, "steps": []}]
    rows = [
        document | {"rows": None, "shard": row["folder"], "row": row["number"], "read at steps": row["steps"]}
        for document in documents[:limit]
        for row in document["rows"] or held_out
    ]
    view: list[Any] = [terminal.table(rows) if rows else "In no document that was trained on or held out."]
    emit(facts, as_json, view + (["There are more: --limit shows them."] if facts["more"] else []))


@data.command()
def head(
    run: Annotated[str, arg("RUN[/STEP]", "A run, or one of its data steps, such as filter; default: split.")],
    part: Annotated[Literal["train", "validation"] | None, opt("Of split; default: both.")] = None,
    limit: Annotated[int, opt("Number of documents to show.", min=1)] = 10,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Show the first documents that a step passed on.

    Example: affinage data head quickstart/filter
    """
    folder, step = _run_and_step(run, runs)
    from affinage.pipeline.lineage import documents

    page = list(itertools.islice(documents(folder, step or "split", part), limit))
    emit(page, as_json, terminal.described([row | {"text": str(row["text"])[:_SHOWN]} for row in page]))


@data.command()
def stats(run: RunArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Count what each data step kept and removed, with examples, and the tokens of each source and language.

    Example: affinage data stats quickstart
    """
    folder, _ = _run_and_step(run, runs)
    from affinage.results import DOCUMENT_STEPS, DocumentsResult, SequencesResult, read_result

    counts = {"documents_in", "documents_out", "bytes_out", "removed"}
    results = {name: read_result(folder / name, DocumentsResult) for name in DOCUMENT_STEPS}
    steps = {name: result.model_dump(include=counts) for name, result in results.items() if result}
    packed = read_result(folder / "tokenize", SequencesResult)
    parts = packed.model_dump(include={"groups", "validation"}) if packed else {}
    facts = {"steps": steps, "trained on": parts.get("groups", {}), "held out": parts.get("validation", {})}
    removed = [{"step": name, **each} for name, result in results.items() if result for each in result.examples]
    emit(facts | {"removed, for example": removed}, as_json)


def _run_and_step(name: str, runs: Path) -> tuple[Path, str]:
    """The folder of the run that a name stands for, and the step that is named with it; "" if none is."""
    from affinage.pipeline.models import run_of

    target = find(name, runs)
    run = run_of(target, runs)
    return run, target.path.name if target.path.parent == run else ""


@checkpoint.command()
def ls(training: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """List the checkpoints of a training.

    Example: affinage checkpoint ls quickstart/pretrain
    """
    emit(_steps(training, runs, complete=False)[0].listing(), as_json)


@checkpoint.command()
def show(name: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what a checkpoint holds: settings, data, versions, arrays.

    The fingerprint depends on the numbers alone: checkpoints of the same state have the same one, on any mesh.

    Example: affinage checkpoint show quickstart/pretrain@1900
    """
    store, steps = _steps(name, runs)
    metadata = store.metadata(steps[-1])
    arrays = {path: f"{dtype} {shape}" for path, (dtype, shape, _) in metadata.checksums.items()}
    emit(metadata.facts | {"step": steps[-1], "fingerprint": metadata.fingerprint, "arrays": arrays}, as_json)


@checkpoint.command()
def diff(
    one: CheckpointArgument, other: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False
) -> None:
    """Compare two checkpoints: settings, data, versions, mesh, and arrays by their checksums.

    Example: affinage checkpoint diff quickstart/pretrain@1800 quickstart/pretrain@1900
    """
    chosen = [_steps(name, runs) for name in (one, other)]
    from affinage.checkpoint.store import compare

    emit(compare(*(store.metadata(steps[-1]) for store, steps in chosen)), as_json)


@checkpoint.command()
def verify(name: CheckpointArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Read every array of one checkpoint, or of all of a training, and compare it with its checksum.

    The exit status is 2 if one is corrupted, or none is complete.

    Example: affinage checkpoint verify quickstart
    """
    store, steps = _steps(name, runs)
    with working("reading checkpoints"):
        rows = [{"step": step, "corruption": store.verify(step) or None} for step in steps]
    emit(rows, as_json, terminal.described([row | {"corruption": row["corruption"] or "none"} for row in rows]))
    if corrupted := sum(row["corruption"] is not None for row in rows):
        what = f"corrupted: {corrupted} of {terminal.counted(len(rows), 'checkpoint')}"
        fix = "A training resumes from the newest intact one by itself; copy a corrupted one again if it has a copy."
        raise UserError(what, where=name, fix=fix)


def _steps(name: str, runs: Path, *, complete: bool = True) -> "tuple[CheckpointStore, list[int]]":
    """The checkpoints of a training, which is printed, and the step that was named, or all `complete` ones."""
    from affinage.pipeline.models import locate, steps_of

    target = find(name, runs)  # before JAX is imported
    if target.kind == "hub":
        raise UserError("a Hugging Face folder has no checkpoints", where=name, fix="Name a run or a training.")
    training = locate(target, runs)
    print(f"checkpoints of {training.path.name}", file=sys.stderr)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerator may be taken by the training whose checkpoints these are
    from affinage.checkpoint import CheckpointStore

    store, step = CheckpointStore(training.path / "checkpoints"), training.step
    steps = store.steps() if step is None else steps_of(training.path, step, name)
    if complete and not steps:
        raise UserError("no checkpoint is complete", where=str(store.folder), fix="Train the model first.")
    return store, steps

"""The verb `data`: run the data steps, and look at what they made of which document."""

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from typer.core import TyperGroup

from affinage.cli import terminal
from affinage.cli.run import verb_until
from affinage.cli.terminal import arg, emit, find, opt, table, verbs, working
from affinage.errors import UserError

_SHOWN = 200  # characters of a text in a list


class _RunByDefault(TyperGroup):
    """A group in which `affinage data RECIPE` is `affinage data run RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


group = verbs("data", "Run the data steps of a recipe, or look at the documents of a run.", cls=_RunByDefault)


verb_until(
    "run",
    ("tokenize", "sft-data", "preference-data"),
    "tokenize",
    "Run the data steps: from the sources to sequences of tokens. `affinage data RECIPE` does the same.\n\n"
    "Example: affinage data quickstart --set data.sources='\\[my_folder/]'",  # a bracket alone is a style to rich
    group,
)


@group.command()
def lineage(
    run: terminal.RunArgument,
    step: Annotated[int, opt("Of training, from 1, as in metrics.jsonl.", show_default=False)],
    row: Annotated[int | None, opt("Of the batch, from 0; shows its text too.")] = None,
    training: Annotated[terminal.TrainingName, opt("The training whose step it is.")] = "pretrain",
    runs: terminal.RunsOption = terminal.RUNS,
    as_json: terminal.JsonOption = False,
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
    emit({"run": str(folder), "training": name, "step": step, "rows": rows}, as_json, [table(flat)])


@group.command()
def search(
    run: terminal.RunArgument,
    text: Annotated[str, arg("TEXT", "In any letter case.")],
    limit: Annotated[int, opt("Maximum number of documents.", min=1)] = 20,
    runs: terminal.RunsOption = terminal.RUNS,
    as_json: terminal.JsonOption = False,
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
    more, documents = len(documents) > limit, documents[:limit]
    held_out = [{"folder": "held out", "number": "", "steps": []}]
    rows = [
        document | {"rows": None, "shard": f"{row['folder']} {row['number']}", "read at steps": row["steps"]}
        for document in documents
        for row in document["rows"] or held_out
    ]
    view = [table(rows) if rows else "In no document that was trained on or held out."]
    view += ["There are more: --limit shows them."] if more else []
    emit({"run": str(folder), "text": text, "documents": documents, "more": more}, as_json, view)


@group.command()
def head(
    run: Annotated[str, arg("RUN[/STEP]", "A run, or one of its data steps.")],
    step: Annotated[str | None, opt("A data step, such as filter or split (default).")] = None,
    part: Annotated[Literal["train", "validation"] | None, opt("Of split; default: both.")] = None,
    limit: Annotated[int, opt("Number of documents to show.", min=1)] = 10,
    runs: terminal.RunsOption = terminal.RUNS,
    as_json: terminal.JsonOption = False,
) -> None:
    """Show the first documents that a step passed on.

    Example: affinage data head quickstart/filter
    """
    folder, named = _run_and_step(run, runs)
    from affinage.pipeline.lineage import documents

    page = list(itertools.islice(documents(folder, step or named or "split", part), limit))
    shown = [row | {"text": str(row["text"])[:_SHOWN]} if "text" in row else row for row in page]
    emit(page, as_json, [table(shown) if shown else "no documents"])


@group.command()
def stats(
    run: terminal.RunArgument, runs: terminal.RunsOption = terminal.RUNS, as_json: terminal.JsonOption = False
) -> None:
    """Count what each data step kept and removed, and the tokens of each source and language.

    Example: affinage data stats quickstart
    """
    folder, _ = _run_and_step(run, runs)
    from affinage.results import DOCUMENT_STEPS, DocumentsResult, SequencesResult, read_result

    counts = ("documents_in", "documents_out", "bytes_out", "removed")
    results = {name: read_result(folder / name, DocumentsResult) for name in DOCUMENT_STEPS}
    steps = {name: {key: getattr(result, key) for key in counts} for name, result in results.items() if result}
    packed = read_result(folder / "tokenize", SequencesResult)
    parts = packed.model_dump(include={"groups", "validation"}) if packed else {}
    facts = {"steps": steps, "trained on": parts.get("groups", {}), "held out": parts.get("validation", {})}
    emit(facts, as_json)


def _run_and_step(name: str, runs: Path) -> tuple[Path, str]:
    """The folder of the run that a name stands for, and the step that is named with it; "" if none is."""
    from affinage.pipeline.models import run_of

    target = find(name, runs)
    run = run_of(target, runs)
    return run, target.path.name if target.path.parent == run else ""

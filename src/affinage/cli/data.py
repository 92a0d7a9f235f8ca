"""The verb `data`: run the data steps, and look at what they made of which document."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from affinage.cli.options import (
    RUNS,
    JsonOption,
    PipelineOptions,
    RecipeArgument,
    RunArgument,
    RunsOption,
    find,
    opt,
    with_options,
)
from affinage.cli.output import Table, counted, emit
from affinage.cli.run import DATA, SampleOption, run_pipeline, sampled
from affinage.cli.working import Working
from affinage.errors import UserError

_SHOWN = 200  # characters of a text in a list


class _RunByDefault(TyperGroup):
    """A group in which what is no verb is a recipe: `affinage data RECIPE` is `affinage data run RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


group = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Run the data steps of a recipe, or look at the documents of a run.\n\n"
    "Example: affinage data quickstart\n\naffinage data lineage quickstart --step 100",
)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.add_typer(group, name="data")


@group.command("run")
@with_options(how=PipelineOptions)
def run(recipe: RecipeArgument, sample: SampleOption = None, *, how: PipelineOptions) -> None:
    """Run the data steps: from the sources to sequences of tokens. `affinage data RECIPE` does the same.

    Example: affinage data quickstart --set data.sources='[my_folder/]'
    """
    run_pipeline(recipe, sampled(how, "data", sample), DATA, any_of=True)


@group.command("lineage")
def lineage(
    run: RunArgument,
    step: Annotated[int, opt("Of training, from 1, as in metrics.jsonl.", show_default=False)],
    row: Annotated[int | None, opt("Of the batch, from 0; shows its text too.")] = None,
    training: Annotated[str, opt("pretrain, sft or dpo.")] = "pretrain",
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Print the documents that a training step read.

    Example: affinage data lineage quickstart --step 100 --row 3
    """
    folder, part = _run_and_step(run, runs)
    from affinage.pipeline.lineage import TrainingRows

    training = part if part in ("sft", "dpo") else training
    if training not in ("pretrain", "sft", "dpo"):
        raise UserError(f"`{training}` is no training", where="--training", fix="There are pretrain, sft and dpo.")
    found = TrainingRows(folder, training).where(step, row)
    emit({"run": str(folder), "training": training, "step": step, "rows": found}, as_json, _rows(found))


def _rows(found: list[dict[str, Any]]) -> Iterator[str]:
    for each in found:
        yield f"row {each['row']}: {each['folder']}, row {each['number']}"
        for document in each["documents"]:
            tokens = f"tokens {document['start']} to {document['stop']}"
            yield f"    {_named(document)}  {tokens}, of the document from token {document['offset']}"
            if "text" in document:
                yield f"        {document['text']!r}"


@group.command("search")
def search(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="In any letter case.", show_default=False)],
    limit: Annotated[int, opt("Maximum number of documents.", min=1)] = 20,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Find the documents that hold a text, and the steps of pretraining that read them.

    Example: affinage data search quickstart "the currency of Japan"
    """
    if not text:
        raise UserError("there is nothing to look for", fix="Give a text of at least one character.")
    folder, _ = _run_and_step(run, runs)
    from affinage.pipeline.lineage import TrainingRows, last_seen

    training = TrainingRows(folder, "pretrain")
    with Working(f"reading the documents of {folder.name}"):
        found = list(itertools.islice(training.find(text), limit + 1))
    more, found = len(found) > limit, found[:limit]
    earlier = {} if found else last_seen(folder, text)
    facts = {"run": str(folder), "text": text, "documents": found, "more": more, "earlier": earlier}
    emit(facts, as_json, _found(facts, folder, runs, training.steps, limit))


def _found(facts: Mapping[str, Any], run: Path, runs: Path, steps: int, limit: int) -> Iterator[str]:
    from affinage.pipeline.lineage import lost_at, reasons_of
    from affinage.pipeline.models import command

    for document in facts["documents"]:
        count = f"{document['occurrences']} times" if document["occurrences"] > 1 else "once"
        yield f"{_named(document)}  {document['language'] or '?'}, {document['part']}, {count}"
        for row in document["rows"]:
            read = (
                f"read at steps {', '.join(map(str, row['steps']))}" if row["steps"] else f"not read in {steps} steps"
            )
            yield f"    {row['folder']}, row {row['number']}: {read}"
    if facts["more"]:
        yield f"... and more; --limit {limit * 10} shows more of them"
    if facts["documents"]:
        return
    yield "In no document that was trained on or held out."
    for name, count in facts["earlier"].items():
        yield f"    {name}: in {counted(count, 'document')}"
    for name, lost in lost_at(facts["earlier"]).items():
        reasons = reasons_of(run, name)
        listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.items()) or "not recorded"
        yield f"`{name}` removed {lost} of them. Its reasons, for all that it removed: {listed}."
        if reasons:
            shows = command("data head", f"{run.name}/{name}", "--reason", next(iter(reasons)), runs=runs)
            yield f"    {shows} shows samples"


@group.command("head")
def head(
    run: Annotated[
        str, typer.Argument(metavar="RUN[/STEP]", help="A run, or one of its data steps.", show_default=False)
    ],
    step: Annotated[str | None, opt("A data step, such as clean or split (default).")] = None,
    reason: Annotated[str | None, opt("Samples of what the step removed for this reason.")] = None,
    table: Annotated[str | None, opt("removed (of dedup) or matches (of decontaminate).")] = None,
    source: Annotated[str | None, opt("Only documents of this source.")] = None,
    language: Annotated[str | None, opt("Only documents in this language.")] = None,
    part: Annotated[str | None, opt("Of split: train or validation.")] = None,
    skip: Annotated[int, opt("Number of documents to leave out first.", min=0)] = 0,
    limit: Annotated[int, opt("Number of documents to show.", min=1)] = 10,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Show the first documents that a step passed on, or those it removed.

    Example: affinage data head quickstart/filter --reason "too short"
    """
    folder, named = _run_and_step(run, runs)
    from affinage.pipeline.lineage import documents, removed, table_beside

    step = step or named or "split"
    chosen: Iterator[dict[str, Any]]
    if reason is not None:
        chosen = iter(removed(folder, step, reason))
    elif table is not None:
        chosen = table_beside(folder, step, table)
    else:
        chosen = documents(folder, step, part=part, source=source, language=language)
    page = list(itertools.islice(chosen, skip, skip + limit))
    emit(page, as_json, _page(page, skip))


def _page(page: list[dict[str, Any]], skip: int) -> Iterator[str]:
    for each in page:
        text = each.pop("text", None)
        yield "  ".join(f"{key}={value}" for key, value in each.items() if value not in ("", None))
        if text is not None:
            yield f"    {text[:_SHOWN]!r}{'...' if len(text) > _SHOWN else ''}"
    yield f"{skip + 1} to {skip + len(page)}" if page else "no documents"


@group.command("stats")
def stats(run: RunArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Count documents, bytes and tokens by step, source and language; epochs, and tokens per word.

    Example: affinage data stats quickstart
    """
    folder, _ = _run_and_step(run, runs)
    from affinage.pipeline.lineage import data_facts

    facts = data_facts(folder)
    emit(facts, as_json, _facts(facts))


def _facts(facts: Mapping[str, Any]) -> "Iterator[str | Table]":
    rows = [
        (
            name,
            each["documents_out"],
            f"{each['bytes_out'] / 1e6:.1f}",
            ", ".join(f"{reason} {count:,}" for reason, count in each.get("removed", {}).items()),
        )
        for name, each in facts["stages"].items()
    ]
    yield Table(("step", "documents", "MB", "removed"), rows, left=(0, 3))
    yield ""
    if "groups" in facts:
        epochs, packed = (facts["training"] or {}).get("epochs", {}), facts["rows"]
        lines = [(name, *_counts(each), _two(epochs.get(name))) for name, each in facts["groups"].items()]
        columns = ("trained on", "documents", "rows", "tokens", "bytes/token", "epochs")
        yield Table(columns, [*lines, ("all", *_counts(packed["train"]), "")])
        yield ""
        yield Table(
            ("held out", *columns[1:-1]), [(name, *_counts(each)) for name, each in packed["validation"].items()]
        )
        yield (
            f"\nrows of {packed['context']} tokens ({packed['dtype']}), packing {packed['packing']}: "
            f"{packed['padding']:.3%} padding, {counted(packed['cut'], 'document')} cut that fit a row"
        )
    for name, each in facts.get("tokenizer", {}).get("languages", {}).items():
        yield f"{name}: {each['bytes_per_token']:.2f} bytes per token, {each['tokens_per_word']:.2f} tokens per word"


def _counts(each: Mapping[str, int]) -> tuple[Any, ...]:
    rate = each["bytes"] / each["tokens"] if each["tokens"] else None
    return (each["documents"], each["rows"], each["tokens"], _two(rate))


def _two(number: float | None) -> str | None:
    return None if number is None else f"{number:.2f}"


def _run_and_step(name: str, runs: Path) -> tuple[Path, str]:
    """The folder of the run that a name stands for, and the step that is named with it; "" if none is."""
    from affinage.pipeline.models import run_of

    target = find(name, runs)
    run = run_of(target, runs)
    return run, target.path.name if target.path.parent == run else ""


def _named(document: Mapping[str, Any]) -> str:
    url = f" <{document['url']}>" if document["url"] else ""
    return f"{document['source']}/{document['id']}{url}"

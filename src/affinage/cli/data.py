"""The verb `data`: run the data stages, and look at what they made of which document."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, Walking, walks
from affinage.cli.terminal import counted
from affinage.cli.working import Working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.pipeline.lineage import TrainingRows

DATA = ("rows", "compare-tokenizers", "conversations", "preferences")  # the last of the data stages
_SHOWN = 200  # characters of a text in a list

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its name, folder or recipe file.",
        show_default=False,
        autocompletion=completion.models,
    ),
]
StageOption = Annotated[str, typer.Option("--stage", metavar="TRAINING", help="pretrain or sft.")]


class _RunByDefault(TyperGroup):
    """A group in which what is no verb is a recipe: `affinage data RECIPE` is `affinage data run RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


group = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run the data stages of a recipe, or look at the documents of a run.\n\n"
    "Example: affinage data quickstart\n\naffinage data where quickstart --step 100",
)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.add_typer(group, name="data")


@group.command("run")
@walks
def run(
    recipe: RecipeArgument,
    sample: Annotated[
        float | None, typer.Option("--sample", metavar="SHARE", help="Of each source's documents, e.g. 0.001.")
    ] = None,
    *,
    how: Walking,
) -> None:
    """Run the data stages: from the sources to rows of tokens. `affinage data RECIPE` does the same.

    Example: affinage data quickstart --set data.sources='[my_folder/]'
    """
    from affinage.cli.run import sampled, walk

    walk(recipe, how if sample is None else sampled(how, "data", sample), DATA)


@group.command("where")
def where(
    run: RunArgument,
    step: Annotated[int, typer.Option(help="Of training, from 1, as in metrics.jsonl.", show_default=False)],
    row: Annotated[int | None, typer.Option(help="Of the batch, from 0; shows its text too.")] = None,
    stage: StageOption = "pretrain",
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Print the documents that a training step read.

    Example: affinage data where quickstart --step 100 --row 3
    """
    training = _training(run, runs, stage)
    found = training.where(step, row)
    if as_json:
        _print({"run": str(training.run), "stage": stage, "step": step, "rows": found})
        return
    for each in found:
        print(f"row {each['row']}: {each['folder']}, row {each['number']}")
        for document in each["documents"]:
            tokens = f"tokens {document['start']} to {document['stop']}"
            print(f"    {_named(document)}  {tokens}, of the document from token {document['offset']}")
            if "text" in document:
                print(f"        {document['text']!r}")


@group.command("find")
def find(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="In any letter case.", show_default=False)],
    stage: StageOption = "pretrain",
    limit: Annotated[int, typer.Option(min=1, help="Documents, at most.")] = 20,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Say which documents hold a text, and which training steps read it.

    Example: affinage data find quickstart "the currency of Japan"
    """
    from affinage.pipeline.lineage import last_seen, lost_at, reasons_of

    if not text:
        raise UserError("there is nothing to look for", fix="Give a text of at least one character.")
    training = _training(run, runs, stage)
    if stage != "pretrain":
        raise UserError("only the documents of pretraining can be searched", fix="Leave --stage out.")
    with Working(f"reading the documents of {training.run.name}"):
        found = list(itertools.islice(training.find(text), limit + 1))
    more, found = len(found) > limit, found[:limit]
    earlier = {} if found else last_seen(training.run, text)
    if as_json:
        _print({"run": str(training.run), "text": text, "documents": found, "more": more, "earlier": earlier})
        return
    for document in found:
        count = f"{document['occurrences']} times" if document["occurrences"] > 1 else "once"
        print(f"{_named(document)}  {document['language'] or '?'}, {document['part']}, {count}")
        for row in document["rows"]:
            steps = ", ".join(map(str, row["steps"]))
            read = f"read at steps {steps}" if steps else f"read at none of the {training.steps} steps"
            print(f"    {row['folder']}, row {row['number']}: {read}")
    if more:
        print(f"... and more; --limit {limit * 10} shows more of them")
    if not found:
        print("In no document that was trained on or held out.")
        for name, held in earlier.items():
            print(f"    {name}: {counted(held, 'document')} {'holds' if held == 1 else 'hold'} it")
        for name, lost in lost_at(earlier).items():
            reasons = reasons_of(training.run, name)
            listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.items()) or "none it tells"
            print(f"`{name}` removed {lost} of them. Its reasons, for all that it removed: {listed}.")
            if reasons:
                hint = f"affinage data show {run} --stage {name} --reason '{next(iter(reasons))}'"
                print(f"    {hint} shows samples")


@group.command("show")
def show(
    run: RunArgument,
    stage: Annotated[str, typer.Option(help="collect, clean, deduplicate, decontaminate or split.")] = "split",
    reason: Annotated[str | None, typer.Option(help="Samples of what the stage removed for this reason.")] = None,
    table: Annotated[str | None, typer.Option(help="clusters (of deduplicate) or matches (of decontaminate).")] = None,
    source: Annotated[str | None, typer.Option(help="Only documents of this source.")] = None,
    language: Annotated[str | None, typer.Option(help="Only documents in this language.")] = None,
    part: Annotated[str | None, typer.Option(help="Of split: train or validation.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="How many to leave out first.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="How many to show.")] = 10,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Page through the documents that a stage passed on, or those it removed.

    Example: affinage data show quickstart --stage clean --reason "too short"
    """
    from affinage.pipeline.lineage import locate_run
    from affinage.pipeline.looking import documents, removed, table_beside

    folder = locate_run(run, runs)
    chosen: Iterator[dict[str, Any]]
    if reason is not None:
        chosen = iter(removed(folder, stage, reason))
    elif table is not None:
        chosen = table_beside(folder, stage, table)
    else:
        chosen = documents(folder, stage, part=part, source=source, language=language)
    page = list(itertools.islice(chosen, skip, skip + limit))
    if as_json:
        _print(page)
        return
    for each in page:
        text = each.pop("text", None)
        print("  ".join(f"{key}={value}" for key, value in each.items() if value not in ("", None)))
        if text is not None:
            print(f"    {text[:_SHOWN]!r}{'...' if len(text) > _SHOWN else ''}")
    print(f"{skip + 1} to {skip + len(page)}" if page else "nothing there")


@group.command("stats")
def stats(run: RunArgument, runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Count documents, bytes and tokens per stage, source and language; epochs, and tokens per word.

    Example: affinage data stats quickstart
    """
    from affinage.cli.data_tables import show_facts
    from affinage.pipeline.data_facts import data_facts
    from affinage.pipeline.lineage import locate_run

    facts = data_facts(locate_run(run, runs))
    if as_json:
        _print(facts)
    else:
        show_facts(facts)


def _training(run: str, runs: Path, stage: str) -> "TrainingRows":
    from affinage.pipeline.lineage import TrainingRows, locate_run

    if stage not in ("pretrain", "sft", "dpo"):
        raise UserError(f"`{stage}` is no training", fix="Trainings are pretrain and sft.")
    return TrainingRows(locate_run(run, runs), stage)


def _named(document: dict[str, Any]) -> str:
    url = f" <{document['url']}>" if document["url"] else ""
    return f"{document['source']}/{document['id']}{url}"


def _print(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))

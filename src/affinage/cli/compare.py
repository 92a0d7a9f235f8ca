"""The verb `compare`: runs and models beside each other."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import completion
from affinage.cli.judge import folder_of
from affinage.cli.options import RUNS, JsonOption, LangOption, RunsOption, made_with
from affinage.cli.terminal import screen
from affinage.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from affinage.report.comparison import Comparison, Entrant, Paired


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("compare")(compare)


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C]...",
            help="Runs, models that `eval` has judged, or folders of results.",
            autocompletion=completion.models,
        ),
    ],
    runs: RunsOption = RUNS,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page: settings, losses, scores, time.")
    ] = None,
    lang: LangOption = None,
    as_json: JsonOption = False,
) -> None:
    """How runs differ: in settings, time and losses; and their models item by item, with 95 % confidence intervals.

    Differences are from the first one that is named.

    Examples: affinage compare quickstart/evaluate-base quickstart/evaluate-sft

    affinage compare my_model/ quickstart/pretrain@2100

    affinage compare small wide deep --html compared.html
    """
    if len(names) < 2:
        raise UserError("one alone cannot be compared", where=names[0], fix="Name two or more.")
    from affinage.report.comparison import comparison

    found = comparison([_entrant(name, names, runs) for name in names])
    if html is not None:
        from affinage.report.comparison_page import render_comparison
        from affinage.report.page import write_page

        write_page(render_comparison(found, lang), html)
    if as_json:
        print(json.dumps(found.to_dict() | ({"page": str(html)} if html else {}), ensure_ascii=False, indent=1))
        return
    _show(found)
    if html is not None:
        typer.echo(f"\nThe page is in {html}.")


def _entrant(name: str, names: Sequence[str], runs: Path) -> "Entrant":
    """What is known of what is called so; raises UserError if there is neither a run nor a model that was judged."""
    from affinage.pipeline.judged import judged
    from affinage.report.comparison import entrant

    found = judged(name, runs, folder_of(name, runs))
    run = next((place for place in (Path(name), runs / name) if (place / "recipe.json").is_file()), None)
    if run is None and found is None:
        raise UserError(f"there are no results of `{name}`", fix=f"Make them: {_judging(name, names, runs)}")
    return entrant(name, run, None if found is None else found.folder, anew="" if found is None else found.anew)


def _judging(name: str, names: Sequence[str], runs: Path) -> str:
    """The command that judges a model on what its run's recipe evaluates, or else on what others here answered."""
    from affinage.evaluation.benchmarks import BENCHMARKS
    from affinage.evaluation.result_folder import ITEMS
    from affinage.pipeline.judged import judged

    if _asked_by_recipe(name, runs).get("tasks"):
        return f"affinage eval {name}"
    for other in names:
        found, asked = judged(other, runs, folder_of(other, runs)), _asked_by_recipe(other, runs)
        answered = [] if found is None else sorted(file.stem for file in (found.folder / ITEMS).glob("*.jsonl"))
        # Others than these may be of files, which a recipe names and results do not.
        tasks = answered if answered and all(task in BENCHMARKS for task in answered) else asked.get("tasks")
        if tasks:
            items = f" --data-dir {asked['data_dir']}" if asked.get("data_dir") else ""
            return f"affinage eval {name} --tasks {','.join(tasks)}{items}"
    return f"affinage eval {name} --tasks julian (its items are on the hub), or --task my_task.yaml"


def _asked_by_recipe(name: str, runs: Path) -> dict[str, Any]:
    """What the recipe of a run, or of a model's run, has under `evaluate`."""
    with contextlib.suppress(UserError):  # a damaged file is told by what needs it
        return made_with(name, runs).get("evaluate") or {}
    return {}


def _show(found: "Comparison") -> None:

    from affinage.report.comparison_page import quantity_lines, setting_values
    from affinage.report.quantities import Quantities
    from affinage.report.strings import strings

    console = screen()
    names = [one.name for one in found.entrants]
    if lines := quantity_lines(found, strings("en"), Quantities("en")):
        _table(console, ["", *names], [[line.label, *line.values] for line in lines])
    if found.settings:
        _table(console, ["setting", *names], [[one.key, *setting_values(one)] for one in found.settings])
    for one in found.entrants:
        if one.anew:
            told = strings("en")["judged_before"].format(name=one.name, command=one.anew)
            console.print(f"{told}\n", highlight=False, markup=False)
    for pair in found.paired:
        _show_pair(console, found, pair)


def _show_pair(console: "Console", found: "Comparison", pair: "Paired") -> None:
    from affinage.report.comparison_page import notes
    from affinage.report.strings import strings

    a, b = found.entrants[0].name, found.entrants[pair.other].name
    console.print(f"A: {a}, B: {b}")
    rows = []
    for one in pair.differences:
        interval = f"{one.low:+.4f} to {one.high:+.4f}"
        verdict = "real" if one.is_real else "may be noise"
        values = [f"{one.a:.4f}", f"{one.b:.4f}", f"{one.difference:+.4f}", interval, f"{one.items:,}", verdict]
        rows.append([one.task, one.metric, *values])
    _table(console, ["task", "metric", "A", "B", "B − A", "95 % interval", "items", ""], rows, left=2)
    for note in notes(pair, strings("en")):
        console.print(note, highlight=False, markup=False)
    if len({one.task for one in pair.differences}) > 5:
        console.print("Of 20 differences that are not there, one looks real by chance.")


def _table(console: "Console", titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()

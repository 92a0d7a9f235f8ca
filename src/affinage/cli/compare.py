"""The verb `compare`: runs and models beside each other."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, LangOption, RunsOption, find, opt
from affinage.cli.output import Table, emit
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target
    from affinage.report.comparison import Comparison, Entrant, Paired


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("compare")(compare)


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C]...",
            help="Runs, models that `eval` has scored, or folders of results.",
            autocompletion=completion.models,
        ),
    ],
    runs: RunsOption = RUNS,
    html: Annotated[Path | None, opt("Write a page: settings, losses, scores, time.", "--html", metavar="FILE")] = None,
    lang: LangOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: settings, time and losses; and their models item by item, with 95 % confidence intervals.

    Differences are from the first one that is named.

    Examples: affinage compare quickstart/evaluate-base quickstart/evaluate-sft

    affinage compare my_model/ quickstart/pretrain@2100

    affinage compare small wide deep --html compared.html
    """
    if len(names) < 2:
        raise UserError("one alone cannot be compared", where=names[0], fix="Name two or more.")
    for name in names:
        _checked(name, runs)  # before JAX is imported
    from affinage.report.comparison import comparison

    found = comparison([_entrant(name, names, runs) for name in names])
    page = {}
    if html is not None:
        from affinage.report.comparison_page import render_comparison
        from affinage.report.page import write_page

        write_page(render_comparison(found, lang), html)
        page = {"page": str(html)}
    emit(found.to_dict() | page, as_json, _view(found, html))


def _checked(name: str, runs: Path) -> "Target | None":
    """What a name stands for; None for a model that is gone, whose results may be there. Raises UserError as `find`."""
    from affinage.pipeline.models import check_complete

    try:
        target = find(name, runs)
    except UserError:
        if any((runs / "evaluations").glob("*")):
            return None
        raise
    check_complete(target, runs)
    return target


def _entrant(name: str, names: Sequence[str], runs: Path) -> "Entrant":
    """What is known of a name. Raises UserError if it is neither a complete run nor a model with results."""
    from affinage.pipeline.eval_results import eval_results
    from affinage.pipeline.models import resolve, results_of, run_of
    from affinage.report.comparison import entrant

    found, run, parts = eval_results(name, runs), None, None
    target = _checked(name, runs)
    if target is None and found is None:
        resolve(name, runs)
    if target is not None and target.kind in ("recipe", "run"):
        run = run_of(target, runs)
        found = found or eval_results(str(run), runs)
    elif target is not None and target.run is not None and target.is_training and target.step is None:
        parts = results_of(target.path.resolve(), target.run)
        run = target.run if parts else None
    if run is None and found is None:
        raise UserError(f"there are no results of `{name}`", fix=f"Make them: {_evaluation(name, names, runs)}")
    folder, again = (None, "") if found is None else (found.folder, found.again)
    return entrant(name, run, folder, again=again, parts=parts)


def _evaluation(name: str, names: Sequence[str], runs: Path) -> str:
    """The command that evaluates a model on what its run's recipe evaluates, or else on what others here answered."""
    from affinage.evaluation.benchmarks import BENCHMARKS
    from affinage.pipeline.eval_results import eval_results
    from affinage.pipeline.models import ITEMS, command

    if _of_recipe(name, runs).get("tasks"):
        return command("eval", name, runs=runs)
    for other in names:
        found, evaluate = eval_results(other, runs), _of_recipe(other, runs)
        answered = [] if found is None else sorted(file.stem for file in (found.folder / ITEMS).glob("*.jsonl"))
        # Others than these may be of files, which a recipe names and results do not.
        tasks = answered if answered and all(task in BENCHMARKS for task in answered) else evaluate.get("tasks")
        if tasks:
            items = ["--data-dir", evaluate["data_dir"]] if evaluate.get("data_dir") else []
            return command("eval", name, "--tasks", ",".join(tasks), *items, runs=runs)
    return f"{command('eval', name, '--tasks', 'julian', runs=runs)} (its items are on the hub), or --task my_task.yaml"


def _of_recipe(name: str, runs: Path) -> dict[str, Any]:
    """What the recipe of a run, or of a model's run, has under `evaluate`."""
    from affinage.pipeline.models import recorded, resolve

    try:
        run = resolve(name, runs).run
        return {} if run is None else recorded(run).get("evaluate") or {}
    except UserError:  # a damaged file is refused by what needs it
        return {}


def _view(found: "Comparison", html: Path | None) -> "Iterator[str | Table]":
    from affinage.report.comparison_page import quantity_lines, setting_values
    from affinage.report.quantities import Quantities
    from affinage.report.strings import strings

    names = [one.name for one in found.entrants]
    if lines := quantity_lines(found, strings("en"), Quantities("en")):
        yield Table(["", *names], [[line.label, *line.values] for line in lines])
        yield ""
    if found.settings:
        yield Table(["setting", *names], [[one.key, *setting_values(one)] for one in found.settings])
        yield ""
    for one in found.entrants:
        if one.again:
            yield strings("en")["judged_before"].format(name=one.name, command=one.again) + "\n"
    for pair in found.paired:
        yield from _pair(found, pair)
    if html is not None:
        yield f"\nThe page is in {html}."


def _pair(found: "Comparison", pair: "Paired") -> "Iterator[str | Table]":
    from affinage.report.comparison_page import notes
    from affinage.report.strings import strings

    yield f"A: {found.entrants[0].name}, B: {found.entrants[pair.other].name}"
    rows = [
        (
            one.task,
            one.metric,
            *(f"{value:.4f}" for value in (one.a, one.b)),
            f"{one.difference:+.4f}",
            f"{one.low:+.4f} to {one.high:+.4f}",
            one.items,
            "none" if one.is_none else "real" if one.is_real else "may be noise",
        )
        for one in pair.differences
    ]
    yield Table(("task", "metric", "A", "B", "B − A", "95 % interval", "items", ""), rows, left=(0, 1))
    yield ""
    yield from notes(pair, strings("en"))
    if len({one.task for one in pair.differences}) > 5:
        yield "With 95 % intervals, about 1 in 20 null differences looks significant."

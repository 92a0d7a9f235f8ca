"""The verb `compare`: runs and models beside each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from affinage.cli.options import RUNS, JsonOption, LangOption, RunsOption, arg, complete_model, find, opt, verb
from affinage.cli.output import Table, emit
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target
    from affinage.report.comparison import Comparison, Entrant, Paired


@verb()
def compare(
    names: Annotated[
        list[str],
        arg("A B [C]...", "Runs, models that `eval` has scored, or folders of results.", complete_model),
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
    targets = [_target(name, runs) for name in names]  # before JAX is imported
    from affinage.report.comparison import comparison

    found = comparison([_entrant(name, target, runs) for name, target in zip(names, targets)])
    page = {}
    if html is not None:
        from affinage.report.comparison import render_comparison
        from affinage.report.page import write_page

        write_page(render_comparison(found, lang), html)
        page = {"page": str(html)}
    emit(found.to_dict() | page, as_json, _view(found, html))


def _target(name: str, runs: Path) -> "Target | None":
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


def _entrant(name: str, target: "Target | None", runs: Path) -> "Entrant":
    """What is known of a name. Raises UserError if it is neither a complete run nor a model with results."""
    from affinage.pipeline.eval_results import eval_results
    from affinage.pipeline.models import command, resolve, results_of, run_of
    from affinage.report.comparison import entrant

    found, run, parts = eval_results(name, runs), None, None
    if target is None and found is None:
        resolve(name, runs)  # raises
    if target is not None and target.kind in ("recipe", "run"):
        run = run_of(target, runs)
        found = found or eval_results(str(run), runs)
    elif target is not None and target.run is not None and target.is_training and target.step is None:
        parts = results_of(target.path.resolve(), target.run)
        run = target.run if parts else None
    if run is None and found is None:
        fix = f"Make them: {command('eval', name, '--tasks', 'TASKS', runs=runs)}, with the tasks of the others."
        raise UserError(f"there are no results of `{name}`", fix=fix)
    folder, again = (None, "") if found is None else (found.folder, found.again)
    return entrant(name, run, folder, again=again, parts=parts)


def _view(found: "Comparison", html: Path | None) -> "Iterator[str | Table]":
    from affinage.config.yaml import brief

    names = [one.name for one in found.entrants]
    if found.quantities:
        rows = [[name.replace("_", " "), *map(_number, values)] for name, values in found.quantities.items()]
        yield Table(["", *names], rows)
    if found.settings:
        yield ""
        rows = [
            [key, *(None if one is None else brief(one) for one in values)] for key, values in found.settings.items()
        ]
        yield Table(["setting", *names], rows)
    for one in found.entrants:
        if one.again:
            yield f"\n{one.name} has changed since these answers. To evaluate it again: {one.again}"
    for pair in found.paired:
        yield from _pair(found, pair)
    if html is not None:
        yield f"\nThe page is in {html}."


def _number(value: Any) -> str | None:
    if not isinstance(value, int | float):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3g}"


def _pair(found: "Comparison", pair: "Paired") -> "Iterator[str | Table]":
    from affinage.report.comparison import notes
    from affinage.report.language import Language

    yield f"\nA: {found.entrants[0].name}, B: {pair.other.name}"
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
    yield from notes(pair, Language("en"))
    if len({one.task for one in pair.differences}) > 5:
        yield "With 95 % intervals, about 1 in 20 null differences looks significant."

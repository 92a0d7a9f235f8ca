"""The verb `compare`: runs and models beside each other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from affinage.cli.options import RUNS, JsonOption, LangOption, RunsOption, app, arg, find, opt
from affinage.cli.output import Table, described, emit
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target
    from affinage.report.comparison import Comparison, Entrant


@app.command()
def compare(
    names: Annotated[list[str], arg("A B [C]...", "Runs, models that `eval` has scored, or folders of results.")],
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
    from affinage.pipeline.models import check_complete

    targets = [find(name, runs) for name in names]  # before JAX is imported
    for target in targets:
        check_complete(target, runs)
    from affinage.report.comparison import comparison, render_comparison
    from affinage.report.page import write_page

    compared = comparison([_entrant(target, runs) for target in targets])
    facts = compared.to_dict()
    if html is not None:
        write_page(render_comparison(compared, lang), html)
        facts["page"] = str(html)
    emit(facts, as_json, _view(compared, facts))


def _entrant(target: "Target", runs: Path) -> "Entrant":
    """What is known of a target. Raises UserError if it is neither a complete run nor a model with results."""
    from affinage.pipeline.models import TRAININGS, command, eval_results, results_of, run_of
    from affinage.report.comparison import Entrant
    from affinage.report.facts import collect_facts

    name, run, parts = target.name, target.run, None
    if target.kind in ("recipe", "run"):
        run = run_of(target, runs)
        results = eval_results(replace(target, kind="run", path=run), runs)
    else:
        results = eval_results(target, runs)
        is_training = run is not None and target.path.name in TRAININGS and target.step is None
        parts = results_of(target.path.resolve(), run) if run is not None and is_training else None
        run = run if parts else None
    if run is None and results is None:
        fix = f"Make them: {command('eval', name, '--tasks', 'TASKS', runs=runs)}, with the tasks of the others."
        raise UserError(f"there are no results of `{name}` as it is now", fix=fix)
    facts = collect_facts(run, parts) if run is not None else collect_facts(Path(name), {})
    return Entrant(name, facts, results, last=parts is not None)


def _view(compared: "Comparison", facts: dict[str, Any]) -> "Iterator[str | Table]":
    from affinage.config.yaml import brief
    from affinage.report.comparison import notes
    from affinage.report.language import Language

    differences = [
        {key: value for key, value in row.items() if key not in ("is_real", "asked_otherwise")}
        | {"": "real" if row["is_real"] else "may be noise"}
        for row in facts["differences"]
    ]
    runs = [{key: value for key, value in row.items() if key not in ("summary", "scores")} for row in facts["runs"]]
    yield from described({"runs": runs, "differences": differences, "page": facts.get("page")})
    if compared.settings:
        rows = [
            [key, *(None if value is None else brief(value) for value in values)]
            for key, values in compared.settings.items()
        ]
        yield ""
        yield Table(["setting", *(each.name for each in compared.entrants)], rows)
    yield from dict.fromkeys(note for pair in compared.paired.values() for note in notes(pair, Language("en")))
    if len({row["task"] for row in differences}) > 5:
        yield "With 95 % intervals, about 1 in 20 null differences looks significant."

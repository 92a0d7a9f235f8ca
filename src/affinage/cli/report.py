"""The verb `report`: what a run made, as a page."""

import os
from pathlib import Path
from typing import Annotated

from affinage.cli.options import RUNS, JsonOption, LangOption, RunArgument, RunsOption, find, opt, verb, warn
from affinage.cli.output import emit


@verb()
def report(
    run: RunArgument,
    runs: RunsOption = RUNS,
    lang: LangOption = None,
    out: Annotated[
        Path | None, opt("Where to write; default: report.html in the run.", "--out", metavar="FILE")
    ] = None,
    baselines: Annotated[
        Path | None, opt("Show the scores of this file beside those of the run.", "--baselines", metavar="FILE.yaml")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run, one HTML file. With --out, a run that is not complete has a report of what there is.

    Examples: affinage report quickstart

    affinage report quickstart --lang fr --out rapport.html

    affinage report my_run --baselines examples/baselines.yaml
    """
    from affinage.pipeline.models import check_complete, incomplete, run_of

    target = find(run, runs)
    folder = run_of(target, runs)
    if out is None:
        check_complete(target, runs, instead="For a report of what there is, name a file: --out report.html")
    elif missing := incomplete(folder):
        warn(f"`{run}` is not complete; to train: {', '.join(missing)}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: the accelerator is not taken
    from affinage.report import write_report

    file = out or folder / "report.html"
    facts = write_report(folder, file, lang, baselines)
    emit({"report": str(file), **facts}, as_json, [facts["summary"], f"The report is in {file}."])

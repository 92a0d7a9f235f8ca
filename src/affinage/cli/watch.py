"""What a person sees of a run: the plan, a line for each step, and at the end where the results are."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from affinage import results
from affinage.cli import terminal
from affinage.cli.terminal import counted, emit, listed, table, working, write
from affinage.durations import duration
from affinage.pipeline.models import TRAININGS, command
from affinage.pipeline.runner import PipelineRunner, PlannedStep, ProgressListener
from affinage.registry import VARIABLE

_NAME = 16  # columns for the names of steps
_SHOWN = 3  # reasons, benchmarks and groups that the line of a step names
_FACTS = {  # attribute of a result -> what the line of its step says
    "documents_out": "{:,} documents",
    "not_sampled": "{:,} not in the sample",
    "lone_surrogates": "{:,} with damaged characters replaced",
    "validation_documents": "{:,} held out",
    "vocabulary": "{:,} pieces",
    "train.rows": "{:,} rows",
    "parameters.total": "{:,} parameters",
    "final_loss": "loss {:.3f}",
    "summary": "{}",
}


class Watch(ProgressListener):
    """Shows steps as they begin and end."""

    @contextlib.contextmanager
    def running(self, planned: PlannedStep) -> Iterator[Callable[[str], None]]:
        """A step runs inside. A training prints lines of its own, between which no other can be live."""
        if planned.reason != "never ran":
            write(f"{planned.name:<{_NAME}}{planned.reason}")
        if terminal.console.is_terminal and not planned.step.has_progress:
            with working(planned.name) as progress:
                yield progress
        else:
            yield lambda message: None

    def on_end(self, planned: PlannedStep, result: results.Result, seconds: float) -> None:
        """A step is complete."""
        which = "; see affinage data stats RUN" if planned.name == "ingest" and getattr(result, "reasons", None) else ""
        write(f"{planned.name:<{_NAME}}{', '.join(headline(result)) or 'done'}{which}  {duration(seconds)}")


def show_plan(steps: Sequence[PlannedStep], as_json: bool) -> None:
    """List the steps, which of them would run, and why."""
    rows = [{"step": step.name, "runs": not step.complete, "reason": step.reason} for step in steps]
    waiting = sum(not step.complete for step in steps)
    emit(rows, as_json, [table(rows), "", f"{waiting} of {counted(len(steps), 'step')} would run."])


def show_result(runner: PipelineRunner, complete: list[str], seconds: Mapping[str, float], as_json: bool) -> None:
    """Print how long the steps took, where the results are, and the next command."""
    folder, recipe = os.path.relpath(runner.folder), runner.loaded.recipe
    places = {"results": folder}
    for step, title, file in (("report", "report", "report.html"), ("export", "model", "export/model")):
        if step in complete:
            places[title] = f"{folder}/{file}"
    if (training := next((name for name in TRAININGS if name in complete), None)) is not None:
        model = folder if Path(recipe.name).exists() else recipe.name  # a folder of that name here is another model
        model += "" if training == recipe.trainings[-1] else f"/{training}"
        paths = [os.path.relpath(runner.loaded.beside(path, ("plugins", n))) for n, path in enumerate(recipe.plugins)]
        before = f"{VARIABLE}={shlex.quote(os.pathsep.join(paths))} " if paths else ""
        prompt = next(iter(recipe.report.prompts), "Once upon a time")
        words = ("generate", model, prompt) if training == "pretrain" else ("chat", model)
        places["next"] = before + command(*words, runs=runner.runs)
    ran = f"\n{counted(len(seconds), 'step')} in {duration(sum(seconds.values()))}"
    others = f"complete before: {len(complete) - len(seconds)}."
    view = [f"{ran}; {others}\n" if seconds else f"Nothing to do: all {len(complete)} steps are complete.\n"]
    view += [f"{name:<{_NAME}}{place}" for name, place in places.items()]
    emit({"ran": seconds, "complete": complete, **places}, as_json, view)


def headline(result: results.Result) -> Iterator[str]:
    """Yield the few facts of a result that a person wants to see while waiting."""
    for place, words in _FACTS.items():
        value: Any = result
        for name in place.split("."):
            value = getattr(value, name, None)
        if value:
            yield words.format(value)
    if isinstance(result, results.DocumentsResult):
        if result.reasons:
            yield f"removed: {listed([f'{count:,} {reason}' for reason, count in result.reasons], _SHOWN)}"
        if result.benchmarks:
            found = [f"{one.found:,} of {one.items:,} of {at}" for at, one in result.benchmarks.items() if one.found]
            yield f"benchmark items found: {listed(found, _SHOWN) or 'none'}"
        if common := sum(one.common or 0 for one in result.benchmarks.values()):
            yield f"{common:,} in so many documents that they are no match"
        if result.without_validation:
            missed = listed(result.without_validation, _SHOWN)
            yield f"none held out of {missed}: too few documents (data.split.by=tail cuts ends)"
    if isinstance(result, results.EvaluationResult):
        yield counted(len(result.tasks), "benchmark")
        for score in result.headlines[:_SHOWN]:
            error = f" ± {100 * score.stderr:.1f}" if score.stderr else ""
            yield f"{score.task} {100 * score.value:.1f}{error}"

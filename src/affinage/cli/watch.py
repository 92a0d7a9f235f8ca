"""What a person sees of a run: the plan, a line for each step, and at the end where the results are."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from affinage import results
from affinage.cli.terminal import counted, emit, listed, screen, table, working
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
            _print(planned.name, planned.reason)
        if screen().is_terminal and not planned.step.has_progress:
            with working(planned.name) as progress:
                yield progress
        else:
            yield lambda message: None

    def on_end(self, planned: PlannedStep, result: results.Result, seconds: float) -> None:
        """A step is complete."""
        _print(planned.name, f"{', '.join(headline(result)) or 'done'}  {duration(seconds)}")


def _print(name: str, text: str) -> None:
    screen().print(f"{f'{name} ':<{_NAME}}{text}", highlight=False, markup=False, soft_wrap=True)


def show_plan(steps: Sequence[PlannedStep], as_json: bool) -> None:
    """List the steps, which of them would run, and why."""
    rows = [{"step": s.name, "runs": not s.complete, "reason": s.reason, "key": s.request.key} for s in steps]
    shown = [{"step": s.name, "": "stays" if s.complete else "runs", "why": s.reason} for s in steps]
    waiting = sum(not step.complete for step in steps)
    emit(rows, as_json, [table(shown), "", f"{waiting} of {counted(len(steps), 'step')} would run."])


def show_result(runner: PipelineRunner, complete: list[str], seconds: Mapping[str, float], as_json: bool) -> None:
    """Print where the results are, how long the steps took, and the next command."""
    there = places(runner, complete)
    ran = f"\n{counted(len(seconds), 'step')} in {duration(sum(seconds.values()))}"
    before = f"complete before: {len(complete) - len(seconds)}."
    view = [f"{ran}; {before}\n" if seconds else f"Nothing to do: all {len(complete)} steps are complete.\n"]
    view += [f"{name:<{_NAME}}{place}" for name, place in there.items()]
    emit({"ran": seconds, "complete": complete, **there}, as_json, view)


def places(runner: PipelineRunner, names: Sequence[str]) -> dict[str, str]:
    """Where the results of a run's steps are, and the next command, each under its name."""
    folder, recipe = os.path.relpath(runner.folder), runner.loaded.recipe
    by_name = {"results": folder}
    if "report" in names:
        by_name["report"] = f"{folder}/report.html"
    if "export" in names:
        by_name["model"] = f"{folder}/export/model"
    if (training := next((name for name in TRAININGS if name in names), None)) is not None:
        model = folder if Path(recipe.name).exists() else recipe.name  # a folder of that name here is another model
        model += "" if training == recipe.trainings[-1] else f"/{training}"
        plugins = [
            os.path.relpath(runner.loaded.beside(path, ("plugins", at))) for at, path in enumerate(recipe.plugins)
        ]
        before = f"{VARIABLE}={shlex.quote(os.pathsep.join(plugins))} " if plugins else ""
        prompt = next(iter(recipe.report.prompts), "Once upon a time")
        words = ("generate", model, prompt) if training == "pretrain" else ("chat", model)
        by_name["next"] = before + command(*words, runs=runner.runs)
    return by_name


def headline(result: results.Result) -> Iterator[str]:
    """Yield the few facts of a result that a person wants to see while waiting."""
    for place, words in _FACTS.items():
        value: Any = result
        for name in place.split("."):
            value = getattr(value, name, None)
        if value:
            yield words.format(value)
    if isinstance(result, results.DocumentsResult) and result.reasons:
        yield f"removed: {listed([f'{count:,} {reason}' for reason, count in result.reasons], _SHOWN)}"
    if isinstance(result, results.DocumentsResult) and result.benchmarks:
        matches = [f"{one.found:,} of {one.items:,} of {name}" for name, one in result.benchmarks.items() if one.found]
        yield f"benchmark items found: {listed(matches, _SHOWN) or 'none'}"
        if common := sum(one.common or 0 for one in result.benchmarks.values()):
            yield f"{common:,} in so many documents that they are no match"
    if isinstance(result, results.DocumentsResult) and result.without_validation:
        missed = listed(result.without_validation, _SHOWN)
        yield f"none held out of {missed}: too few documents (data.split.by=tail cuts ends)"
    if isinstance(result, results.EvaluationResult):
        yield counted(len(result.tasks), "benchmark")
        for score in result.headlines[:_SHOWN]:
            error = f" ± {100 * score.stderr:.1f}" if score.stderr else ""
            yield f"{score.task} {100 * score.value:.1f}{error}"

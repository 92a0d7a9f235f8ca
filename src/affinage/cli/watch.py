"""What a person sees of a run: the plan, a line for each step, and at the end where the results are."""

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage import results
from affinage.cli.options import warn
from affinage.cli.output import Table, counted, emit, listed, screen, working
from affinage.durations import duration

if TYPE_CHECKING:
    from affinage.pipeline.runner import PipelineRunner, PlannedStep

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


class Watch:
    """Shows steps as they begin and end. Use it as a context manager."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of the steps that ran
        self._live = contextlib.ExitStack()
        self._progress: Any = None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        self._live.close()

    def on_begin(self, planned: "PlannedStep") -> None:
        """A step begins. A training shows its own progress, and only one line can be live on a terminal."""
        if planned.reason != "never ran":
            _print(planned.name, planned.reason)
        if screen().is_terminal and not planned.step.has_progress:
            self._progress = self._live.enter_context(working(planned.name))

    def on_progress(self, message: str) -> None:
        """The running step has got further."""
        if self._progress is not None:
            self._progress(message)

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        """A training has written a line of its metrics, which it shows itself."""

    def on_end(self, planned: "PlannedStep", result: results.Result, seconds: float) -> None:
        """A step is complete."""
        self._live.close()
        self._progress = None
        self.seconds[planned.name] = seconds
        _print(planned.name, f"{', '.join(headline(result)) or 'done'}  {duration(seconds)}")


def _print(name: str, text: str) -> None:
    screen().print(f"{f'{name} ':<{_NAME}}{text}", highlight=False, markup=False, soft_wrap=True)


def show_plan(steps: Sequence["PlannedStep"], as_json: bool) -> None:
    """List the steps, which of them would run, and why."""
    rows = [
        {"step": s.name, "runs": not s.complete, "reason": s.reason, "key": s.request.key, "unchecked": s.unchecked}
        for s in steps
    ]
    shown = [(row["step"], "runs" if row["runs"] else "stays", row["reason"]) for row in rows]
    waiting = sum(not step.complete for step in steps)
    table = Table(("step", "", "why"), shown, left=(0, 1, 2))
    emit(rows, as_json, [table, "", f"{waiting} of {counted(len(steps), 'step')} would run."])


def warn_of(plan: "Sequence[PlannedStep]") -> None:
    """Print the sources whose version no server gave."""
    for url, why in {url: why for step in plan for url, why in step.unchecked.items()}.items():
        warn(f"cannot check whether {url} has changed: {why}")


def show_result(
    runner: "PipelineRunner", steps: Sequence["PlannedStep"], seconds: Mapping[str, float], as_json: bool
) -> None:
    """Print where the results are, how long the steps took, and the next command."""
    complete = [step.name for step in steps]
    there = dict(places(runner, complete))
    view = [f"Nothing to do: all {len(complete)} steps of {runner.loaded.recipe.name} are complete."]
    if seconds:
        ran = f"{counted(len(seconds), 'step')} in {duration(sum(seconds.values()))}"
        view = [f"\n{ran}; complete before: {len(complete) - len(seconds)}."]
    view += ["", *(f"{name:<{_NAME}}{place}" for name, place in there.items())]
    emit({"ran": dict(seconds), "complete": complete, **there}, as_json, view)


def places(runner: "PipelineRunner", names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield where the results of a run's steps are, and the next command, each with its name."""
    from affinage.pipeline.models import TRAININGS, command
    from affinage.registry import VARIABLE

    folder, recipe = os.path.relpath(runner.folder), runner.loaded.recipe
    yield "results", folder
    if "report" in names:
        yield "report", f"{folder}/report.html"
    if "export" in names:
        yield "model", f"{folder}/export/model"
    training = next((name for name in TRAININGS if name in names), None)
    if training is None:
        return
    model = folder if Path(recipe.name).exists() else recipe.name  # a folder here of the same name is another model
    model += "" if training == [*recipe.trainings][-1] else f"/{training}"
    paths = [os.path.relpath(runner.loaded.beside(path, ("plugins", at))) for at, path in enumerate(recipe.plugins)]
    before = f"{VARIABLE}={shlex.quote(os.pathsep.join(paths))} " if paths else ""
    prompt = next(iter(recipe.report.prompts), "Once upon a time")
    words = ("generate", model, prompt) if training == "pretrain" else ("chat", model)
    yield "next", before + command(*words, runs=runner.runs)


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
    if isinstance(result, results.DecontaminateResult):
        matches = [f"{one.found:,} of {one.items:,} of {name}" for name, one in result.benchmarks.items() if one.found]
        yield f"benchmark items found: {listed(matches, _SHOWN) or 'none'}"
    if isinstance(result, results.SplitResult) and result.without_validation:
        missed = listed(result.without_validation, _SHOWN)
        yield f"none held out of {missed}: too few documents (data.split.by=tail cuts ends)"
    if isinstance(result, results.EvaluationResult):
        yield counted(len(result.tasks), "benchmark")
        yield from _scores(result)
    if isinstance(result, results.ExportResult) and result.verified is not None:
        yield verified_in_words(result.verified)


def _scores(result: results.EvaluationResult) -> Iterator[str]:
    """Yield the headline scores of a few benchmarks in percent, with their standard errors."""
    from affinage.report.evaluations import headline as headline_metric

    for name, task in [*result.tasks.items()][:_SHOWN]:
        score = task.metrics.get(headline_metric(name, task.metrics))
        if score is not None and score.value is not None and 0 <= score.value <= 1:
            yield f"{name} {100 * score.value:.1f}" + (f" ± {100 * score.stderr:.1f}" if score.stderr else "")


def verified_in_words(facts: results.Verified) -> str:
    """How well transformers agrees with a model that was exported."""
    return (
        f"transformers computes the same: logits of {facts.tokens:,} tokens at most "
        f"{facts.largest_logit_difference:.1e} of the largest apart, and the same ids"
    )

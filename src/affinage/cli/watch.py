"""What a person sees of a run: the plan, a line for each step, and at the end where the results are."""

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.cli.output import Table, counted, emit, listed, screen, working
from affinage.durations import duration
from affinage.results import (
    ArraysResult,
    ChatDataResult,
    CompareTokenizersResult,
    DecontaminateResult,
    DocumentsResult,
    EvaluationResult,
    ExportResult,
    IngestResult,
    ReportResult,
    Result,
    SplitResult,
    SynthesizeResult,
    TokenizeResult,
    TokenizerResult,
    TrainingResult,
    Verified,
)

if TYPE_CHECKING:
    from affinage.pipeline.plan import PlannedStep
    from affinage.pipeline.runner import PipelineRunner

_NAME = 16  # columns for the names of steps
_REASONS, _BENCHMARKS = 3, 6  # at most, in the line of a step
_FEW_HELD_OUT = 5  # documents: fewer say little about all others


class Watch:
    """Shows steps as they begin and end. Use it as a context manager."""

    def __init__(self, steps: Sequence["PlannedStep"]) -> None:
        self.seconds: dict[str, float] = {}  # of the steps that ran
        self._live = contextlib.ExitStack()
        self._progressed: Any = None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        self._live.close()

    def on_begin(self, planned: "PlannedStep", folder: Path) -> None:
        """A step begins. A training shows its own progress, and only one line can be live on a terminal."""
        if planned.reason != "never ran":
            _print(planned.name, _escaped(planned.reason))
        if screen().is_terminal and not planned.step.has_progress:
            self._progressed = self._live.enter_context(working(planned.name))

    def on_progress(self, message: str) -> None:
        """The running step has got further."""
        if self._progressed is not None:
            self._progressed(message)

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        """A training has written a line of its metrics, which it shows itself."""

    def on_end(self, planned: "PlannedStep", result: Result, seconds: float) -> None:
        """A step is complete."""
        self._live.close()
        self._progressed = None
        self.seconds[planned.name] = seconds
        _print(planned.name, f"{', '.join(headline(result)) or 'done'}  [dim]{duration(seconds)}[/dim]")


def _print(name: str, text: str) -> None:
    screen().print(f"[bold]{f'{name} ':<{_NAME}}[/bold]{text}", highlight=False, soft_wrap=True)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


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


def show_result(
    runner: "PipelineRunner", steps: Sequence["PlannedStep"], seconds: Mapping[str, float], as_json: bool
) -> None:
    """Print where the results are, how long the steps took, and the next command."""
    complete = [step.name for step in steps]
    found = dict(places(runner, complete))
    if seconds:
        times = [(step, duration(spent)) for step, spent in seconds.items()]
        before = len(complete) - len(seconds)
        view: list[str | Table] = ["", Table(("step", "time"), [*times, ("all", duration(sum(seconds.values())))])]
        view += [f"Already complete: {counted(before, 'step')}."] if before else []
    else:
        which = "the step" if len(complete) == 1 else f"all {len(complete)} steps"
        verb = "is" if len(complete) == 1 else "are"
        view = [f"Nothing to do: {which} of {runner.loaded.recipe.name} {verb} complete."]
    view += ["", *(f"{what:<{_NAME}}{place}" for what, place in found.items())]
    emit({"ran": dict(seconds), "complete": complete, **found}, as_json, view)


def places(runner: "PipelineRunner", names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield where the results of a run's steps are, and the next command, each with its name."""
    from affinage.pipeline.names import TRAININGS, command
    from affinage.plugins import VARIABLE

    folder, recipe = os.path.relpath(runner.folder), runner.loaded.recipe
    yield "results", folder
    if "report" in names:
        yield "report", f"{folder}/report.html"
    if "export" in names:
        yield "model", f"{folder}/export/model"
    training = next((name for name in TRAININGS if name in names), None)
    if training is None or (training == "pretrain" and "train-tokenizer" not in names):  # of images
        return
    model = folder if Path(recipe.name).exists() else recipe.name  # a folder here of the same name is another model
    model += "" if training == [*recipe.trainings][-1] else f"/{training}"
    paths = [os.path.relpath(runner.loaded.beside(path, ("plugins", at))) for at, path in enumerate(recipe.plugins)]
    before = f"{VARIABLE}={shlex.quote(os.pathsep.join(paths))} " if paths else ""
    prompt = next(iter(recipe.report.prompts), "Once upon a time")
    words = ("generate", model, prompt) if training == "pretrain" else ("chat", model)
    yield "next", before + command(*words, runs=runner.runs.folder)


def headline(result: Result) -> Iterator[str]:
    """Yield the few facts of a result that a person wants to see while waiting."""
    match result:
        case DocumentsResult():
            yield from _documents(result)
        case TokenizerResult() if result.vocabulary is not None:
            yield f"{result.vocabulary:,} pieces"
        case CompareTokenizersResult():
            for tokenizer in result.tokenizers:
                rates = (f"{entry.bytes_per_token or 0:.2f} {name}" for name, entry in tokenizer.languages.items())
                yield f"{tokenizer.name or 'this run'} {' '.join(rates)} bytes per token"
        case TokenizeResult() | ChatDataResult() if result.train.rows is not None:
            yield f"{counted(result.train.rows, 'row')} of {result.context or 0:,} tokens"
        case ArraysResult() if result.train.images is not None:
            yield counted(result.train.images, "image")
        case TrainingResult():
            if result.images is not None:
                yield counted(result.images, "image")
            if result.parameters.total is not None:
                yield f"{result.parameters.total:,} parameters"
            if result.final_loss is not None:
                yield f"loss {result.final_loss:.3f}"
        case SynthesizeResult():
            yield f"{counted(result.documents or 0, 'document')}, {counted(len(result.tasks), 'task')}"
        case EvaluationResult():
            yield _scores(result)
        case ExportResult() if result.verified is not None:
            yield verified_in_words(result.verified)
        case ReportResult():
            yield _escaped(result.summary)


def _documents(result: DocumentsResult) -> Iterator[str]:
    if result.documents_out is not None:
        before = f"{result.documents_in:,} → " if result.documents_in not in (None, result.documents_out) else ""
        reasons = listed([f"{count:,} {reason}" for reason, count in result.reasons], _REASONS)
        yield before + counted(result.documents_out, "document") + (f" ({reasons})" if reasons else "")
    if isinstance(result, IngestResult) and result.not_sampled:
        yield f"{result.not_sampled:,} not in the sample"
    if isinstance(result, DecontaminateResult):
        matches = [f"{one.found:,} of {one.items:,} of {name}" for name, one in result.benchmarks.items() if one.found]
        yield f"benchmark items found: {listed(matches, _REASONS) or 'none'}"
    if isinstance(result, SplitResult) and (held_out := result.validation_documents):
        few = "[yellow](few to judge by; data.split.validation_fraction=0.1 holds more out)[/yellow]"
        yield f"{held_out:,} held out" + (f" {few}" if held_out < _FEW_HELD_OUT else "")
    if isinstance(result, SplitResult) and (missed := result.without_validation):
        groups = _escaped(listed(missed, _REASONS))
        yield f"[yellow]none held out of {groups}: too few documents[/yellow] (data.split.by=tail cuts ends)"


def _scores(result: EvaluationResult) -> str:
    """The accuracy of a few benchmarks in percent, with a standard error: the metric that papers give."""
    from affinage.report.evaluations import headline as headline_metric

    shown = []
    for name, task in result.tasks.items():
        score = task.metrics.get(headline_metric(name, task.metrics))
        if score is not None and score.value is not None and 0 <= score.value <= 1:
            error = "" if score.stderr is None else f" ± {100 * score.stderr:.1f}"
            shown.append(f"{name} {100 * score.value:.1f}{error}")
    benchmarks = counted(len(result.tasks), "benchmark")
    return f"{benchmarks}: {listed(shown, _BENCHMARKS)}" if shown else benchmarks


def verified_in_words(facts: Verified) -> str:
    """What `hub.verify` compared, and how well it agreed."""
    return (
        f"transformers computes the same: logits of {counted(facts.tokens, 'token')} in "
        f"{counted(facts.texts, 'text')} at most {facts.largest_logit_difference:.1e} of the largest apart, "
        f"the same ids of {counted(facts.token_sequences, 'text')} "
        f"and {counted(facts.conversations, 'conversation')}"
    )

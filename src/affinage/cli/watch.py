"""What a person sees of a run: a plan, a line per stage, and at the end where everything is."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from affinage.cli.output import Table, counted, emit, listed, screen
from affinage.cli.working import Working
from affinage.durations import duration
from affinage.results import (
    ArraysResult,
    ChatDataResult,
    CompareTokenizersResult,
    DecontaminateResult,
    DocumentsResult,
    EvaluationResult,
    ExportResult,
    FilterResult,
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

_NAME = 16  # columns for the names of stages
REASONS = 3  # for which documents were left out, named per stage
_FEW_HELD_OUT = 5  # documents: fewer say little of all others
_TOO_FEW = "[yellow](few to judge by; data.split.validation_fraction=0.1 holds more out)[/yellow]"
NAMES = 6  # benchmarks without an item in the text that are named


class Watch:
    """Shows stages as they begin and end. Use it as a context manager."""

    def __init__(self, steps: Sequence["PlannedStep"]) -> None:
        self.seconds: dict[str, float] = {}  # of the stages that ran
        self._console = screen()
        self._status: Working | None = None
        self._name = ""

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear()

    def on_begin(self, planned: "PlannedStep", folder: Path) -> None:
        """A stage starts. Trainings show their own progress, and only one thing can be live on a terminal."""
        self._name = planned.name
        if planned.reason != "never ran":
            self._line(self._name, _escaped(planned.reason))
        if self._console.is_terminal and not planned.step.has_progress:
            self._status = Working(self._name, self._console)
            self._status.__enter__()

    def on_progress(self, what: str) -> None:
        """The running stage says what it does."""
        if self._status is not None:
            self._status.progressed(what)

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        """A training has written a line of its metrics; it shows them itself."""

    def on_end(self, planned: "PlannedStep", result: Result, seconds: float) -> None:
        """A step is complete."""
        self._clear()
        self.seconds[self._name] = seconds
        said = ", ".join(headline(result)) or "done"
        self._line(self._name, f"{said}  [dim]{duration(self.seconds[self._name])}[/dim]")

    def _line(self, name: str, text: str) -> None:
        self._console.print(f"[bold]{f'{name} ':<{_NAME}}[/bold]{text}", highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        if self._status is not None:
            self._status.__exit__(None, None, None)
            self._status = None


def show_plan(steps: Sequence["PlannedStep"], *, as_json: bool = False) -> None:
    """List the steps, which of them would run, and why."""
    rows = [
        {"step": s.name, "runs": not s.complete, "reason": s.reason, "key": s.request.key, "unchecked": s.unchecked}
        for s in steps
    ]
    table = Table(
        ("step", "", "why"),
        [(row["step"], "runs" if row["runs"] else "stays", row["reason"]) for row in rows],
        left=(0, 1, 2),
    )
    waiting = sum(not step.complete for step in steps)
    emit(rows, as_json, [table, "", f"{waiting} of {counted(len(steps), 'step')} would run."])


def unchecked(steps: Sequence["PlannedStep"]) -> list[str]:
    """One sentence for each source of which nobody knows whether it has changed."""
    found = {url: why for step in steps for url, why in step.unchecked.items()}
    return [f"cannot check whether {url} has changed: {why}" for url, why in found.items()]


def show_result(
    runner: "PipelineRunner", steps: Sequence["PlannedStep"], seconds: Mapping[str, float], *, as_json: bool = False
) -> None:
    """Print where the results are, how long the steps took, and the next command."""
    found = dict(places(runner, [step.name for step in steps]))
    complete = [step.name for step in steps]
    emit({"ran": seconds, "complete": complete, **found}, as_json, _result(runner, complete, seconds, found))


def _result(
    runner: "PipelineRunner", complete: Sequence[str], seconds: Mapping[str, float], found: Mapping[str, str]
) -> "Iterator[str | Table]":
    if not seconds:
        whole = "the step" if len(complete) == 1 else f"all {len(complete)} steps"
        yield f"Nothing to do: {whole} of {runner.loaded.recipe.name} {'is' if len(complete) == 1 else 'are'} complete."
    else:
        yield ""
        times = [(step, duration(spent)) for step, spent in seconds.items()]
        yield Table(("step", "time"), [*times, ("all", duration(sum(seconds.values())))])
        if before := len(complete) - len(seconds):
            yield f"{counted(before, 'step')} {'was' if before == 1 else 'were'} complete before."
    yield ""
    for what, place in found.items():
        yield f"{what:<{_NAME}}{place}"


def places(runner: "PipelineRunner", names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where the results of a run's steps are, and the next command, each with its name."""
    from affinage.pipeline.models import TRAININGS, command
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
    """The few facts of a result that a person wants to see while waiting."""
    if isinstance(result, DocumentsResult):
        yield from _documents(result)
    elif isinstance(result, TokenizerResult) and result.vocabulary is not None:
        yield f"{result.vocabulary:,} pieces"
    elif isinstance(result, CompareTokenizersResult):
        for tokenizer in result.tokenizers:
            rates = (f"{entry.bytes_per_token or 0:.2f} {name}" for name, entry in tokenizer.languages.items())
            yield f"{tokenizer.name or 'ours'} {' '.join(rates)} bytes a token"
    elif isinstance(result, TokenizeResult | ChatDataResult) and result.train.rows is not None:
        yield f"{counted(result.train.rows, 'row')} of {result.context or 0:,} tokens"
    elif isinstance(result, ArraysResult) and result.train.images is not None:
        yield counted(result.train.images, "image")
    elif isinstance(result, TrainingResult):
        yield from _training(result)
    elif isinstance(result, SynthesizeResult):
        yield f"{counted(result.documents or 0, 'document')}, {counted(len(result.tasks), 'task')}"
    elif isinstance(result, EvaluationResult):
        yield _scores(result)
    elif isinstance(result, ExportResult) and result.verified is not None:
        yield verified_in_words(result.verified)
    elif isinstance(result, ReportResult):
        yield _escaped(result.summary)


def _documents(result: DocumentsResult) -> Iterator[str]:
    if result.documents_out is not None:
        came = f"{result.documents_in:,} → " if result.documents_in not in (None, result.documents_out) else ""
        yield came + counted(result.documents_out, "document") + _reasons(result.reasons)
    if isinstance(result, FilterResult):
        if result.split.documents:
            parts = counted(result.split.parts, "part")
            yield f"{counted(result.split.documents, 'long document')} split into {parts}"
        if result.formatted:
            yield f"{counted(result.formatted, 'text')} changed by a formatter"
    if isinstance(result, DecontaminateResult):
        found = {name: one for name, one in result.benchmarks.items() if one.found}
        clean = [name for name in result.benchmarks if name not in found]
        matches = [f"{one.found:,} of {counted(one.items, 'item')} of {name}" for name, one in found.items()]
        lines = [f"found {listed(matches, REASONS)}"] if matches else []
        lines += [f"found no item of {listed(clean, NAMES)}"] if clean else []
        copied = [f"{counted(one.common, 'item')} of {name}" for name, one in result.benchmarks.items() if one.common]
        lines += [f"left {listed(copied, REASONS)}, copied to too many documents (boilerplate)"] if copied else []
        yield from filter(None, ["; ".join(lines)])
    if isinstance(result, SplitResult):
        if held_out := result.validation_documents:
            yield f"{held_out:,} held out" + (f" {_TOO_FEW}" if held_out < _FEW_HELD_OUT else "")
        if missed := result.without_validation:
            groups = _escaped(listed(missed, 3))
            yield f"[yellow]none held out of {groups}: too few documents[/yellow] (data.split.by=tail cuts ends)"
    if isinstance(result, IngestResult) and result.not_sampled:
        yield f"{result.not_sampled:,} not in the sample"


def _training(result: TrainingResult) -> Iterator[str]:
    if result.images is not None:
        yield counted(result.images, "image")
    if result.parameters.total is not None:
        yield f"{result.parameters.total:,} parameters"
    if result.final_loss is not None:
        yield f"loss {result.final_loss:.3f}"
    if count := result.saves.count:
        stopped = f"{counted(count, 'save')} stopped it for {_moment(result.saves.stall_mean)}"
        yield stopped + (f" each, {_moment(result.saves.stall_most)} at most" if count > 1 else "")


def _moment(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _scores(result: EvaluationResult) -> str:
    """The accuracy of a few benchmarks in percent, with a standard error: the one that papers give."""
    from affinage.report.evaluations import headline as headline_metric

    shown = []
    for name, task in result.tasks.items():
        score = task.metrics.get(headline_metric(name, task.metrics))
        if score is not None and score.value is not None and 0 <= score.value <= 1:
            error = "" if score.stderr is None else f" ± {100 * score.stderr:.1f}"
            shown.append(f"{name} {100 * score.value:.1f}{error}")
    benchmarks = counted(len(result.tasks), "benchmark")
    return f"{benchmarks}: {listed(shown, NAMES)}" if shown else benchmarks


def verified_in_words(facts: Verified) -> str:
    """What `hub.verify` compared, and how well it agreed."""
    return (
        f"transformers computes the same: logits of {counted(facts.tokens, 'token')} in "
        f"{counted(facts.texts, 'text')} at most {facts.largest_logit_difference:.1e} of the largest apart, "
        f"the same ids of {counted(facts.token_sequences, 'text')} "
        f"and {counted(facts.conversations, 'conversation')}"
    )


def _reasons(ranked: Sequence[tuple[str, int]]) -> str:
    """Why documents, and files, were left out: the reasons that count most."""
    named = REASONS + (len(ranked) == REASONS + 1)  # to name one is no longer than to say that there is one
    rest = sum(count for _, count in ranked[named:])
    shown = [f"{count:,} {reason}" for reason, count in ranked[:named]]
    return f" ({', '.join([*shown, f'{rest:,} for other reasons'] if rest else shown)})" if shown else ""


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")

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

if TYPE_CHECKING:
    from affinage.pipeline.plan import PlannedStep
    from affinage.pipeline.runner import PipelineRunner

_NAME = 14  # columns for the names of stages
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

    def on_end(self, planned: "PlannedStep", manifest: dict[str, Any]) -> None:
        """A stage is complete."""
        self._clear()
        self.seconds[self._name] = manifest["seconds"]
        said = ", ".join(headline(manifest["summary"])) or "done"
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


def headline(summary: Mapping[str, Any]) -> Iterator[str]:
    """The few facts of a stage's summary that a person wants to see while waiting."""
    if "documents_out" in summary:
        came = summary.get("documents_in", summary["documents_out"])
        left = summary["documents_out"]
        reasons = _reasons(summary.get("removed"))
        yield (f"{came:,} → " if came != left else "") + counted(left, "document") + reasons
    if (parted := summary.get("split")) and isinstance(parted, Mapping) and parted.get("documents"):
        yield f"{counted(parted['documents'], 'long document')} split into {counted(parted['parts'], 'part')}"
    if summary.get("validation_documents"):
        few = summary["validation_documents"] < _FEW_HELD_OUT
        yield f"{summary['validation_documents']:,} held out" + (f" {_TOO_FEW}" if few else "")
    if formatted := summary.get("formatted"):
        yield f"{counted(formatted, 'text')} with personal data replaced"
    yield from _found(summary.get("benchmarks"))
    yield from _odd(summary)
    if isinstance(summary.get("vocabulary"), int):
        yield f"{summary['vocabulary']:,} pieces"
    for tokenizer in summary.get("tokenizers", ()):
        rates = (f"{entry['bytes_per_token']:.2f} {name}" for name, entry in tokenizer["languages"].items())
        yield f"{tokenizer['name'] or 'ours'} {' '.join(rates)} bytes a token"
    if isinstance(summary.get("images"), int):
        yield counted(summary["images"], "image")
    if isinstance(summary.get("train"), Mapping) and "rows" in summary["train"]:
        yield f"{counted(summary['train']['rows'], 'row')} of {summary['context']:,} tokens"
    if isinstance(summary.get("parameters"), Mapping):
        yield f"{summary['parameters']['total']:,} parameters"
    if isinstance(summary.get("final_loss"), float):
        yield f"loss {summary['final_loss']:.3f}"
    if (saves := summary.get("saves")) and isinstance(saves, Mapping) and saves.get("count"):
        mean, most = (_moment(saves[which]) for which in ("stall_mean", "stall_most"))
        stopped = f"{counted(saves['count'], 'save')} stopped it for {mean}"
        yield stopped + (f" each, {most} at most" if saves["count"] > 1 else "")
    if isinstance(summary.get("tasks"), Mapping):
        judged = all(isinstance(task, Mapping) for task in summary["tasks"].values())
        yield _scores(summary["tasks"]) if judged else counted(len(summary["tasks"]), "task")  # of the pocket world
    if isinstance(summary.get("summary"), str):  # of the report: what the whole run made
        yield _escaped(summary["summary"])
    if isinstance(summary.get("verified"), Mapping):
        yield verified_in_words(summary["verified"])


def _moment(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _scores(tasks: Mapping[str, Any]) -> str:
    """The accuracy of a few benchmarks in percent, with a standard error: the one that papers give."""
    from affinage.report.evaluations import headline as headline_metric

    told = []
    for name, task in tasks.items():
        metrics = task.get("metrics", {})
        score = metrics.get(headline_metric(name, metrics), {})
        if isinstance(score.get("value"), int | float) and 0 <= score["value"] <= 1:
            error = f" ± {100 * score['stderr']:.1f}" if isinstance(score.get("stderr"), int | float) else ""
            told.append(f"{name} {100 * score['value']:.1f}{error}")
    benchmarks = counted(len(tasks), "benchmark")
    return f"{benchmarks}: {listed(told, NAMES)}" if told else benchmarks


def verified_in_words(facts: Mapping[str, Any]) -> str:
    """What `hub.verify` compared, and how well it agreed."""
    return (
        f"transformers computes the same: logits of {counted(facts['tokens'], 'token')} in "
        f"{counted(facts['texts'], 'text')} at most {facts['largest_logit_difference']:.1e} of the largest apart, "
        f"the same ids of {counted(facts['token_sequences'], 'text')} "
        f"and {counted(facts['conversations'], 'conversation')}"
    )


def _reasons(removed: Any) -> str:
    """Why documents, and files, were left out: the reasons that count most."""
    if not isinstance(removed, Mapping) or not removed:
        return ""
    ranked = sorted(removed.items(), key=lambda reason: -reason[1])
    named = REASONS + (len(ranked) == REASONS + 1)  # to name one is no longer than to say that there is one
    rest = sum(count for _, count in ranked[named:])
    shown = [f"{count:,} {reason}" for reason, count in ranked[:named]]
    return f" ({', '.join([*shown, f'{rest:,} for other reasons'] if rest else shown)})"


def _found(facts: Any) -> Iterator[str]:
    """What decontamination found, by benchmark."""
    if not isinstance(facts, Mapping) or not facts:
        return
    found = [
        f"{one['found']:,} of {counted(one['items'], 'item')} of {name}" for name, one in facts.items() if one["found"]
    ]
    clean = [name for name, one in facts.items() if not one["found"]]
    told = [f"found {listed(found, REASONS)}"] if found else []
    yield "; ".join([*told, *([f"found no item of {listed(clean, NAMES)}"] if clean else [])])


def _odd(summary: Mapping[str, Any]) -> Iterator[str]:
    """What of the documents a person would not expect."""
    if missed := summary.get("without_validation"):
        groups = _escaped(listed(missed, 3))
        yield f"[yellow]none held out of {groups}: too few documents[/yellow] (data.split.by=tail cuts ends)"
    if left_out := summary.get("not_sampled"):
        yield f"{left_out:,} not in the sample"


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")

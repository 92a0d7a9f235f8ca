"""Trackers: where the metrics of a training go beside metrics.jsonl. Each has a thread and a bounded queue."""

import contextlib
import importlib.util
import inspect
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flax.traverse_util import flatten_dict

from affinage.errors import Preempted, UserError, did_you_mean, first_line
from affinage.registry import Registry
from affinage.secrets import masked

WAITING = 1000  # the most lines that wait for a tracker; it loses those beyond
Ending = Literal["finished", "stopped", "failed"]  # done; preempted, and to be resumed; by an error
TO_CLOSE: dict[Ending, float] = {"finished": 30.0, "failed": 30.0, "stopped": 5.0}  # seconds, for all trackers together


class TrackedRun(NamedTuple):
    """A training, as trackers see it."""

    name: str  # recipe/training
    recipe: str = ""
    runs: Path = Path()  # the folder of all runs, for what is written on this machine
    id: str = ""  # of the tracker at the training's first start; "" at that start
    start: int = 0  # the step that it resumes from
    facts: Mapping[str, Any] = {}  # JSON-able: settings, mesh, versions


class Tracker(NamedTuple):
    """What takes the metrics of one training, all from one thread. It may raise anything: it is reported once."""

    id: str  # to resume with
    log: Callable[[int, Mapping[str, float]], object]
    finish: Callable[[Ending], object]


Starts = Mapping[str, Callable[[TrackedRun], Tracker]]  # what starts each tracker, by its name
_TRACKERS: Registry[Callable[..., Tracker]] = Registry("tracker")
tracker = _TRACKERS.register  # decorator of a function of a TrackedRun, and of the options that a recipe gives
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


def trackers_of(trackers: Mapping[str, Mapping[str, Any]]) -> Starts:
    """Return what starts each tracker, by name; UserError if it is unknown, not installed, or has no such option."""
    for name, options in trackers.items():
        where = f"runtime.trackers.{name}"
        if name not in _TRACKERS:
            fix = did_you_mean(name, _TRACKERS) or "Name the file that registers it in `plugins`."
            raise UserError(f"there is no tracker `{name}`", where=where, fix=fix)
        if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
            what, fix = f"it needs the package `{_PACKAGES[name]}`", f"Install it: pip install 'affinage[{name}]'"
            raise UserError(what, where=where, fix=fix)
        signature = inspect.signature(_TRACKERS[name])
        try:
            signature.bind(TrackedRun(""), **options)
        except TypeError as error:
            fix = f"Its options: {', '.join([*signature.parameters][1:]) or 'none'}."
            raise UserError(f"the tracker {name} {error}", where=where, fix=fix) from None
    return {name: partial(_TRACKERS[name], **options) for name, options in trackers.items()}


class Trackers:
    """The trackers of a training. While entered, `log` hands lines over, which takes microseconds.

    Each of the `starts` runs in its own thread, because it imports for seconds; its id is kept in `folder`. A tracker
    that fails, hangs or is too slow is reported once, to `say`.
    """

    def __init__(self, starts: Starts, run: TrackedRun, folder: Path, say: Callable[[str], None]) -> None:
        self._starts, self._run, self._folder, self._say, self._reported = starts, run, folder, say, set[str]()
        self._lines: dict[str, queue.SimpleQueue[Any]] = {name: queue.SimpleQueue() for name in starts}
        self._threads = {name: threading.Thread(target=self._deliver, args=[name], daemon=True) for name in starts}

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand over a line of metrics.jsonl."""
        for name, lines in self._lines.items():
            if lines.qsize() < WAITING:
                lines.put(row)
            else:
                self._report(name, f"is slower than the training: it loses lines, {WAITING:,} wait for it")

    def __enter__(self) -> "Trackers":
        for thread in self._threads.values():
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ending: Ending = "finished" if kind is None else "stopped" if issubclass(kind, Preempted) else "failed"
        until = time.monotonic() + TO_CLOSE[ending]
        for lines in self._lines.values():
            lines.put(ending)
        for name, thread in self._threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._report(name, "does not finish; it is left behind")

    def _deliver(self, name: str) -> None:
        id_file = self._folder / f"tracker-{name}.id"
        with self._errors_reported(name):
            known = id_file.read_text(encoding="utf-8") if id_file.exists() else ""
            tracker = self._starts[name](self._run._replace(id=known))
            id_file.write_text(tracker.id, encoding="utf-8")
            while not isinstance(line := self._lines[name].get(), str):
                with self._errors_reported(name):
                    tracker.log(line["step"], metrics_of(line))
            tracker.finish(line)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _errors_reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # SystemExit, too: some libraries exit where there is no key
            self._report(name, f"fails: {type(error).__name__}: {first_line(error)}")

    def _report(self, name: str, what: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._say(masked(f"the tracker {name} {what}. The training continues; metrics.jsonl has every line."))


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl as trackers show them: train/loss, validation/NAME/loss."""
    values = flatten_dict(dict(row), sep="/").items()
    numbers = {path: float(value) for path, value in values if isinstance(value, int | float) and path != "step"}
    return {path if "/" in path else f"train/{path}": value for path, value in numbers.items()}


@tracker("tensorboard")
def _tensorboard(run: TrackedRun) -> Tracker:
    """Event files by tensorboardX, in a folder for each training, which is the id."""
    from tensorboardX import SummaryWriter

    folder = str(run.runs / "tensorboard" / run.name)
    purge_step = run.start + 1 if run.id else None  # what an earlier start wrote of later steps is hidden
    writer = SummaryWriter(folder, purge_step=purge_step, filename_suffix=f".{time.time_ns()}")  # read in this order
    writer.add_text("settings", f"```\n{json.dumps(run.facts, indent=1)}\n```", run.start)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(folder, log, lambda ending: writer.close())


@tracker("wandb")
def _weights_and_biases(run: TrackedRun, project: str = "", mode: str = "offline") -> Tracker:
    """One run of all starts, offline for `wandb sync`; neither command line, environment nor code is sent."""
    import wandb

    names = "silent disable_git disable_code disable_job_creation x_disable_meta x_disable_stats".split()
    settings: dict[str, Any] = {"console": "off", **dict.fromkeys(names, True)}
    how: dict[str, Any] = {"project": project or run.recipe, "name": run.name, "mode": mode}
    how |= {"id": run.id or None, "resume": "allow", "config": dict(run.facts), "dir": str(run.runs)}
    started = wandb.init(settings=wandb.Settings(**settings), **how)
    started.define_metric("*", step_metric="step")  # W&B's own step must never go back; a training's may
    return Tracker(
        str(started.id),
        lambda step, values: started.log({**values, "step": step}),
        lambda ending: started.finish(exit_code=0 if ending == "finished" else 1),
    )


@tracker("trackio")
def _trackio(run: TrackedRun, project: str = "") -> Tracker:
    """Trackio's database on this machine. The id is the run's name."""
    os.environ["TRACKIO_DIR"] = str(run.runs / "trackio")
    import trackio

    name = run.id or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    how: dict[str, Any] = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False, "resume": "allow"}
    started = trackio.init(project=project or run.recipe, name=name, config=dict(run.facts), **how)
    return Tracker(name, lambda step, values: started.log(dict(values), step=step), lambda ending: started.finish())


@tracker("mlflow")
def _mlflow(run: TrackedRun, uri: str = "", experiment: str = "") -> Tracker:
    """An MLflow run on a server, or in a database on this machine."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # seven take minutes, and nothing is reported before
    import mlflow

    mlflow.set_tracking_uri(uri or f"sqlite:///{run.runs / 'mlflow.db'}")
    mlflow.set_experiment(experiment or run.recipe)
    info = mlflow.start_run(run_id=run.id or None, run_name=run.name).info
    if not run.id:
        mlflow.log_params({name: str(value)[:500] for name, value in flatten_dict(dict(run.facts), sep="/").items()})
    return Tracker(
        str(info.run_id),
        lambda step, values: mlflow.log_metrics(dict(values), step=step),
        lambda ending: mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending]),
    )

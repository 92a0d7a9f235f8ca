"""The trackers that come with affinage; see `affinage.tracking.Tracker`. Each imports its library in `start`."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from affinage.tracking.trackers import Ending, TrackedRun, Tracker

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MLFLOW_PARAMETERS = 100  # that its service takes at once


@dataclass(kw_only=True)
class TensorBoard:
    """Event files by tensorboardX, in a folder for each training, which is the id."""

    name: str
    folder: str

    def start(self, run: TrackedRun) -> str:
        """Hide what an earlier start wrote of later steps."""
        from tensorboardX import SummaryWriter

        folder = run.id or str(Path(self.folder) / self.name)
        step = run.start + 1 if run.id else None
        # Files are read in the order of their names, which by themselves have whole seconds.
        self._writer = SummaryWriter(folder, purge_step=step, filename_suffix=f".{time.time_ns()}")
        if not run.id:
            rows = "".join(f"| {name} | {value} |\n" for name, value in _flat(run.facts))
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.start)
        return folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """On disk when it returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, ending: Ending) -> None:
        """Close the file."""
        self._writer.close()


@dataclass(kw_only=True)
class WeightsAndBiases:
    """A run with the same id at every start; offline, a folder for each start, for `wandb sync`."""

    name: str
    mode: str
    project: str
    entity: str
    folder: str

    def start(self, run: TrackedRun) -> str:
        """Send neither the command line, nor the environment, nor the code."""
        import wandb

        Path(self.folder).mkdir(parents=True, exist_ok=True)
        private: dict[str, Any] = dict.fromkeys(
            ("silent", "disable_git", "disable_code", "disable_job_creation", "x_disable_meta", "x_disable_stats"), True
        )
        self._run = wandb.init(
            project=self.project,
            entity=self.entity or None,
            name=self.name,
            id=run.id or uuid4().hex,
            resume="allow",
            mode="online" if self.mode == "online" else "offline",
            dir=self.folder,
            config=dict(run.facts),
            settings=wandb.Settings(console="off", **private),
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own step must never go back; a training's may
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the step as a metric."""
        self._run.log({**values, "step": step})

    def finish(self, ending: Ending) -> None:
        """Mark the run."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)


@dataclass(kw_only=True)
class Trackio:
    """Trackio's database on this machine. The id is the run's name."""

    name: str
    project: str
    folder: str

    def start(self, run: TrackedRun) -> str:
        """Keep what the library prints off the terminal."""
        os.environ["TRACKIO_DIR"] = str(Path(self.folder).absolute())  # read when it is imported
        import trackio
        import trackio.run
        import trackio.utils

        for module in (trackio, trackio.run, trackio.utils):
            vars(module)["print"] = lambda *_, **__: None  # it has no option for this
        name = run.id or f"{self.name}-{uuid4().hex[:8]}"
        facts = {key: value for key, value in run.facts.items() if not key.startswith("_")}
        quiet: dict[str, Any] = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = trackio.init(project=self.project, name=name, config=facts, resume="allow", **quiet)
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step."""
        self._run.log(dict(values), step=step)

    def finish(self, ending: Ending) -> None:
        """Write out what is left."""
        self._run.finish()


@dataclass(kw_only=True)
class Mlflow:
    """An MLflow run on a server, or in a database on this machine."""

    name: str
    uri: str
    experiment: str
    folder: str

    def start(self, run: TrackedRun) -> str:
        """Create the experiment and the run where there are none."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its seven take four minutes
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        local = self.uri.startswith("sqlite:///")
        if local:
            Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self._client, self._id = MlflowClient(tracking_uri=self.uri), run.id
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            return run.id
        found = self._client.get_experiment_by_name(self.experiment)
        where = Path(self.folder).as_uri() if local else None
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment, where)
        self._id = str(self._client.create_run(experiment, run_name=self.name).info.run_id)
        parameters = [Param(_name(key), str(value)[:500]) for key, value in _flat(run.facts)]
        for first in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MLFLOW_PARAMETERS])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(key), value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        """Set the status."""
        self._client.set_terminated(self._id, status=_MLFLOW_STATUS[ending])


LIBRARIES: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


def defaults(recipe: str, runs: Path) -> dict[str, dict[str, str]]:
    """The options of each library that a recipe leaves out."""
    return {
        "tensorboard": {"folder": str(runs / "tensorboard")},
        "wandb": {"mode": "offline", "project": recipe, "entity": "", "folder": str(runs)},
        "trackio": {"project": recipe, "folder": str(runs / "trackio")},
        "mlflow": {"uri": f"sqlite:///{runs / 'mlflow.db'}", "experiment": recipe, "folder": str(runs / "mlflow")},
    }


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _name(name: str) -> str:
    """A name that MLflow takes: letters, digits and a few signs."""
    return re.sub(r"[^\w.\-/ :]", "_", name)

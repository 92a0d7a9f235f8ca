"""The trackers that come with affinage; see `affinage.tracking.Tracker`. Each imports its library in `start`."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from affinage.tracking.trackers import Ending, TrackedRun


class _TensorBoard:
    """Event files by tensorboardX, in a folder for each training, which is the id."""

    def __init__(self, *, name: str, recipe: str, runs: Path) -> None:
        self._folder = str(runs / "tensorboard" / name)

    def start(self, run: TrackedRun) -> str:
        from tensorboardX import SummaryWriter

        hide_from = run.start + 1 if run.id else None  # what an earlier start wrote of later steps
        # Files are read in the order of their names, which by themselves have whole seconds.
        self._writer = SummaryWriter(self._folder, purge_step=hide_from, filename_suffix=f".{time.time_ns()}")
        self._writer.add_text("settings", f"```\n{json.dumps(run.facts, indent=1)}\n```", run.start)
        return self._folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, ending: Ending) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run with the same id at every start; offline, a folder for each start, for `wandb sync`."""

    def __init__(self, *, name: str, recipe: str, runs: Path, project: str = "", mode: str = "offline") -> None:
        self._name, self._project, self._runs, self._mode = name, project or recipe, runs, mode

    def start(self, run: TrackedRun) -> str:
        import wandb

        self._runs.mkdir(parents=True, exist_ok=True)
        # Neither the command line, nor the environment, nor the code is sent.
        private: dict[str, Any] = dict.fromkeys(
            ("silent", "disable_git", "disable_code", "disable_job_creation", "x_disable_meta", "x_disable_stats"), True
        )
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            id=run.id or uuid4().hex,
            resume="allow",
            mode="online" if self._mode == "online" else "offline",
            dir=str(self._runs),
            config=dict(run.facts),
            settings=wandb.Settings(console="off", **private),
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own step must never go back; a training's may
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def finish(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "finished" else 1)


class _Trackio:
    """Trackio's database on this machine. The id is the run's name."""

    def __init__(self, *, name: str, recipe: str, runs: Path, project: str = "") -> None:
        self._name, self._project = name, project or recipe
        os.environ["TRACKIO_DIR"] = str(runs / "trackio")  # read when the library is imported

    def start(self, run: TrackedRun) -> str:
        import trackio

        name = run.id or f"{self._name}-{uuid4().hex[:8]}"
        quiet: dict[str, Any] = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = trackio.init(project=self._project, name=name, config=dict(run.facts), resume="allow", **quiet)
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, ending: Ending) -> None:
        self._run.finish()


class _Mlflow:
    """An MLflow run on a server, or in a database on this machine."""

    def __init__(self, *, name: str, recipe: str, runs: Path, uri: str = "", experiment: str = "") -> None:
        self._name, self._experiment = name, experiment or recipe
        self._uri = uri or f"sqlite:///{runs / 'mlflow.db'}"

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its seven take four minutes
        import mlflow

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        mlflow.set_tracking_uri(self._uri)
        mlflow.set_experiment(self._experiment)
        info = mlflow.start_run(run_id=run.id or None, run_name=self._name).info
        if not run.id:
            mlflow.log_params(_flat(run.facts))
        return str(info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import mlflow

        mlflow.log_metrics(dict(values), step=step)

    def finish(self, ending: Ending) -> None:
        import mlflow

        mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending])


LIBRARIES: dict[str, Any] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in facts.items():
        nested = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": str(value)[:500]}
    return flat

"""Run a recipe: leave alone the steps that are complete and run the others, one after the other."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import rich

from affinage.cluster.processes import Processes
from affinage.config.load import LoadedRecipe
from affinage.errors import TransientError, UserError, errno_of
from affinage.pipeline.locks import Lock
from affinage.pipeline.plan import ELSEWHERE, PlannedStep, Sources, plan, select
from affinage.pipeline.same_folder import check_same_folder
from affinage.pipeline.step import Step, StepContext
from affinage.pipeline.store import Request, Store, deleted, link, versions, write_json
from affinage.results import RESULTS, Result, read_result
from affinage.stopping import StopSignals

if TYPE_CHECKING:
    from affinage.pipeline.remote_results import RemoteResults

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, quota, limit on the size of files
_SAME, _NEXT = "what is run", "the next step"  # what processes exchange
_RECIPE, _COMMAND = "recipe.json", "run.json"
_KEY = re.compile(r"\w+(\.\w+|\[\d+\])*")
_POLL = 0.5  # seconds, while another process makes a result


class ProgressListener(Protocol):
    """Is called as a run goes on."""

    def on_begin(self, planned: PlannedStep, folder: Path) -> None:
        """A step begins."""

    def on_progress(self, message: str) -> None:
        """The running step has got further."""

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        """The running training has written a line of its metrics."""

    def on_end(self, planned: PlannedStep, result: Result, seconds: float) -> None:
        """A step is complete."""


@dataclass(frozen=True)
class Runs:
    """The folder of all runs: `<name>/` with links to results for each recipe, and the results in `store/`."""

    folder: Path

    @property
    def store(self) -> Store:
        """The results, which all recipes share."""
        return Store(self.folder / "store")

    def of(self, name: str) -> Path:
        """The folder of the recipe with this name."""
        return self.folder / name


class PipelineRunner:
    """Plans and runs the steps of one recipe in one folder of runs."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        runs: Runs,
        steps: Sequence[Step],
        *,
        until: Sequence[str] = (),
        force: Sequence[str] = (),
    ) -> None:
        self.loaded = loaded
        self.runs = runs
        self.folder = runs.of(loaded.recipe.name)
        if self.folder == runs.store.folder:
            where = loaded.locate(("name",))
            raise UserError("results are kept in `store`", where=where, fix="Give the recipe another name.")
        select(steps, force)  # refuses names of no step
        self._all, self._steps, self._force = steps, select(steps, until), force
        self._remote = _remote_of(loaded, runs.store)
        self._taken: dict[str, Sources] = {}  # the sources' fingerprints, which a run takes once

    def plan(self) -> list[PlannedStep]:
        """Returns every step with whether it must run and why."""
        elsewhere = self._remote.has if self._remote is not None else lambda _: False
        store, force = self.runs.store, self._force
        return plan(self._steps, store, self.folder, force=force, elsewhere=elsewhere, taken=self._taken)

    def run(self, listener: ProgressListener) -> list[PlannedStep]:
        """Run what is not complete, and return the steps that ran. The other processes of a run call `follow`.

        Raises:
            UserError: also if another process is at the same run.
        """
        Processes.current.broadcast(_SAME, self._common())
        try:
            check_same_folder(Processes.current, self.runs.folder)
            return self._run(listener)
        finally:
            Processes.current.broadcast(_NEXT, None)

    def follow(self) -> None:
        """Compute what all processes compute together, as the first one, which calls `run`, announces it."""
        first, mine = Processes.current.broadcast(_SAME, None, seconds=None), self._common()
        if first != mine:
            both = [(name, mine.get(name), value) for name, value in first.items()]
            differences = [f"{name} is {here} and not {there}" for name, here, there in both if here != there]
            raise UserError(
                f"process {Processes.current.index} does not run the same as process 0: {', '.join(differences)}",
                where=str(self.loaded.path),
                fix="Give all processes the same recipe, options and installation.",
            )
        check_same_folder(Processes.current, self.runs.folder)
        store, steps = self.runs.store, {step.name: step for step in self._all}
        while (work := Processes.current.broadcast(_NEXT, None, seconds=None)) is not None:
            inputs = {name: store.find(name, key) for name, key in work["inputs"].items()}
            context = StepContext(self.loaded, store.find(work["step"], work["key"]), inputs, self.folder)
            with Processes.current.all_at_work(), self._errors_with_lines():
                steps[work["step"]].fn(context)

    def _common(self) -> dict[str, str]:
        """What must be the same for all processes."""
        settings = json.dumps(self.loaded.recipe.model_dump(mode="json"), sort_keys=True)
        return {"the hash of the recipe": hashlib.sha256(settings.encode()).hexdigest()[:12], **versions()}

    # ---- the run ----

    def _run(self, listener: ProgressListener) -> list[PlannedStep]:
        steps, store, remote = self.plan(), self.runs.store, self._remote
        if all(planned.complete and store.is_complete(planned.request) for planned in steps):
            self._note(steps)
            return []
        ran = []
        with self._alone():
            steps = self.plan()  # again: another process may have been at some of them
            self._discard([planned for planned in reversed(steps) if planned.forced])
            self._note(steps)
            requests = {planned.name: planned.request for planned in steps}
            if remote is not None:
                for planned in steps:
                    if store.is_complete(planned.request) and not remote.has(planned.request):
                        remote.copy(planned.request)
                if all(planned.complete for planned in steps):
                    self._fetch(list(requests), requests, small=True)
                    self._note(steps)
            for planned in steps:
                if planned.reason == ELSEWHERE:
                    continue
                with self._making(planned.request) as missing:
                    if missing:
                        StopSignals.raise_pending()
                        self._fetch(planned.step.inputs, requests, small=bool(planned.step.artifact))
                        self._note(steps)
                        self._make(planned, listener)
                        ran.append(planned)
                self._link(planned)
                if missing and remote is not None:
                    remote.copy(planned.request)
            if remote is not None and remote.failure:
                to = self.loaded.recipe.runtime.remote
                _print(f"NOT all results were copied to {to}: {remote.failure}; run it again to try")
        return ran

    def _make(self, planned: PlannedStep, listener: ProgressListener) -> None:
        step, store = planned.step, self.runs.store
        inputs = {name: store.find(name, key) for name, key in planned.request.inputs.items()}

        def on_metrics(row: Mapping[str, Any]) -> None:
            if not store.is_begun(planned.request):  # nothing that a training writes there would be found
                raise deleted(store.path(planned.request))
            listener.on_metrics(row)

        with self._undone_if_refused(planned):
            folder = store.begin(planned.request, resume=step.resumable)
            if step.resumable:
                link(self.folder / step.name, folder)  # so that one can look at a training while it runs
            listener.on_begin(planned, folder)
            started, clock = time.time(), time.monotonic()
            with self._errors_with_lines(), _full_disk_in_one_message(folder):
                context = StepContext(self.loaded, folder, inputs, self.folder, listener.on_progress, on_metrics)
                if step.setup is not None:
                    step.setup(context, forced=planned.forced)
                with _with_all_processes(planned.request) if step.distributed else contextlib.nullcontext():
                    summary = step.fn(context)
                manifest = store.finish(planned.request, summary, started=started, clock=clock)
        result = read_result(folder, RESULTS.get(step.name, Result))
        assert result is not None
        listener.on_end(planned, result, manifest["seconds"])

    # ---- other processes ----

    def _lock(self, name: str) -> Lock:
        return Lock(self.runs.store.folder / ".locks", name, f"affinage, recipe {self.loaded.recipe.name}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, this process alone is at the run. A run that is refused before it makes anything leaves no folder."""
        lock = self._lock(f"{self.loaded.recipe.name}.run")
        if not lock.acquire():
            raise UserError(
                f"{lock.holder} is at this run",
                where=str(self.folder),
                fix="Wait until it ends, or make another run: --set name=NAME.",
            )
        try:
            self.runs.store.sweep()
            was_there = self.folder.exists()
            try:
                yield
            except UserError:
                with contextlib.suppress(OSError):  # the refusal is what matters
                    if not was_there and {entry.name for entry in self.folder.iterdir()} <= {_RECIPE, _COMMAND}:
                        shutil.rmtree(self.folder)
                raise
        finally:
            lock.release()

    @contextlib.contextmanager
    def _making(self, request: Request) -> Iterator[bool]:
        """Inside, a missing result is this process's to make. Yields whether it is missing.

        While another process makes it, this one waits and prints for whom.
        """
        store, lock = self.runs.store, self._lock(self.runs.store.path(request).name)
        printed = False
        while not store.is_complete(request) and not lock.acquire():
            if not printed:
                _print(f"{request.step}: waiting for {lock.holder}, which is making it")
            printed = True
            time.sleep(_POLL)
        try:
            yield not store.is_complete(request)
        finally:
            lock.release()

    def _discard(self, steps: Sequence[PlannedStep]) -> None:
        """Remove results that are forced to be made again. Raises UserError where another running run uses one."""
        for planned in steps:
            result = self.runs.store.path(planned.request)
            for linked in self.runs.folder.glob(f"*/{planned.name}"):
                other = linked.parent
                if other != self.folder and linked.exists() and linked.resolve() == result.resolve():
                    lock = self._lock(f"{other.name}.run")
                    if not lock.acquire():
                        raise UserError(
                            f"{lock.holder} uses the result of {planned.name} that is to be made again",
                            where="--force",
                            fix="Wait until it ends, or give this run a folder of its own with --runs.",
                        )
                    lock.release()
            self.runs.store.discard(planned.request)

    def _fetch(self, steps: Collection[str], requests: Mapping[str, Request], *, small: bool) -> None:
        """Copy from the recipe's `remote` what is there and not here."""
        if self._remote is not None:
            self._remote.bring(steps, requests, _print, self._making, small=small)

    # ---- the folder of the run ----

    @contextlib.contextmanager
    def _undone_if_refused(self, planned: PlannedStep) -> Iterator[None]:
        """A training that is refused before its first step leaves the run as it was."""
        folder, linked = self.runs.store.path(planned.request), self.folder / planned.name
        was_there, before = folder.exists(), os.readlink(linked) if linked.is_symlink() else None
        try:
            yield
        except UserError as error:
            refused = planned.step.has_progress and not was_there and not isinstance(error, TransientError)
            if refused and not _has_begun(folder):
                if before is None:
                    linked.unlink(missing_ok=True)
                else:
                    link(linked, linked.parent / before)
                self.runs.store.discard(planned.request)
            raise

    @contextlib.contextmanager
    def _errors_with_lines(self) -> Iterator[None]:
        """Add the line of the recipe to errors that name one of its keys, such as `data.sources[0]`."""
        try:
            yield
        except UserError as error:
            keys = re.findall(r"\w+", error.where)
            if not keys or keys[0] not in type(self.loaded.recipe).model_fields or not _KEY.fullmatch(error.where):
                raise
            where = self.loaded.locate([int(key) if key.isdigit() else key for key in keys])
            raise UserError(error.what, where=where or error.where, fix=error.fix) from error

    def _link(self, planned: PlannedStep) -> None:
        result, artifact = self.runs.store.path(planned.request), planned.step.artifact
        link(self.folder / planned.name, result)
        if artifact:
            link(self.folder / artifact, result / artifact)

    def _note(self, steps: Sequence[PlannedStep]) -> None:
        """Write the settings in effect, link what is complete, and remove links of steps that the recipe lacks now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _RECIPE, self.loaded.recipe.model_dump(mode="json"))
        path = os.path.abspath(self.loaded.path)  # its settings may name files relative to it
        write_json(self.folder / _COMMAND, {"command": self.loaded.command, "recipe": path})
        for planned in steps:
            if self.runs.store.path(planned.request).is_dir() and planned.complete:
                self._link(planned)
        names, store = {name for step in self._all for name in (step.name, step.artifact)}, self.runs.store.folder
        for entry in self.folder.iterdir():
            if entry.is_symlink() and entry.name not in names:
                target = Path(os.path.normpath(entry.parent / os.readlink(entry)))
                if target.is_relative_to(os.path.normpath(store)):
                    entry.unlink()


def _remote_of(loaded: LoadedRecipe, store: Store) -> "RemoteResults | None":
    if loaded.recipe.runtime.remote is None:
        return None
    from affinage.pipeline.remote_results import RemoteResults  # imports JAX, which a plan does without

    return RemoteResults(loaded.recipe.runtime.remote, store)


def _print(line: str) -> None:
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _with_all_processes(request: Request) -> Iterator[None]:
    """Inside, the processes that follow compute the same step."""
    Processes.current.broadcast(_NEXT, {"step": request.step, "key": request.key, "inputs": request.inputs})
    with Processes.current.all_at_work():
        yield


def _has_begun(training: Path) -> bool:
    """Whether a training has made a step, or has a checkpoint of another machine."""
    metrics, checkpoints = training / "metrics.jsonl", training / "checkpoints"
    return (metrics.is_file() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


@contextlib.contextmanager
def _full_disk_in_one_message(folder: Path) -> Iterator[None]:
    """Turn the errors of a full disk into one message."""
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number not in _DISK_FULL:
            raise
        raise UserError(
            f"there is no room to write here: {os.strerror(number)}",
            where=str(folder),
            fix="Free some space, or use another disk with --runs. What is complete is kept: run again to resume.",
        ) from error

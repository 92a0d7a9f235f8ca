"""Run a recipe: leave alone the steps that are complete and run the others, one after the other."""

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import rich

from affinage.cluster.processes import Processes
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.errors import UserError
from affinage.pipeline.plan import ELSEWHERE, PlannedStep, Sources, reason_to_run, select, sources_of
from affinage.pipeline.sources import forget_downloads
from affinage.pipeline.step import Step, StepContext
from affinage.pipeline.store import REQUEST, Lock, Request, Store, link, read_request, versions, write_json
from affinage.results import RESULTS, Result, read_result
from affinage.stopping import StopSignals

if TYPE_CHECKING:
    from affinage.pipeline.remote_results import RemoteResults

_SAME, _NEXT = "what is run", "the next step"  # what processes exchange
_RECIPE, _COMMAND = "recipe.json", "run.json"
_KEY = re.compile(r"\w+(\.\w+|\[\d+\])*")
_POLL = 0.5  # seconds, while another process makes a result
_SHOWN_WITHIN = 20.0  # seconds: a network file system may be late to show what another machine wrote


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


class PipelineRunner:
    """Plans and runs the steps of one recipe.

    The folder `runs` has one folder `<name>/` for each recipe, with links to its results, and all results in `store/`.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        runs: Path,
        steps: Sequence[Step],
        *,
        until: Sequence[str] = (),
        force: Sequence[str] = (),
    ) -> None:
        self.loaded, self.runs, self.store = loaded, runs, Store(runs / "store")
        self.folder = runs / loaded.recipe.name
        if self.folder == self.store.folder:
            where = loaded.locate(("name",))
            raise UserError("results are kept in `store`", where=where, fix="Give the recipe another name.")
        select(steps, force)  # refuses names of no step
        self._all, self._steps, self._force = steps, select(steps, until), force
        self._taken: dict[str, Sources] = {}  # the sources' fingerprints, which a run takes once
        self._remote = _remote_of(loaded, self.store)

    def plan(self) -> list[PlannedStep]:
        """Returns every step with whether it must run and why; nothing is run."""
        planned: dict[str, PlannedStep] = {}
        for step in self._steps:
            before = read_request(self.folder / step.name)
            if step.name not in self._taken:
                self._taken[step.name] = sources_of(step, before[0] if before else None)
            sources, unchecked = self._taken[step.name]
            inputs = {name: planned[name].request.key for name in step.inputs}
            request = Request(step.name, step.version, step.config, inputs, sources)
            complete, reason = False, ""
            if step.name in self._force:
                reason = "forced"
            elif forced := [name for name in step.inputs if planned[name].forced]:
                reason = f"forced by {forced[0]}"
            elif self.store.is_complete(request):
                complete, reason = True, "complete"
            elif self._remote is not None and self._remote.has(request):
                complete, reason = True, ELSEWHERE
            reason = reason or reason_to_run(step, self.store, request, before)
            planned[step.name] = PlannedStep(step, request, complete, reason, unchecked)
        return list(planned.values())

    def run(self, listener: ProgressListener) -> list[PlannedStep]:
        """Run what is not complete, and return the steps that ran. The other processes of a run call `follow`.

        Raises:
            UserError: also if another process is at the same run.
        """
        Processes.current.broadcast(_SAME, self._common())
        try:
            return self._run(listener)
        finally:
            Processes.current.broadcast(_NEXT, None)

    def follow(self) -> None:
        """Compute what all processes compute together, as the first one, which calls `run`, announces it."""
        first, mine = Processes.current.broadcast(_SAME, None, seconds=None), self._common()
        if first != mine:
            other = ", ".join(name for name in first if mine.get(name) != first[name])
            what = f"process {Processes.current.index} does not run the same as process 0; these differ: {other}"
            fix = "Give all processes the same recipe, options and installation."
            raise UserError(what, where=str(self.loaded.path), fix=fix)
        steps = {step.name: step for step in self._all}
        while (work := Processes.current.broadcast(_NEXT, None, seconds=None)) is not None:
            folder, until = self.store.find(work["step"], work["key"]), time.monotonic() + _SHOWN_WITHIN
            while not (folder / REQUEST).is_file():
                if time.monotonic() > until:
                    what = f"process {Processes.current.index} on {platform.node()} sees nothing that process 0 writes"
                    fix = "Give all processes a --runs on one disk that all of them see; see docs/clusters.md."
                    raise UserError(what, where=str(folder.absolute()), fix=fix)
                time.sleep(_POLL)
            context = StepContext(self.loaded, folder, self._inputs(work["inputs"]), self.folder)
            with Processes.current.all_at_work(), self._errors_with_lines():
                steps[work["step"]].fn(context)

    def _common(self) -> dict[str, str]:
        """What must be the same for all processes."""
        settings = json.dumps(self.loaded.recipe.model_dump(mode="json"), sort_keys=True)
        return {"the hash of the recipe": hashlib.sha256(settings.encode()).hexdigest()[:12], **versions()}

    def _inputs(self, keys: Mapping[str, str]) -> dict[str, Path]:
        return {name: self.store.find(name, key) for name, key in keys.items()}

    # ---- the run ----

    def _run(self, listener: ProgressListener) -> list[PlannedStep]:
        steps, store, remote = self.plan(), self.store, self._remote
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
                for request in requests.values():
                    if store.is_complete(request) and not remote.has(request):
                        remote.copy(request)
                if all(planned.complete for planned in steps):
                    remote.bring(list(requests), requests, _print, self._making, small=True)
                    self._note(steps)
            for planned in steps:
                if planned.reason == ELSEWHERE:
                    continue
                with self._making(planned.request) as missing:
                    if missing:
                        StopSignals.raise_pending()
                        if remote is not None:
                            small = bool(planned.step.artifact)
                            remote.bring(planned.step.inputs, requests, _print, self._making, small=small)
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
        step, request, store = planned.step, planned.request, self.store
        folder = store.begin(request, resume=step.resumable)
        listener.on_begin(planned, folder)
        started, clock = time.time(), time.monotonic()

        def on_metrics(row: Mapping[str, Any]) -> None:
            store.check_begun(request)  # nothing that a training writes into another folder would be found
            # One can look at a training while it runs; one that is refused at its beginning leaves the run as it was.
            link(self.folder / step.name, folder)
            listener.on_metrics(row)

        inputs = self._inputs(request.inputs)
        context = StepContext(self.loaded, folder, inputs, self.folder, listener.on_progress, on_metrics)
        with self._errors_with_lines(), contextlib.ExitStack() as together:
            if planned.forced:
                forget_downloads(step.files)
            if step.setup is not None:
                step.setup(context, planned.forced)
            if step.distributed:
                work = {"step": request.step, "key": request.key, "inputs": request.inputs}
                Processes.current.broadcast(_NEXT, work)
                together.enter_context(Processes.current.all_at_work())
            summary = step.fn(context)
        manifest = store.finish(request, summary, started=started, clock=clock)
        result = read_result(folder, RESULTS.get(step.name, Result))
        assert result is not None
        listener.on_end(planned, result, manifest["seconds"])

    # ---- other processes ----

    def _lock(self, name: str) -> Lock:
        return Lock(self.store.folder / ".locks", name, f"affinage, recipe {self.loaded.recipe.name}")

    @contextlib.contextmanager
    def _locked(self, name: str, doing: str) -> Iterator[None]:
        lock = self._lock(name)
        if not lock.acquire():
            fix = "Wait until it ends, or make another run: --set name=NAME, or --runs FOLDER."
            raise UserError(f"{lock.holder} {doing}", where=str(self.folder), fix=fix)
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, this process alone is at the run. A run that is refused before it makes anything leaves no folder."""
        with self._locked(f"{self.loaded.recipe.name}.run", "is at this run"):
            was_there = self.folder.exists()
            self.store.sweep()
            try:
                yield
            except UserError:
                with contextlib.suppress(OSError):  # the refusal is what matters
                    if not was_there and {entry.name for entry in self.folder.iterdir()} <= {_RECIPE, _COMMAND}:
                        shutil.rmtree(self.folder)
                raise

    @contextlib.contextmanager
    def _making(self, request: Request) -> Iterator[bool]:
        """Inside, a missing result is this process's to make. Yields whether it is missing.

        While another process makes it, this one waits and prints for whom.
        """
        lock = self._lock(self.store.path(request).name)
        for attempt in itertools.count():
            if self.store.is_complete(request) or lock.acquire():
                break
            if attempt == 0:
                _print(f"{request.step}: waiting for {lock.holder}, which is making it")
            time.sleep(_POLL)
        try:
            yield not self.store.is_complete(request)
        finally:
            lock.release()

    def _discard(self, steps: Sequence[PlannedStep]) -> None:
        """Remove results that are forced to be made again. Raises UserError where another running run uses one."""
        for planned in steps:
            result = self.store.path(planned.request).resolve()
            for linked in self.runs.glob(f"*/{planned.name}"):
                if linked.parent != self.folder and linked.resolve() == result:
                    with self._locked(f"{linked.parent.name}.run", f"uses the result of {planned.name}"):
                        pass
            self.store.discard(planned.request)

    # ---- the folder of the run ----

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
        result, artifact = self.store.path(planned.request), planned.step.artifact
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
            if planned.complete and self.store.path(planned.request).is_dir():
                self._link(planned)
        names = {name for step in self._all for name in (step.name, step.artifact)}
        store = os.path.normpath(self.store.folder)
        for entry in self.folder.iterdir():
            leads_to = os.path.normpath(entry.parent / os.readlink(entry)) if entry.is_symlink() else ""
            if entry.name not in names and Path(leads_to).is_relative_to(store):
                entry.unlink()


def _remote_of(loaded: LoadedRecipe, store: Store) -> "RemoteResults | None":
    if loaded.recipe.runtime.remote is None:
        return None
    from affinage.pipeline.remote_results import RemoteResults  # imports JAX, which a plan does without

    return RemoteResults(loaded.recipe.runtime.remote, store)


def _print(line: str) -> None:
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


# ---- sweeps ----


@dataclass(frozen=True)
class Point:
    """One choice of every setting of a sweep's grid."""

    number: int  # from 1
    settings: dict[str, Any]  # key of the recipe -> value
    loaded: LoadedRecipe


def points(recipe: str, overrides: Sequence[str]) -> list[Point]:
    """The points of a recipe's `sweep`, the last setting varying fastest, each with its recipe.

    Raises:
        UserError: there is no grid, or a point of it is no recipe.
    """
    loaded = load_recipe(recipe, overrides)
    grid = loaded.recipe.sweep
    if not grid:
        fix = "Give settings and values: --set 'sweep={sft.steps: [100, 300], sft.schedule.peak_lr: [1e-3, 3e-4]}'"
        raise UserError("this recipe has no `sweep`", where=str(loaded.path), fix=fix)
    found = []
    for number, values in enumerate(itertools.product(*grid.values()), 1):
        chosen = dict(zip(grid, values))
        words = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        name = f"name={loaded.recipe.name}-{number:03}"
        found.append(Point(number, chosen, load_recipe(recipe, [*overrides, *words, name, "sweep={}"])))
    return found

"""Plan a recipe's steps, and run those that are not complete, one after the other."""

import contextlib
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout

from affinage.cluster.processes import Processes
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.data.places import is_url
from affinage.differing import differing
from affinage.errors import UserError
from affinage.pipeline.models import COMMAND, RECIPE
from affinage.pipeline.sources import fingerprints, remote_fingerprints
from affinage.pipeline.step import Step, StepContext, print_line
from affinage.pipeline.store import REQUEST, Request, Store, link, read_request, versions, write_json
from affinage.results import RESULT, RESULTS, Result, read_json
from affinage.stopping import StopSignals

if TYPE_CHECKING:
    from affinage.pipeline.remote_results import RemoteResults

_SAME, _NEXT = "what is run", "the next step"  # what processes exchange
_KEY = re.compile(r"\w+(\.\w+|\[\d+\])*")
_POLL = 0.5  # seconds, while another process makes a result
_SHOWN_WITHIN = 20.0  # seconds: a network file system may be late to show what another machine wrote
_REMOTE = "complete at the remote"  # the reason of a step whose result is only there


@dataclass(frozen=True)
class PlannedStep:
    """A step, what its result is a function of, and whether that result is there."""

    step: Step
    request: Request
    complete: bool
    reason: str
    unchecked: dict[str, str]  # URLs that it reads and of which no server gave the version -> why

    @property
    def name(self) -> str:
        """The step's name."""
        return self.step.name

    @property
    def forced(self) -> bool:
        """Whether it runs because of `--force`."""
        return self.reason.startswith("forced")


class ProgressListener(Protocol):
    """Is called as a run continues."""

    def on_begin(self, planned: PlannedStep) -> None:
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
            where, fix = loaded.locate(("name",)), "Give the recipe another name."
            raise UserError("results are kept in `store`", where=where, fix=fix)
        _select(steps, force)  # refuses names of no step
        self._all, self._steps, self._force = steps, _select(steps, until), force
        self._sources: dict[str, tuple[dict[str, str], dict[str, str]]] = {}  # of each step, read once
        self._remote: RemoteResults | None = None
        if loaded.recipe.runtime.remote is not None:
            from affinage.pipeline import remote_results  # imports JAX, which a plan does without

            self._remote = remote_results.RemoteResults(loaded.recipe.runtime.remote, self.store)

    def plan(self) -> list[PlannedStep]:
        """Returns every step with whether it must run and why; nothing is run."""
        planned: dict[str, PlannedStep] = {}
        for step in self._steps:
            before = read_request(self.folder / step.name)
            if step.name not in self._sources:
                remote, unchecked = remote_fingerprints(step.files, before.sources if before else {})
                sources = step.sources | fingerprints(step.files) | remote
                if not sources and before is not None and before.settings == step.config:
                    sources = before.sources  # the user's files are gone, and what was made from them is still good
                self._sources[step.name] = sources, unchecked
            sources, unchecked = self._sources[step.name]
            inputs = {name: planned[name].request.key for name in step.inputs}
            request = Request(step.name, step.version, step.config, inputs, sources)
            forced = [name for name in step.inputs if planned[name].forced]
            complete, reason = False, ""
            if step.name in self._force or forced:
                reason = f"forced by {forced[0]}" if step.name not in self._force else "forced"
            elif self.store.is_complete(request):
                complete, reason = True, "complete"
            elif self._remote is not None and self._remote.has(request):
                complete, reason = True, _REMOTE
            reason = reason or _reason_to_run(step, self.store, request, before)
            planned[step.name] = PlannedStep(step, request, complete, reason, unchecked)
        return list(planned.values())

    def check(self, planned: Iterable[PlannedStep]) -> None:
        """Raise UserError for what is known to fail in a step that must run, before the first of them runs."""
        for each in planned:
            if not each.complete and each.step.check is not None:
                each.step.check(self.loaded)

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
            requests = {name: Request(**fields) for name, fields in work["requests"].items()}
            request, until = requests[work["step"]], time.monotonic() + _SHOWN_WITHIN
            folder = self.store.path(request)
            context = StepContext(self.loaded, folder, self._inputs(request.inputs), self.folder)
            while not (folder / REQUEST).is_file() and time.monotonic() < until:
                time.sleep(_POLL)
            if not (folder / REQUEST).is_file() and self._remote is not None and context.saves_to != folder:
                self._remote.bring(request.inputs, requests, self._making)  # a disk of its own
                self.store.begin(request, resume=True)
            if not all((path / REQUEST).is_file() for path in (folder, *context.inputs.values())):
                what = f"process {Processes.current.index} on {platform.node()} sees nothing that process 0 writes"
                fix = "Give all processes a --runs on a disk that they share, or a gs:// remote; see docs/clusters.md."
                raise UserError(what, where=str(folder.absolute()), fix=fix)
            with Processes.current.all_at_work(), self._errors_with_lines():
                steps[work["step"]].fn(context)

    def _common(self) -> dict[str, str]:
        """What must be the same for all processes."""
        return {"the recipe": self.loaded.recipe.model_dump_json(), **versions()}

    def _inputs(self, keys: Mapping[str, str]) -> dict[str, Path]:
        return {name: self.store.find(name, key) for name, key in keys.items()}

    # ---- the run ----

    def _run(self, listener: ProgressListener) -> list[PlannedStep]:
        steps, remote, ran = self.plan(), self._remote, []
        if all(planned.complete and self.store.is_complete(planned.request) for planned in steps):
            self._note(steps)
            return []
        try:
            lock = self._lock(f"{self.loaded.recipe.name}.run").acquire()
        except Timeout:
            fix = "Wait until it ends, or make another run: --set name=NAME, or --runs FOLDER."
            raise UserError("another process is at this run", where=str(self.folder), fix=fix) from None
        with lock:
            self.store.sweep()
            steps = self.plan()  # again: another process may have been at some of them
            for planned in reversed(steps):
                if planned.forced:
                    self.store.discard(planned.request)
            self._note(steps)
            requests = {planned.name: planned.request for planned in steps}
            if remote is not None:
                for request in requests.values():
                    if self.store.is_complete(request) and not remote.has(request):
                        remote.put(request)
                if all(planned.complete for planned in steps):
                    remote.bring(list(requests), requests, self._making, small=True)
                    self._note(steps)
            for planned in steps:
                if planned.reason == _REMOTE:
                    continue
                with self._making(planned.request) as missing:
                    if missing:
                        StopSignals.raise_pending()
                        if remote is not None:
                            small = bool(planned.step.artifact)
                            remote.bring(planned.step.inputs, requests, self._making, small=small)
                            self._note(steps)
                        self._make(planned, requests, listener)
                        ran.append(planned)
                self._link(planned)
                if missing and remote is not None:
                    remote.put(planned.request)
            if remote is not None and remote.failure:
                print_line(f"NOT all results were copied to {remote.url}: {remote.failure}; run it again to try")
        return ran

    def _make(self, planned: PlannedStep, requests: Mapping[str, Request], listener: ProgressListener) -> None:
        step, request, store = planned.step, planned.request, self.store
        folder = store.begin(request, resume=step.resumable)
        listener.on_begin(planned)
        started, clock = time.time(), time.monotonic()

        def on_metrics(row: Mapping[str, Any]) -> None:
            self._link(planned)  # users look at a training while it runs; one that is refused leaves the run as it was
            listener.on_metrics(row)

        inputs = self._inputs(request.inputs)
        context = StepContext(self.loaded, folder, inputs, self.folder, listener.on_progress, on_metrics)
        with self._errors_with_lines(), contextlib.ExitStack() as together:
            for url in filter(is_url, step.files) if planned.forced else ():
                from affinage.data.downloads import cached_path

                cached_path(url).unlink(missing_ok=True)
            if self._remote is not None and step.has_progress:
                self._remote.resume(request, forced=planned.forced)
            if step.distributed:
                work = {"step": step.name, "requests": {name: asdict(each) for name, each in requests.items()}}
                Processes.current.broadcast(_NEXT, work)
                together.enter_context(Processes.current.all_at_work())
            summary = step.fn(context)
        seconds = store.finish(request, summary, started=started, clock=clock)
        listener.on_end(planned, RESULTS.get(step.name, Result).model_validate(read_json(folder / RESULT)), seconds)

    # ---- other processes ----

    def _lock(self, name: str) -> FileLock:
        """A lock on a run or a result, which at most one process holds, and never one that has ended."""
        folder = self.store.folder / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{name}.lock", timeout=0, mode=0o666)

    @contextlib.contextmanager
    def _making(self, request: Request) -> Iterator[bool]:
        """Inside, a missing result is this process's to make. Yields whether it is missing.

        While another process makes it, this one waits and prints that.
        """
        if self.store.is_complete(request):
            yield False
            return
        lock = self._lock(self.store.path(request).name)
        try:
            held = lock.acquire()
        except Timeout:
            print_line(f"{request.step}: waiting for another process, which is making it")
            held = lock.acquire(timeout=-1, poll_interval=_POLL)
        with held:
            yield not self.store.is_complete(request)

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
        """Link a result in the run's folder, and remove the links to what was made from another result of its step."""
        path, result, replaced = self.folder / planned.name, self.store.path(planned.request), {planned.name}
        if path.is_symlink() and Path(os.readlink(path)).name != result.name:
            for step in self._all:
                if replaced.intersection(step.inputs):
                    replaced.add(step.name)
                    (self.folder / step.name).unlink(missing_ok=True)
        link(path, result)
        if planned.step.artifact:
            link(self.folder / planned.step.artifact, result / planned.step.artifact)

    def _note(self, steps: Sequence[PlannedStep]) -> None:
        """Write the settings in effect, link what is complete, and remove links of steps that the recipe lacks now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / RECIPE, self.loaded.recipe.model_dump(mode="json"))
        path = os.path.abspath(self.loaded.path)  # its settings may name files relative to it
        write_json(self.folder / COMMAND, {"command": self.loaded.command, "recipe": path})
        for planned in steps:
            if planned.complete and self.store.path(planned.request).is_dir():
                self._link(planned)
        names = {name for step in self._all for name in (step.name, step.artifact)}
        for entry in self.folder.iterdir():
            if entry.name not in names and entry.is_symlink() and self.store.folder.name in entry.readlink().parts:
                entry.unlink()


# ---- what must run, and why ----


def _select(steps: Sequence[Step], until: Sequence[str]) -> list[Step]:
    """Returns the steps of `until` and all that they read, in order; every step if `until` is empty."""
    known = {step.name: step for step in steps}
    for name in until:
        if name not in known:
            raise UserError(f"this recipe has no step `{name}`", fix=f"Its steps: {', '.join(known)}.")
    wanted = set(until or known)
    for step in reversed(steps):
        if step.name in wanted:
            wanted.update(step.inputs)
    return [step for step in steps if step.name in wanted]


def _reason_to_run(step: Step, store: Store, request: Request, before: Request | None) -> str:
    """Why a step must run: how it differs from the request `before`, of the previous run."""
    if damage := store.damage(request):
        return f"damaged: {damage}"
    if read_request(store.path(request)):
        return "not finished; resumes" if step.resumable else "not finished; starts again"
    if before is None:
        return "never ran"
    reasons = []
    for name, word in (("settings", "settings"), ("sources", "files"), ("inputs", "input"), ("version", "version")):
        if keys := [key for key, _ in differing([getattr(each, name) for each in (before, request)])]:
            reasons.append(f"{word} changed: {', '.join(keys)}".removesuffix(": "))
    return "; ".join(reasons) or "never ran in this store"


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
    made = []
    for number, values in enumerate(itertools.product(*grid.values()), 1):
        settings = dict(zip(grid, values))
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        words += [f"name={loaded.recipe.name}-{number:03}", "sweep={}"]
        try:
            made.append(Point(number, settings, load_recipe(recipe, [*overrides, *words])))
        except UserError as error:
            for key in grid:  # which was written in the grid
                where, written = f"--set {key}", loaded.locate(("sweep", key))
                error.where = written if error.where == where else error.where
                error.what = error.what.replace(f"\n{where}: ", f"\n{written}: ")
            raise
    return made

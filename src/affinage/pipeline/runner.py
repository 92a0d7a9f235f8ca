"""Plan a recipe's steps, and run those that are not complete, one after the other."""

import contextlib
import itertools
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout

from affinage.cluster.processes import Processes
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.differing import differing
from affinage.errors import TransientError, UserError, UserWarned, reports_move
from affinage.fingerprints import fingerprints, remote_fingerprints
from affinage.json_files import write_json
from affinage.network import is_url
from affinage.pipeline.models import COMMAND, RECIPE, command, steps_of
from affinage.pipeline.step import Step, StepContext, at, located
from affinage.pipeline.store import REQUEST, Request, Store, link, read_manifest, read_request
from affinage.results import RESULT, RESULTS, Result, read_json, versions
from affinage.stopping import StopSignals

if TYPE_CHECKING:
    from affinage.pipeline.remote_results import RemoteResults

_SAME, _NEXT = "what is run", "the next step"  # what processes exchange
_POLL = 0.5  # seconds
_SHOWN_WITHIN = 20.0  # seconds: a network file system may be late to show what another machine wrote
_COMPLETE, _REMOTE = "complete", "complete at the remote"  # the reasons of steps that do not run


@dataclass(frozen=True)
class PlannedStep:
    """A step, what its result is a function of, and why it runs or does not."""

    step: Step
    request: Request
    reason: str

    @property
    def name(self) -> str:
        """The step's name."""
        return self.step.name

    @property
    def complete(self) -> bool:
        """Whether its result is here or at the remote, so that it does not run."""
        return self.reason in (_COMPLETE, _REMOTE)

    @property
    def forced(self) -> bool:
        """Whether it runs because of `--force`."""
        return self.reason.startswith("forced")


class ProgressListener:
    """Is called as a run continues. This one shows nothing."""

    @contextlib.contextmanager
    def running(self, planned: PlannedStep) -> Iterator[Callable[[str], None]]:
        """A step runs inside. Yields a function that takes a few words when the step has got further."""
        yield lambda message: None

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        """The running training has written a line of its metrics."""

    def on_end(self, planned: PlannedStep, result: Result, seconds: float) -> None:
        """A step is complete."""


class PipelineRunner:
    """Plans and runs the steps of one recipe: all results are in `runs`/store/, and linked in the folder of the run."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        runs: Path,
        steps: Sequence[Step],
        *,
        until: Sequence[str] = (),
        force: Sequence[str] = (),
    ) -> None:
        self.loaded, self.runs, self.store = replace(loaded, runs=runs), runs, Store(runs / "store")
        self.folder = runs / loaded.recipe.name
        if self.folder == self.store.folder:
            where, fix = loaded.locate(("name",)), "Give the recipe another name."
            raise UserError("results are kept in `store`", where=where, fix=fix)
        known = [step.name for step in steps]
        if unknown := [name for name in (*until, *force) if name not in known]:
            raise UserError(f"this recipe has no step `{unknown[0]}`", fix=f"Its steps: {', '.join(known)}.")
        wanted = set(until or known)
        for step in reversed(steps):
            if step.name in wanted:
                wanted.update(step.inputs)
        self._all, self._force = steps, force
        self._steps = [step for step in steps if step.name in wanted]
        self._sources: dict[str, dict[str, str]] = {}  # of each step, read once
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
                remote = remote_fingerprints(step.files, before.sources if before else {})
                sources = step.sources | fingerprints(step.files) | remote
                if not sources and before is not None and before.settings == step.config:
                    sources = before.sources  # the user's files are gone, and what was made from them is still good
                self._sources[step.name] = sources
            inputs = {name: planned[name].request.key for name in step.inputs}
            request = Request(step.name, step.version, step.config, inputs, self._sources[step.name])
            by = next((f"forced by {name}" for name in step.inputs if planned[name].forced), "")
            forced = "forced" if step.name in self._force else by
            planned[step.name] = PlannedStep(step, request, forced or self._reason(step, request, before))
        return list(planned.values())

    def _reason(self, step: Step, request: Request, before: Request | None) -> str:
        """Why a step runs or does not: whether its result is there, else how it differs from that of the run before."""
        if self.store.is_complete(request):
            return _COMPLETE
        if self._remote is not None and self._remote.manifest(request) is not None:
            return _REMOTE
        if damage := self.store.damage(request):
            return f"damaged: {damage}"
        if read_request(self.store.path(request)):
            return "not finished; resumes" if step.resumable else "not finished; starts again"
        if before is None:
            return "never ran"
        reasons = []
        for name, word in (("settings", "settings"), ("sources", "files"), ("inputs", "input"), ("version", "version")):
            if keys := [key for key, _ in differing([getattr(each, name) for each in (before, request)])]:
                reasons.append(f"{word} changed: {', '.join(keys)}".removesuffix(": "))
        former = (self.folder / step.name).resolve()
        if (reached := steps_of(former, None)) and read_manifest(former) is None:
            left = f"the one before stopped at step {reached[-1]:,}"
            reasons.append(f"{left}, to continue by {step.name}.resume_from={former}")
        return "; ".join(reasons) or "never ran in this store"

    def check(self, planned: Sequence[PlannedStep]) -> None:
        """Raise UserError for what is known to fail in steps that must run; warn of complete trainings among them."""
        for each in planned:
            if not each.complete and each.step.check is not None:
                with located(self.loaded, each.name):
                    each.step.check(self._context(each.request))
        trainings = [each for each in planned if each.step.has_progress and not (each.complete or each.forced)]
        if again := [each.name for each in trainings if read_manifest(self.folder / each.name) is not None]:
            cause = next(each for each in planned if not each.complete)
            what = f"{', '.join(again)}: complete, but trained again: {cause.name} {cause.reason}"
            if cause.name == "decontaminate":
                measure = command("eval", self.loaded.recipe.name, "--tasks", "TASK", runs=self.runs)
                what += f". To score it as it is: {measure}"
            warnings.warn(what, UserWarned, stacklevel=2)

    def run(self, listener: ProgressListener) -> dict[str, float]:
        """Run what is not complete, while the other processes of a run call `follow`. Returns the seconds of each step.

        Raises UserError also if another process is at the same run.
        """
        remote, seconds, before = self._remote, dict[str, float](), dict[str, Request]()
        Processes.current.broadcast(_SAME, self._common())
        with contextlib.ExitStack() as at_the_end:
            at_the_end.callback(Processes.current.broadcast, _NEXT, None)
            try:
                at_the_end.enter_context(self.store.lock(f"{self.loaded.recipe.name}.run"))
            except Timeout:
                fix = "Wait until it ends, or make another run: --set name=NAME, or --runs FOLDER."
                raise UserError("another process is at this run", where=str(self.folder), fix=fix) from None
            steps = self.plan()
            for planned in reversed(steps):
                if planned.forced:
                    self.store.discard(planned.request)
            self._note(steps)
            if remote is not None:
                for planned in steps:
                    if planned.reason == _COMPLETE and not (remote.failure or remote.is_copied(planned.request)):
                        remote.put(planned.request, made=False)
                if all(planned.complete for planned in steps):
                    remote.bring({planned.name: planned.request for planned in steps})
                    self._note(steps)
            for planned in steps:
                if planned.reason != _REMOTE:
                    with self.store.making(planned.request) as missing:
                        if missing:
                            StopSignals.raise_pending()
                            if remote is not None:
                                remote.bring(before, () if planned.step.artifact else planned.step.inputs)
                                self._note(steps)
                            seconds[planned.name] = self._make(planned, before, listener)
                    self._link(planned)
                    if missing and remote is not None:
                        remote.put(planned.request)
                before[planned.name] = planned.request
            if remote is not None and remote.failure:
                fix = "All of them are here. Run the same command again to copy the rest."
                raise TransientError(f"not all results were copied: {remote.failure}", where=remote.url, fix=fix)
        return seconds

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
            request, until = Request(**work["request"]), time.monotonic() + _SHOWN_WITHIN
            context = self._context(request)
            there = context.folder / REQUEST
            while (is_missing := not there.is_file()) and time.monotonic() < until:
                time.sleep(_POLL)
            if is_missing and self._remote is not None and context.saves_to != context.folder:
                before = {name: Request(**fields) for name, fields in work["before"].items()}
                self._remote.bring(before, request.inputs)  # a disk of its own
                self.store.begin(request, resume=True)
            if not all((path / REQUEST).is_file() for path in (context.folder, *context.inputs.values())):
                what = f"process {Processes.current.index} on {platform.node()} sees nothing that process 0 writes"
                fix = "Give all processes a --runs on a disk that they share, or a gs:// remote; see docs/clusters.md."
                raise UserError(what, where=str(context.folder.absolute()), fix=fix)
            with Processes.current.all_at_work(), reports_move(there), located(self.loaded, request.step):
                steps[request.step].fn(context)

    def _common(self) -> dict[str, str]:
        """What must be the same for all processes."""
        return {"the recipe": self.loaded.recipe.model_dump_json(), **versions()}

    def _context(self, request: Request, **shown: Callable[..., None]) -> StepContext:
        inputs = {name: self.store.find(name, key) for name, key in request.inputs.items()}
        return StepContext(self.loaded, self.store.path(request), inputs, self.folder, **shown)

    def _make(self, planned: PlannedStep, before: Mapping[str, Request], listener: ProgressListener) -> float:
        step, request, store, started = planned.step, planned.request, self.store, time.monotonic()
        is_half_made = read_request(store.path(request)) is not None  # and is not what is left of a deleted one
        folder = store.begin(request, resume=step.resumable and is_half_made)

        def on_metrics(row: Mapping[str, Any]) -> None:
            self._link(planned)  # users look at a training while it runs; one that is refused leaves the run as it was
            listener.on_metrics(row)

        with listener.running(planned) as progress:
            with located(self.loaded, step.name), reports_move(folder / REQUEST), contextlib.ExitStack() as together:
                for url in filter(is_url, step.files) if planned.forced else ():
                    from affinage.downloads import cached_path

                    cached_path(url).unlink(missing_ok=True)
                if self._remote is not None and step.has_progress:
                    self._remote.resume(request, forced=planned.forced)
                if step.distributed:
                    work = {"request": asdict(request), "before": {name: asdict(each) for name, each in before.items()}}
                    Processes.current.broadcast(_NEXT, work)
                    together.enter_context(Processes.current.all_at_work())
                summary = step.fn(self._context(request, progress=progress, on_metrics=on_metrics))
            seconds = store.finish(request, summary, started=started)
        listener.on_end(planned, RESULTS.get(step.name, Result).model_validate(read_json(folder / RESULT)), seconds)
        return seconds

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


def points(recipe: str, overrides: Sequence[str]) -> list[tuple[dict[str, Any], LoadedRecipe]]:
    """The points of a recipe's `sweep`, the last setting varying fastest: the settings of each, and its recipe."""
    loaded = load_recipe(recipe, overrides)
    grid, made = loaded.recipe.sweep, []
    if not grid:
        fix = "Give settings and values: --set 'sweep={sft.steps: [100, 300], sft.schedule.peak_lr: [1e-3, 3e-4]}'"
        raise UserError("this recipe has no `sweep`", where=str(loaded.path), fix=fix)
    for number, values in enumerate(itertools.product(*grid.values()), 1):
        settings = dict(zip(grid, values))
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        with at(loaded, "sweep"):
            point = load_recipe(recipe, [*overrides, *words, f"name={loaded.recipe.name}-{number:03}"])
        made.append((settings, replace(point, recipe=point.recipe.model_copy(update={"sweep": {}}))))
    return made

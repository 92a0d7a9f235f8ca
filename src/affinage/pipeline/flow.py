"""Run a recipe: what is complete is left alone, what is not is made, one stage after the other."""

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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import rich

from affinage.config.load import LoadedRecipe
from affinage.config.plugins import load_plugins
from affinage.errors import TransientError, UserError, errno_of
from affinage.hardware.hosts import Hosts
from affinage.hardware.standstill import Standstill
from affinage.pipeline.locks import Locks, Taken, taken
from affinage.pipeline.plan import ELSEWHERE, Step, needed, plan
from affinage.pipeline.same_folder import check_same_folder
from affinage.pipeline.stage import Stage, StageContext
from affinage.pipeline.store import Request, Store, link, versions, write_json

if TYPE_CHECKING:
    from affinage.pipeline.remote_results import RemoteResults

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, quota, limit on the size of files
_GIVEN, _NEXT = "what is run", "the next stage"
_RECIPE, _COMMAND = "recipe.json", "run.json"
_NOTES = {_RECIPE, _COMMAND}  # what the folder of a run has before anything is made
_KEY = re.compile(r"\w+(\.\w+|\[\d+\])*")


class Watcher(Protocol):
    """Who is told how a run goes."""

    def began(self, step: Step, folder: Path) -> None:
        """A stage starts."""

    def progressed(self, what: str) -> None:
        """The running stage says what it does."""

    def measured(self, row: Mapping[str, Any]) -> None:
        """The running training has written a line of its metrics."""

    def ended(self, step: Step, manifest: dict[str, Any]) -> None:
        """A stage is complete."""


@dataclass(frozen=True)
class Runs:
    """The folder of all runs: `<name>/` per recipe with links to results, and the results themselves in `store/`."""

    folder: Path

    @property
    def store(self) -> Store:
        """Where results are, shared by all recipes."""
        return Store(self.folder / "store")

    def of(self, name: str) -> Path:
        """The folder of the recipe with this name."""
        return self.folder / name


class Flow:
    """The road of one recipe in one folder of runs."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        runs: Runs,
        road: Sequence[Stage],
        *,
        until: Sequence[str] = (),
        force: Sequence[str] = (),
        any_code: bool = False,
    ) -> None:
        self.loaded = loaded
        self.runs = runs
        self.folder = runs.of(loaded.recipe.name)
        if self.folder == runs.store.folder:
            raise UserError(
                "`store` is where results are kept", where=loaded.locate(("name",)), fix="Give the recipe another name."
            )
        self._road = road
        self._stages = needed(road, until)
        self._force = force
        self._any_code = any_code
        self._remote = _remote_of(loaded, self.runs.store)
        needed(road, force)  # refuses names that are no stages

    def plan(self) -> list[Step]:
        """What is there and what must run."""
        return plan(
            self._stages,
            self.runs.store,
            self.folder,
            force=self._force,
            any_code=self._any_code,
            elsewhere=None if self._remote is None else self._remote.has,
        )

    def run(self, watcher: Watcher) -> list[Step]:
        """Make what is missing; returns the steps that ran. Of many hosts, the others call `follow`.

        Raises:
            UserError: also if another process is at the same run.
        """
        Hosts.current.share(_GIVEN, self._given())
        try:
            check_same_folder(Hosts.current, self.runs.folder)
            return self._run(watcher)
        finally:
            Hosts.current.share(_NEXT, None)

    def follow(self) -> None:
        """Work at what all hosts work at, as the first one says, which goes the road by `run`."""
        given, mine = Hosts.current.share(_GIVEN, None, seconds=None), self._given()
        if given != mine:
            other = ", ".join(
                f"{name} is {mine.get(name)} and not {value}"
                for name, value in given.items()
                if mine.get(name) != value
            )
            raise UserError(
                f"host {Hosts.current.index} was not given the same as host 0: {other}",
                where=str(self.loaded.path),
                fix="Give all hosts the same recipe, options and installation.",
            )
        check_same_folder(Hosts.current, self.runs.folder)
        load_plugins(self.loaded)
        store, stages = self.runs.store, {stage.name: stage for stage in self._road}
        while (told := Hosts.current.share(_NEXT, None, seconds=None)) is not None:
            inputs = {name: store.find(name, key) for name, key in told["inputs"].items()}
            context = StageContext(self.loaded, store.find(told["stage"], told["key"]), inputs, self.folder)
            Standstill.sign(told["stage"])
            with Hosts.current.all_at_work(), self._located_errors():
                stages[told["stage"]].work(context)

    def _given(self) -> dict[str, str]:
        """What must be the same on all hosts."""
        settings = json.dumps(self.loaded.recipe.model_dump(mode="json"), sort_keys=True)
        return {"the hash of the recipe": hashlib.sha256(settings.encode()).hexdigest()[:12], **versions()}

    def _run(self, watcher: Watcher) -> list[Step]:
        load_plugins(self.loaded)
        steps = self.plan()
        store = self.runs.store
        if all(step.complete and store.is_complete(step.request) for step in steps):
            self._note(steps)
            return []
        ran = []
        with Locks(store.folder, f"affinage, recipe {self.loaded.recipe.name}") as locks, self._alone(locks):
            take = partial(taken, locks, store, _tell)
            steps = self.plan()  # again: what another process was at may be done
            self._discard([step for step in reversed(steps) if step.reason.startswith("forced")], locks)
            self._note(steps)
            self._copy([step for step in steps if step.complete])
            requests = {step.stage.name: step.request for step in steps}
            if all(step.complete for step in steps):
                self._bring(tuple(requests), requests, take, looked_at=True)
                self._note(steps)
            for step in steps:
                if step.reason == ELSEWHERE:
                    continue
                with take(step.request) as mine:
                    if mine:
                        # A report reads what all the others say of themselves.
                        self._bring(step.stage.inputs, requests, take, looked_at=bool(step.stage.shows))
                        self._note(steps)
                        self._make(step, watcher)
                        ran.append(step)
                self._link(step)
                if mine and self._remote is not None:
                    self._remote.copy(step.request)
            if self._remote is not None and (failure := self._remote.wait()):
                _tell(f"NOT all results were copied to {self.loaded.recipe.remote}: {failure}; run it again to try")
        return ran

    @contextlib.contextmanager
    def _alone(self, locks: Locks) -> Iterator[None]:
        """Refuse a second process at the same run, whose folder has one link for each stage.

        A run that is refused inside, before anything is made, leaves no folder that was not there.
        """
        run = f"{self.loaded.recipe.name}.run"
        if not locks.write(run):
            raise UserError(
                f"{locks.holder(run)} is at this run",
                where=str(self.folder),
                fix="Wait until it is done, or make another run of it: --set name=NAME.",
            )
        self.runs.store.sweep()
        was_there = self.folder.exists()
        try:
            yield
        except UserError:
            with contextlib.suppress(OSError):  # what is to be told is the refusal
                if not was_there and {entry.name for entry in self.folder.iterdir()} <= _NOTES:
                    shutil.rmtree(self.folder)
            raise

    def _discard(self, steps: Sequence[Step], locks: Locks) -> None:
        for step in steps:
            name = self.runs.store.path(step.request).name
            if not locks.write(name):
                raise UserError(
                    f"{locks.holder(name)} uses the result of {step.stage.name} that is to be made anew",
                    where="--force",
                    fix="Wait until it is done, or give this run a folder of its own with --runs.",
                )
            self.runs.store.discard(step.request)

    def _bring(self, stages: Collection[str], requests: Mapping[str, Request], take: Taken, *, looked_at: bool) -> None:
        """Copy from the recipe's `remote` what is there and not here."""
        if self._remote is not None:
            self._remote.bring(stages, requests, _tell, take, looked_at=looked_at)

    def _copy(self, steps: Sequence[Step]) -> None:
        """Copy to the recipe's `remote` what is here and not there."""
        remote = self._remote
        for step in steps:
            if remote is not None and self.runs.store.is_complete(step.request) and not remote.has(step.request):
                remote.copy(step.request)

    def _make(self, step: Step, watcher: Watcher) -> None:
        stage, store = step.stage, self.runs.store
        with self._forgotten_if_refused(step):
            folder = store.begin(step.request, anew=not stage.continues)
            if stage.continues:
                link(self.folder / stage.name, folder)  # so that one can look at a training while it runs
            self._work(step, folder, watcher)

    @contextlib.contextmanager
    def _forgotten_if_refused(self, step: Step) -> Iterator[None]:
        """A training that is refused before its first step leaves the run as it was."""
        folder, linked = self.runs.store.path(step.request), self.folder / step.stage.name
        was_there, before = folder.exists(), os.readlink(linked) if linked.is_symlink() else None
        try:
            yield
        except UserError as error:
            if step.stage.live and not was_there and not isinstance(error, TransientError) and not _has_begun(folder):
                if before is None:
                    linked.unlink(missing_ok=True)
                else:
                    link(linked, linked.parent / before)
                self.runs.store.discard(step.request)
            raise

    def _work(self, step: Step, folder: Path, watcher: Watcher) -> None:
        stage, store = step.stage, self.runs.store
        inputs = {name: store.find(name, key) for name, key in step.request.inputs.items()}

        def progressed(what: str) -> None:
            Standstill.sign()
            watcher.progressed(what)

        watcher.began(step, folder)
        Standstill.sign(stage.name)
        started, clock = time.time(), time.monotonic()
        with self._located_errors(), _told_full_disk(folder):
            context = StageContext(self.loaded, folder, inputs, self.folder, progressed, watcher.measured)
            if stage.before is not None:
                stage.before(context, anew=step.reason.startswith("forced"))
            with _all_hosts(step) if stage.together else contextlib.nullcontext():
                summary = stage.work(context)
            manifest = store.finish(step.request, summary, started=started, clock=clock)
        watcher.ended(step, manifest)

    @contextlib.contextmanager
    def _located_errors(self) -> Iterator[None]:
        """Say of errors that name a key of the recipe (`data.sources[0]`) in which line it was written."""
        try:
            yield
        except UserError as error:
            keys = re.findall(r"\w+", error.where)
            if not keys or keys[0] not in type(self.loaded.recipe).model_fields or not _KEY.fullmatch(error.where):
                raise
            where = self.loaded.locate([int(key) if key.isdigit() else key for key in keys])
            raise UserError(error.what, where=where or error.where, fix=error.fix) from error

    def _link(self, step: Step) -> None:
        result = self.runs.store.path(step.request)
        link(self.folder / step.stage.name, result)
        if step.stage.shows:
            link(self.folder / step.stage.shows, result / step.stage.shows)

    def _note(self, steps: Sequence[Step]) -> None:
        """Write down the settings in effect, link what is complete, drop links to stages the recipe no longer has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _RECIPE, self.loaded.recipe.model_dump(mode="json"))
        path = os.path.abspath(self.loaded.path)  # its settings may name files relative to it
        write_json(self.folder / _COMMAND, {"command": self.loaded.command, "recipe": path})
        for step in steps:
            if self.runs.store.path(step.request).is_dir() and step.complete:
                self._link(step)
        names = {name for stage in self._road for name in (stage.name, stage.shows)}
        for entry in self.folder.iterdir():
            if entry.is_symlink() and entry.name not in names and _leads_into(entry, self.runs.store.folder):
                entry.unlink()


def _remote_of(loaded: LoadedRecipe, store: Store) -> "RemoteResults | None":
    if loaded.recipe.remote is None:
        return None
    from affinage.pipeline.remote_results import RemoteResults  # with JAX, which a plan does without

    return RemoteResults(loaded.recipe.remote, store)


def _tell(line: str) -> None:
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _all_hosts(step: Step) -> Iterator[None]:
    """Inside, those that follow work at the same stage."""
    request = step.request
    Hosts.current.share(_NEXT, {"stage": request.stage, "key": request.key, "inputs": request.inputs})
    with Hosts.current.all_at_work():
        yield


def _has_begun(training: Path) -> bool:
    """Whether a training has made a step, or has a checkpoint of another machine."""
    lines, checkpoints = training / "metrics.jsonl", training / "checkpoints"
    return (lines.is_file() and lines.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _leads_into(entry: Path, folder: Path) -> bool:
    target = Path(os.path.normpath(entry.parent / os.readlink(entry)))
    return target.is_relative_to(os.path.normpath(folder))


@contextlib.contextmanager
def _told_full_disk(folder: Path) -> Iterator[None]:
    """Say in one message that there is no room to write."""
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number not in _NO_ROOM:
            raise
        raise UserError(
            f"there is no room to write here: {os.strerror(number)}",
            where=str(folder),
            fix="Free some space, or use another disk with --runs. What is complete is kept; run again to go on.",
        ) from error

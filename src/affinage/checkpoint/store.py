"""The checkpoints of a run: a folder of steps, each of which is complete or not there at all."""

import contextlib
import gc
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import absl.logging
import jax
from orbax.checkpoint.experimental import v1 as ocp

from affinage.checkpoint.metadata import (
    COMMIT,
    METADATA,
    CorruptedError,
    Metadata,
    checksums,
    leaves_by_path,
    read_metadata,
)
from affinage.cluster.processes import Processes
from affinage.errors import UserError, UserWarned, errno_of, first_line, raise_of_network

if TYPE_CHECKING:
    from affinage.checkpoint.uploader import Uploader

PyTree = Any
Facts = dict[str, Any]

IO_TIMEOUT = 3600.0  # seconds in which every process has read or written its part of a state; then the disk is stuck
_STEP = re.compile(r"0|[1-9]\d*")


class CheckpointWarning(UserWarned):
    """A checkpoint was passed over."""


class CheckpointStore:
    """Saves and restores training states under `folder/<step>/`, by Orbax.

    A state is a mapping of names to trees of arrays (`params`, ...), each of which can be restored without the others.
    A step counts once Orbax has committed it, so a process may die at any moment. The checksums of all arrays are
    computed on the devices before a save and after a restore: what is corrupted is never restored silently.

    All processes of a run call the same methods in the same order, with the same folder.

    Args:
        folder: made by the first save.
        keep_last: how many of the newest steps stay.
        keep_every: steps at multiples of this stay forever; None for none.
        uploader: is notified of every save, and names steps that must not be removed yet.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        uploader: "Uploader | None" = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._keep_last, self._keep_every, self._uploader = keep_last, keep_every, uploader
        self._corrupted: set[int] = set()  # steps that look complete but could not be restored
        self._running: ocp.AsyncResponse[None] | None = None
        self._pruned = threading.Event()  # the older steps are removed after the save that runs
        self._context = ocp.Context()
        self._context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        # Only arrays are read: the global registry has handlers for whatever a checkpoint names.
        registry = ocp.handlers.local_registry(include_global_registry=False).add(ocp.handlers.PyTreeHandler)
        self._context.checkpointables.registry = registry
        # Weights are noise to a compressor: zstd makes a save take three times as long for 8 % fewer bytes.
        self._context.array.saving.use_compression = False

    # ---- which steps there are ----

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return complete_steps(self.folder)

    def entries(self) -> list[tuple[int, Path]]:
        """Everything in the folder that is named like a step, oldest first."""
        return entries(self.folder)

    def metadata(self, step: int) -> Metadata:
        """The metadata of a step. Raises UserError if they cannot be read."""
        try:
            return read_metadata(self.folder / str(step))
        except (CorruptedError, OSError) as error:
            raise_of_network(error)
            raise self._refused(step, first_line(error)) from error

    def described(self, step: int) -> dict[str, PyTree]:
        """The trees of a step as shapes and dtypes on one device; no array is read."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        try:
            with _quiet():
                found = dict(ocp.checkpointables_metadata(self.folder / str(step)).metadata)
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), found)
        except Exception as error:  # whatever Orbax and TensorStore raise for corrupted files
            raise_of_network(error)
            raise self._refused(step, _reason(error)) from error

    # ---- saving ----

    def save(self, step: int, state: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Start saving; the arrays may be donated or changed as soon as this returns.

        Waits for the save before, if it still runs. A step that is already complete stays as it is.

        Args:
            step: names the save.
            state: trees of `jax.Array`, by name.
            meta: JSON-able facts about the run.

        Raises:
            OSError: see `wait`.
        """
        self.wait()
        processes, path = Processes.at_work(), self.folder / str(step)
        if jax.process_count() > 1 and processes.count == 1:
            fix = "Run this step by itself before the run in several processes."
            raise UserError("one process of several cannot save arrays alone", where=str(path), fix=fix)
        exists = processes.first and step in self.steps() and step not in self._corrupted
        if processes.first and not exists:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove(path)  # what a killed save left, or a corrupted step
        if processes.broadcast("a save", exists, seconds=IO_TIMEOUT):
            return
        self._corrupted.discard(step)
        metadata = Metadata(step, dict(meta), checksums(state))
        self._pruned.clear()
        with _quiet(), self._context:
            self._running = ocp.save_checkpointables_async(path, dict(state), custom_metadata=metadata.to_json())
        self._running.on_complete(lambda _: self._prune(step))

    def _prune(self, newest: int) -> None:
        """Remove older steps, and what killed saves left of them; runs on the first host in Orbax's thread."""
        try:
            if Processes.at_work().first:
                intact = [step for step in self.steps() if step not in self._corrupted]
                keep = kept_steps(intact, self._keep_last, self._keep_every)
                if self._uploader is not None:
                    self._uploader.saved()
                    keep |= self._uploader.in_use
                for step, path in self.entries():
                    if step < newest and step not in keep:
                        with contextlib.suppress(OSError):  # the training continues
                            _remove(path)
        finally:
            self._pruned.set()

    def wait(self) -> None:
        """Block until the save in progress is committed, and older steps are removed.

        Raises:
            OSError: the disk did not take it; the steps before are intact.
        """
        self._end(timeout=None)

    def check_save(self) -> None:
        """Raise what a save in the background has failed with; see `wait`. Does not block."""
        with contextlib.suppress(TimeoutError):
            self._end(timeout=0)

    def _end(self, timeout: float | None) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            running.result(timeout)
        except TimeoutError:
            self._running = running
            raise
        except ValueError as error:  # TensorStore's, for whatever the file system returned
            if not (number := errno_of(error)):
                raise
            raise OSError(number, os.strerror(number), str(self.folder)) from error
        self._pruned.wait()

    def forget_after(self, step: int) -> None:
        """Remove all later steps: the run went back to this one and continues differently."""
        if Processes.at_work().first:
            for later, path in self.entries():
                if later > step:
                    _remove(path)

    # ---- restoring ----

    def restore(self, step: int, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step, on the devices and shardings of `abstract`, whatever mesh it was saved from.

        Args:
            step: one of `steps()`.
            abstract: trees of `jax.ShapeDtypeStruct` with shardings, by name; or None for a tree as it was saved.
                Another floating-point dtype than the saved one is converted to. Only the names given are read.

        Raises:
            UserError: the step is corrupted, or what was saved does not fit.
        """
        found, reason = self._read(step, abstract)
        if found is None:
            raise self._refused(step, reason)
        return found[0]

    def restore_params(self, step: int | None, abstract: PyTree, tree: str = "params") -> PyTree:
        """Only the parameters of a step, or another of its trees; of the newest if `step` is None.

        A corrupted newest step is an error here: whoever uses or publishes a model must not get an older one unnoticed.

        Raises:
            UserError: there is no checkpoint, or it is corrupted.
        """
        if step is None:
            steps = Processes.at_work().broadcast("checkpoints", self.steps(), seconds=IO_TIMEOUT)
            if not steps:
                raise UserError("there is no checkpoint", where=str(self.folder), fix="Train the model first.")
            step = int(steps[-1])
        return self.restore(step, {tree: abstract})[tree]

    def restore_newest(
        self,
        abstract: Mapping[str, PyTree],
        accept: Callable[[Mapping[str, Any]], None] = lambda meta: None,
        at_most: int | None = None,
    ) -> tuple[int, dict[str, PyTree], Facts] | None:
        """Step, state and facts of the newest step that is intact; None if nothing was ever saved.

        Incomplete and corrupted steps are named in a `CheckpointWarning` and passed over, by all processes alike.

        Args:
            abstract: see `restore`.
            accept: gets the facts of a step before it is loaded; may refuse it with a UserError, which ends the
                restore, or with a ValueError, with which the step is passed over.
            at_most: the newest up to this step is wanted; without any, the first one after it is taken.

        Raises:
            UserError: there are steps but none can be restored; starting from nothing would hide that.
            OSError: the network of the disk failed, which proves nothing about the steps.
        """
        processes = Processes.at_work()
        found = [[step, whats_missing(path)] for step, path in self.entries()]
        found = processes.broadcast("checkpoints", found, seconds=IO_TIMEOUT)
        wanted = max((step for step, _ in found), default=0) if at_most is None else at_most
        reason = ""
        for step, missing in sorted(found, key=lambda each: (each[0] > wanted, abs(each[0] - wanted))):
            restored, reason = (None, missing) if missing else self._read(step, abstract, accept)
            if restored is not None:
                return step, *restored
            if processes.first:
                warnings.warn(f"checkpoint {step} is passed over: {reason}", CheckpointWarning, stacklevel=2)
            if not missing:
                self._corrupted.add(step)
        if not self._corrupted:
            return None
        steps = ", ".join(map(str, sorted(self._corrupted)))
        raise UserError(
            f"none of the checkpoints {steps} can be restored; the last reason: {reason}",
            where=str(self.folder),
            fix="If the model, the optimizer or another setting was changed, undo that, or give the run another name; "
            "otherwise remove the folder to start again.",
        )

    def verify(self, step: int) -> str:
        """What is wrong with a step, whose arrays are all read and compared with their checksums; "" if nothing is."""
        if reason := whats_missing(self.folder / str(step)):
            return reason
        try:
            described = self.described(step)
            for name, tree in described.items():  # one by one: a whole state may not fit in memory
                self.restore(step, {name: tree})
            trees = {path.partition(".")[0] for path in self.metadata(step).checksums}
            return "" if trees <= set(described) else "a tree of arrays is missing"
        except UserError as error:
            return error.what.partition(": ")[2]

    def _read(
        self, step: int, abstract: Mapping[str, PyTree], accept: Callable[[Facts], None] = lambda meta: None
    ) -> tuple[tuple[dict[str, PyTree], Facts] | None, str]:
        """(state and facts of a step, ""), or (None, why not). The processes agree: if one cannot, none does."""
        try:
            metadata = read_metadata(self.folder / str(step))
            accept(metadata.facts)
            reason = _misfit(metadata, abstract)
        except (ValueError, OSError) as error:
            raise_of_network(error)
            reason = first_line(error)
        if reason := _agreed(f"metadata of {step}", reason):
            return None, reason
        loaded: dict[str, PyTree] = {}
        try:
            with _quiet(), self._context_of_this_work():
                loaded = dict(ocp.load_checkpointables(self.folder / str(step), _with_dtypes(metadata, abstract)))
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # whatever Orbax and TensorStore raise for corrupted files
            raise_of_network(error)
            reason = _reason(error)
        if reason := _agreed(f"restore of {step}", reason):
            return None, reason
        found = checksums(loaded)
        saved = {path: facts for path, facts in metadata.checksums.items() if path.partition(".")[0] in loaded}
        wrong = sorted(path for path in found.keys() | saved.keys() if found.get(path) != saved.get(path))
        if reason := _agreed(f"checksums of {step}", f"{wrong[0]} is not what was saved (checksum)" if wrong else ""):
            return None, reason
        for name, tree in abstract.items():
            if tree is not None:
                loaded[name] = jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), loaded[name], tree)
        return (loaded, metadata.facts), ""

    def _context_of_this_work(self) -> ocp.Context:
        """Restores of one process of several must not wait for the others."""
        if jax.process_count() == 1 or Processes.at_work().count > 1:
            return self._context
        context = ocp.Context(self._context)
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.active_processes = {jax.process_index()}
        return context

    def _refused(self, step: int, reason: str) -> UserError:
        others = ", ".join(f"@{other}" for other in self.steps() if other != step)
        fix = f"Name one of the others ({others}), or remove it and run its recipe, which resumes from there."
        return UserError(
            f"checkpoint {step} cannot be restored: {reason}",
            where=str(self.folder),
            fix=fix if others else "There is no other.",
        )


# ---- a folder of steps ----


def entries(folder: Path) -> list[tuple[int, Path]]:
    """Everything in a folder that is named like a step, oldest first."""
    found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
    return sorted((int(path.name), path) for path in found)


def complete_steps(folder: Path) -> list[int]:
    """The complete steps in a folder, oldest first."""
    return [step for step, path in entries(folder) if not whats_missing(path)]


def whats_missing(path: Path) -> str:
    """Why a folder that is named like a step is not complete; "" if it is."""
    if path.is_symlink():
        return "it is a symbolic link, and could lead anywhere"
    if not all((path / name).exists() for name in (METADATA, COMMIT)):
        return "it is incomplete: its save was cut off"
    return ""


def kept_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> set[int]:
    """Those of the ascending `steps` that stay."""
    return {*steps[-keep_last:], *(step for step in steps if keep_every and step % keep_every == 0)}


def remove_incomplete(folder: Path) -> None:
    """Remove what saves that were cut off have left; not while a save is running."""
    for _, path in entries(folder):
        if whats_missing(path):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a step, its marks first, so that half a step never looks complete. Links are left alone."""
    if path.is_dir() and not path.is_symlink():
        for name in (COMMIT, METADATA):
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path)


# ---- what was saved and what is wanted ----


def _misfit(metadata: Metadata, wanted: Mapping[str, PyTree]) -> str:
    """The first array that was saved in another shape than wanted, or is on one side only; "" if there is none."""
    trees = {name: tree for name, tree in wanted.items() if tree is not None}
    here = {path: list(leaf.shape) for path, leaf in leaves_by_path(trees).items()}
    saved = {path: facts[1] for path, facts in metadata.checksums.items() if path.partition(".")[0] in trees}
    for path in sorted(here.keys() | saved.keys()):
        if here.get(path) != saved.get(path):
            sides = [str(side.get(path, "not there")) for side in (saved, here)]
            return f"{path} was saved as {sides[0]}, and is {sides[1]} here"
    return ""


def _with_dtypes(metadata: Metadata, wanted: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The wanted trees with the dtypes that were saved, whose bits the checksums are of."""

    def as_saved(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.ShapeDtypeStruct(leaf.shape, metadata.checksums[name][0], sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(as_saved, dict(wanted))


def _agreed(what: str, reason: str) -> str:
    """The reason of this process; that another one has a reason, if this one has none; "" if nobody has one."""
    fine = Processes.at_work().all_min(what, int(not reason), seconds=IO_TIMEOUT)
    return "" if fine else reason or "another process cannot read it"


def _reason(error: BaseException) -> str:
    """What went wrong first, in one line: Orbax raises what it makes of it."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return first_line(error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, Orbax does not log every file, nor print errors of its tasks that it raises anyway."""
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.FATAL)
    tasks = logging.getLogger("asyncio")
    disabled, tasks.disabled = tasks.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception:
        gc.collect()  # its failed tasks complain when they are collected
        raise
    finally:
        absl.logging.set_verbosity(before)
        tasks.disabled = disabled

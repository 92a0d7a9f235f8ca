"""The checkpoints of a run: a folder of steps, each of which is complete or not there at all."""

import contextlib
import errno
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp
from orbax.checkpoint.experimental.v1.training import preservation_policies

from affinage.checkpoint.metadata import METADATA, CorruptedError, Metadata, checksums, leaves_by_path, read_metadata
from affinage.cluster.processes import Processes
from affinage.errors import UserError, UserWarned, errno_of, first_line, raise_of_network

PyTree = Any
Facts = dict[str, Any]

CHECKPOINTS = "checkpoints"  # the folder of steps in the folder of a training
COMMIT = "commit_success.txt"  # Orbax writes it last, when everything else of a step is on disk
IO_TIMEOUT = 3600.0  # seconds in which every process has read or written its part of a state
absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax logs every file, and errors that it raises anyway
# Once a task of Orbax has failed, and its error is raised, asyncio logs those of all other tasks.
logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
_STEP = re.compile(r"0|[1-9]\d*")


class CheckpointWarning(UserWarned):
    """A checkpoint was passed over, or a run resumes with changed settings."""


class CheckpointStore:
    """Saves and restores training states under `folder/<step>/`, by Orbax.

    A state is a mapping of names to trees of arrays (`params`, ...), each of which can be restored without the others.
    A step counts once Orbax has committed it, so a process may die at any moment. The checksums of all arrays are
    computed on the devices before a save and after a restore: what is corrupted is never restored silently. All
    processes of a run call the same methods in the same order, with the same folder: on a disk that all of them see, or
    a `gs://` URL.

    The newest `keep_last` steps stay, and those at multiples of `keep_every`. The first process calls `saved` whenever
    the steps have changed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        saved: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder: Path = epath.Path(folder) if "://" in str(folder) else Path(folder).absolute()
        self._keep_last, self._keep_every, self._saved = keep_last, keep_every, saved
        self._corrupted: set[int] = set()  # steps that look complete but could not be restored
        # Not by Orbax's Checkpointer: it calls JAX's preemption sync point in a thread, so that a training misses it.
        self._running: ocp.AsyncResponse[None] | None = None
        self._context = ocp.Context()
        self._context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        # Only arrays are read: the global registry has handlers for whatever a checkpoint names.
        registry = ocp.handlers.local_registry(include_global_registry=False).add(ocp.handlers.PyTreeHandler)
        self._context.checkpointables.registry = registry
        # Weights are noise to a compressor: zstd makes a save take three times as long for 8 % fewer bytes.
        self._context.array.saving.use_compression = False

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return complete_steps(self.folder)

    def metadata(self, step: int) -> Metadata:
        """The metadata of a step. Raises UserError if they cannot be read."""
        try:
            return read_metadata(self.folder / str(step))
        except (CorruptedError, OSError) as error:
            raise_of_network(error)
            raise self._refused(step, error) from error

    def listing(self) -> list[dict[str, Any]]:
        """{step, saved, bytes, why_not} of everything that is named like a step, oldest first.

        `why_not` says why it cannot be restored, as far as is known without reading arrays; "" if it can.
        """
        rows = []
        for step, why_not in steps_in(self.folder).items():
            path, saved = self.folder / str(step), None
            try:
                saved = None if why_not else read_metadata(path).facts.get("saved")
            except (CorruptedError, OSError) as error:
                why_not = str(error)
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            rows.append({"step": step, "saved": saved, "bytes": size, "why_not": why_not})
        return rows

    # ---- saving ----

    def save(self, step: int, state: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Start saving trees of `jax.Array`, by name, and JSON-able facts.

        The arrays may be donated or changed as soon as this returns. Waits for the save before, see `wait`. A step that
        is already complete stays as it is.
        """
        self.wait()
        processes = Processes.at_work()
        if jax.process_count() > 1 and processes.count == 1:
            what, fix = "one process of several cannot save arrays alone", "Run this step before, in one process."
            raise UserError(what, where=str(self.folder / str(step)), fix=fix)
        path, exists = self.folder / str(step), processes.first and step in self.steps() and step not in self._corrupted
        if processes.first and not exists:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove(path)  # what a killed save left, or a corrupted step
        if processes.broadcast("a save", exists, seconds=IO_TIMEOUT):
            return
        self._corrupted.discard(step)
        metadata = Metadata(step, dict(meta), checksums(state))
        with self._context:
            self._running = ocp.save_checkpointables_async(path, dict(state), custom_metadata=metadata.to_json())

    def wait(self, timeout: float | None = None) -> None:
        """Block until the save in progress is committed, and the steps that no rule keeps are removed.

        With `timeout` 0, which is called after every step, this does not block. Raises OSError if the disk did not take
        it; the steps before are intact.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            running.result(timeout)
        except TimeoutError:
            if timeout is None:
                raise
            self._running = running
            return
        except ValueError as error:  # TensorStore raises it for whatever the file system returned
            if not (number := errno_of(error) or ("://" in str(self.folder) and errno.EIO)):
                raise
            raise OSError(number, os.strerror(number), str(self.folder)) from error
        if Processes.at_work().first:
            steps = steps_in(self.folder)
            intact = [step for step, why_not in steps.items() if not why_not and step not in self._corrupted]
            for step in steps.keys() - kept_steps(intact, self._keep_last, self._keep_every):
                with contextlib.suppress(OSError):  # the training continues
                    _remove(self.folder / str(step))
            self._saved()

    def forget_after(self, step: int) -> None:
        """Remove all later steps: the run went back to this one and continues differently."""
        if Processes.at_work().first:
            for later in steps_in(self.folder):
                if later > step:
                    _remove(self.folder / str(later))
            self._saved()

    # ---- restoring ----

    def restore(self, step: int, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step, on the devices and shardings of `abstract`, whatever mesh it was saved from.

        `abstract` has trees of `jax.ShapeDtypeStruct` with shardings, by name; arrays are cast to their dtypes. Only
        these trees are read. Raises UserError if the step is corrupted, or what was saved does not fit.
        """
        try:
            return self._read(step, abstract)[0]
        except CorruptedError as error:
            raise self._refused(step, error) from error

    def restore_params(self, step: int | None, abstract: PyTree, tree: str = "params") -> PyTree:
        """Only the parameters of a step, or another of its trees; of the newest if `step` is None, corrupted or not."""
        if step is None:
            steps = Processes.at_work().broadcast("checkpoints", self.steps(), seconds=IO_TIMEOUT)
            if not steps:
                raise UserError("there is no checkpoint", where=str(self.folder), fix="Train the model first.")
            step = int(steps[-1])
        return self.restore(step, {tree: abstract})[tree]

    def restore_newest(
        self,
        abstract: Mapping[str, PyTree],
        accept: Callable[[Facts], object] = lambda facts: None,
        at_most: int | None = None,
    ) -> tuple[int, dict[str, PyTree], Facts] | None:
        """Step, state and facts of the newest step that is intact; None if nothing was ever saved.

        Incomplete and corrupted steps are named in a `CheckpointWarning` and passed over, by all processes alike.
        `abstract` is as for `restore`. `accept` gets the facts of a step before it is loaded, and may refuse it with a
        UserError, which is raised. With `at_most` it is the newest up to this step, else the first one after it. Raises
        UserError if there are steps but none can be restored, and OSError if the network of the disk failed.
        """
        processes = Processes.at_work()
        known = processes.broadcast("checkpoints", [*steps_in(self.folder).items()], seconds=IO_TIMEOUT)
        wanted = max((step for step, _ in known), default=0) if at_most is None else at_most
        for step, reason in sorted(known, key=lambda each: (each[0] > wanted, abs(each[0] - wanted))):
            if not reason:
                try:
                    return step, *self._read(step, abstract, accept)
                except CorruptedError as error:
                    reason = str(error)
                    self._corrupted.add(step)
            if processes.first:
                warnings.warn(f"checkpoint {step} is passed over: {reason}", CheckpointWarning, stacklevel=2)
        if not self._corrupted:
            return None
        raise UserError(
            f"none of the checkpoints {sorted(self._corrupted)} can be restored; the last reason: {reason}",
            where=str(self.folder),
            fix="Undo changes of the model or the optimizer, or give the run another name; or remove the folder.",
        )

    def verify(self, step: int) -> str:
        """Read all arrays of a step and compare them with their checksums; returns what is wrong, "" if nothing is."""
        if reason := steps_in(self.folder).get(step, "it is not there"):
            return reason
        try:
            for name, tree in self.abstract(step).items():  # one by one: a whole state may not fit in memory
                self._read(step, {name: tree})
        except CorruptedError as error:
            return str(error)
        return ""

    def abstract(self, step: int) -> dict[str, PyTree]:
        """All trees of a step as shapes and dtypes on one device. Raises CorruptedError if they cannot be read."""
        path, here = self.folder / str(step), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        with _agreeing(f"trees of {step}"):
            saved = ocp.checkpointables_metadata(path).metadata
            names = {name.partition(".")[0] for name in read_metadata(path).checksums}
            trees = {name: saved.get(name, {}) for name in sorted(names)}
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), trees)

    def _read(
        self, step: int, wanted: Mapping[str, PyTree], accept: Callable[[Facts], object] = lambda facts: None
    ) -> tuple[dict[str, PyTree], Facts]:
        """State and facts of a step. Raises CorruptedError in all processes if one of them cannot read it."""
        path, context, leaves, abstract = self.folder / str(step), self._context, leaves_by_path(wanted), []
        with _agreeing(f"metadata of {step}"):
            metadata = read_metadata(path)
            accept(metadata.facts)
            saved = {name: facts for name, facts in metadata.checksums.items() if name.partition(".")[0] in wanted}
            if unmatched := sorted(leaves.keys() ^ saved.keys()):
                name = unmatched[0]
                raise CorruptedError(f"{name} was {'saved, and is not here' if name in saved else 'not saved'}")
            for name, leaf in leaves.items():
                dtype, shape, _ = saved[name]  # the checksums are of the bits of this dtype
                if shape != list(leaf.shape):
                    raise CorruptedError(f"{name} was saved as {shape}, and is {list(leaf.shape)} here")
                abstract.append(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding))
        if jax.process_count() > 1 and Processes.at_work().count == 1:  # one process reads without the others
            context = ocp.Context(context)
            context.multiprocessing.primary_host = jax.process_index()
            context.multiprocessing.active_processes = {jax.process_index()}
        with _agreeing(f"restore of {step}"), context:
            as_saved = jax.tree.unflatten(jax.tree.structure(dict(wanted)), abstract)
            loaded = dict(ocp.load_checkpointables(path, as_saved))
        with _agreeing(f"checksums of {step}"):
            if wrong := [name for name, facts in checksums(loaded).items() if facts != saved[name]]:
                raise CorruptedError(f"{wrong[0]} is not what was saved (checksum)")
        return jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), loaded, wanted), metadata.facts

    def _refused(self, step: int, error: Exception) -> UserError:
        others = ", ".join(f"@{other}" for other in self.steps() if other != step)
        reason = first_line(error) if step in steps_in(self.folder) else "there is none of this step"
        fix = f"Name another one: {others}." if others else "Train the model first."
        return UserError(f"checkpoint {step} cannot be restored: {reason}", where=str(self.folder), fix=fix)


# ---- a folder of steps ----


def steps_in(folder: Path) -> dict[int, str]:
    """Everything in a folder that is named like a step, oldest first: {step: why it is not complete, "" if it is}."""
    paths = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
    steps = {}
    for path in sorted(paths, key=lambda path: int(path.name)):
        is_complete = all((path / name).exists() for name in (METADATA, COMMIT))
        steps[int(path.name)] = "" if is_complete else "it is incomplete: its save was cut off"
    return steps


def complete_steps(folder: Path) -> list[int]:
    """The complete steps in a folder, oldest first."""
    return [step for step, why_not in steps_in(folder).items() if not why_not]


def kept_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> set[int]:
    """Those of the ascending `steps` that stay by Orbax's policies: the newest ones, and multiples of `keep_every`."""
    policies = [preservation_policies.LatestN(keep_last)]
    policies += [preservation_policies.EveryNSteps(keep_every)] if keep_every else []
    infos, context = [SimpleNamespace(step=step) for step in steps], preservation_policies.PreservationContext()
    stays = preservation_policies.AnyPreservationPolicy(policies).should_preserve(infos, context=context)
    return {step for step, stay in zip(steps, stays, strict=True) if stay}


def _remove(path: Path) -> None:
    """Remove a step, its marks first, so that half a step never looks complete; of a link, the link alone."""
    if os.path.islink(path):
        os.unlink(path)
    elif path.is_dir():
        for name in (COMMIT, METADATA):
            (path / name).unlink(missing_ok=True)
        epath.Path(path).rmtree()


@contextlib.contextmanager
def _agreeing(name: str) -> Iterator[None]:
    """Inside, what one process cannot read becomes a CorruptedError in all of them."""
    reason = ""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever Orbax and TensorStore raise for corrupted files
        raise_of_network(error)
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        reason = first_line(first)
    if not Processes.at_work().all_min(name, int(not reason), seconds=IO_TIMEOUT):
        raise CorruptedError(reason or "another process cannot read it")

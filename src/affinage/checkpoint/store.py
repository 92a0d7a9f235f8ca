"""The checkpoints of a run: a folder of steps, each of which is complete or not there at all."""

import contextlib
import errno
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp

from affinage.checkpoint.metadata import METADATA, CorruptedError, Metadata, checksums, leaves_by_path, read_metadata
from affinage.cluster.processes import Processes
from affinage.errors import UserError, UserWarned, causes, errno_of, first_line, raise_of_network

PyTree = Any
Facts = dict[str, Any]

CHECKPOINTS = "checkpoints"  # the folder of steps in the folder of a training
COMMIT = "commit_success.txt"  # Orbax writes it last, when everything else of a step is on disk
IO_TIMEOUT = 3600.0  # seconds in which every process has read or written its part of a state
absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax logs every file, and errors that it raises anyway
# Once a task of Orbax has failed, and its error is raised, asyncio logs those of all other tasks.
logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())


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
    the steps have changed; the steps that it returns are in use, and stay until the next save.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        saved: Callable[[], set[int]] = set,
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
        return [step for step, why_not in steps_in(self.folder).items() if not why_not]

    def metadata(self, step: int) -> Metadata:
        """The metadata of a step. Raises CorruptedError if they cannot be read."""
        return read_metadata(self.folder / str(step))

    def listing(self) -> list[dict[str, Any]]:
        """{step, saved, bytes, why_not} of everything that is named like a step, oldest first.

        `why_not` says why it cannot be restored, as far as is known without reading arrays; "" if it can.
        """
        rows = []
        for step, why_not in steps_in(self.folder).items():
            saved, files = None, (self.folder / str(step)).rglob("*")
            try:
                saved = None if why_not else self.metadata(step).facts.get("saved")
            except CorruptedError as error:
                why_not = error.what
            size = sum(file.stat().st_size for file in files if file.is_file())
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
        path, exists = self.folder / str(step), processes.first and step in self.steps() and step not in self._corrupted
        if processes.first and not exists:
            _remove(path)  # what a killed save left, or a corrupted step
        if processes.broadcast("a save", exists, seconds=IO_TIMEOUT):
            return
        self._corrupted.discard(step)
        metadata = Metadata(step, dict(meta), checksums(state)).to_json()
        with self._context:
            self._running = ocp.save_checkpointables_async(path, dict(state), custom_metadata=metadata)

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
            in_use, steps = self._saved(), steps_in(self.folder)
            intact = [step for step, why_not in steps.items() if not why_not and step not in self._corrupted]
            for step in steps.keys() - kept_steps(intact, self._keep_last, self._keep_every) - in_use:
                with contextlib.suppress(OSError):  # the training continues
                    _remove(self.folder / str(step))

    # ---- restoring ----

    def restore(self, step: int | None, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step, on the devices and shardings of `abstract`, whatever mesh it was saved from.

        `abstract` has trees of `jax.ShapeDtypeStruct` with shardings, by name; arrays are cast to their dtypes. Only
        these trees are read. `step` None is the newest one, corrupted or not. Raises UserError if there is none, and
        CorruptedError if it is corrupted, or what was saved does not fit.
        """
        if step is None:
            steps = Processes.at_work().broadcast("checkpoints", self.steps(), seconds=IO_TIMEOUT)
            if not steps:
                raise UserError("there is no checkpoint", where=str(self.folder), fix="Train the model first.")
            step = int(steps[-1])
        return self._read(step, abstract)[0]

    def restore_newest(
        self,
        abstract: Mapping[str, PyTree],
        accept: Callable[[Facts], object] = lambda facts: None,
        before: int | None = None,
    ) -> tuple[int, dict[str, PyTree], Facts] | None:
        """Step, state and facts of the newest step `before` a step that is intact; None if nothing was ever saved.

        Incomplete and corrupted steps are named in a `CheckpointWarning` and passed over, by all processes alike.
        `abstract` is as for `restore`. `accept` gets the facts of a step before it is loaded, and may refuse it with a
        UserError, which is raised. Raises UserError if there are steps but none can be restored, and OSError if the
        network of the disk failed.
        """
        processes = Processes.at_work()
        known = processes.broadcast("checkpoints", [*steps_in(self.folder).items()], seconds=IO_TIMEOUT)
        for step, reason in reversed([each for each in known if before is None or each[0] < before]):
            if not reason:
                try:
                    return step, *self._read(step, abstract, accept)
                except CorruptedError as error:
                    reason = error.what
                    self._corrupted.add(step)
            if processes.first:
                warnings.warn(f"checkpoint {step} is passed over: {reason}", CheckpointWarning, stacklevel=2)
        if not self._corrupted:
            return None
        what = f"none of the checkpoints {sorted(self._corrupted)} can be restored; the last reason: {reason}"
        fix = "Undo changes of the model or the optimizer, or give the run another name; or remove the folder."
        raise UserError(what, where=str(self.folder), fix=fix)

    def verify(self, step: int) -> str:
        """Read all arrays of a step and compare them with their checksums; returns what is wrong, "" if nothing is."""
        try:
            for name, tree in self.abstract(step).items():  # one by one: a whole state may not fit in memory
                self._read(step, {name: tree})
        except CorruptedError as error:
            return error.what
        return ""

    def abstract(self, step: int) -> dict[str, PyTree]:
        """All trees of a step as shapes and dtypes on one device. Raises CorruptedError if they cannot be read."""
        path, here = self.folder / str(step), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        with _agreeing("trees", path):
            saved = ocp.checkpointables_metadata(path).metadata
            names = {name.partition(".")[0] for name in read_metadata(path).checksums}
            trees = {name: saved.get(name, {}) for name in sorted(names)}
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), trees)

    def _read(
        self, step: int, wanted: Mapping[str, PyTree], accept: Callable[[Facts], object] = lambda facts: None
    ) -> tuple[dict[str, PyTree], Facts]:
        """State and facts of a step. Raises CorruptedError in all processes if one of them cannot read it."""
        path, context, leaves = self.folder / str(step), self._context, leaves_by_path(wanted)
        with _agreeing("metadata", path):
            metadata = read_metadata(path)
            accept(metadata.facts)
            saved = {name: facts for name, facts in metadata.checksums.items() if name.partition(".")[0] in wanted}
            shapes = {name: shape for name, (_, shape, _) in saved.items()}
            wanted_shapes = {name: list(leaf.shape) for name, leaf in leaves.items()}
            for name in sorted(shapes.keys() | wanted_shapes.keys()):
                before, now = (each.get(name, "nothing") for each in (shapes, wanted_shapes))
                if before != now:
                    raise CorruptedError(f"{name} was saved as {before}, and is {now} here", path)
            # The checksums are of the bits of these dtypes.
            as_saved = [leaf.update(dtype=saved[name][0]) for name, leaf in leaves.items()]
        if jax.process_count() > 1 and Processes.at_work().count == 1:  # one process reads without the others
            context = ocp.Context(context)
            context.multiprocessing.primary_host = jax.process_index()
            context.multiprocessing.active_processes = {jax.process_index()}
        with _agreeing("restore", path), context:
            abstract = jax.tree.unflatten(jax.tree.structure(dict(wanted)), as_saved)
            loaded = dict(ocp.load_checkpointables(path, abstract))
        with _agreeing("checksums", path):
            if wrong := [name for name, facts in checksums(loaded).items() if facts != saved[name]]:
                raise CorruptedError(f"{wrong[0]} is not what was saved (checksum)", path)
        return jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), loaded, wanted), metadata.facts


# ---- a folder of steps ----


def steps_in(folder: Path) -> dict[int, str]:
    """Everything in a folder that is named like a step, oldest first: {step: why it is not complete, "" if it is}."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = {}
    for step in sorted(int(name) for name in names if name.isdecimal() and name == str(int(name))):
        is_complete = all((folder / str(step) / name).exists() for name in (METADATA, COMMIT))
        steps[step] = "" if is_complete else "it is incomplete: its save was cut off"
    return steps


def kept_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> set[int]:
    """Those of the ascending `steps` that stay: the newest ones, and multiples of `keep_every`."""
    return {*steps[-keep_last:], *(step for step in steps if keep_every and step % keep_every == 0)}


def _remove(path: Path) -> None:
    """Remove a step, its marks first, so that half a step never looks complete; of a link, the link alone."""
    if os.path.islink(path):
        os.unlink(path)
    elif path.is_dir():
        for name in (COMMIT, METADATA):
            (path / name).unlink(missing_ok=True)
        epath.Path(path).rmtree()


@contextlib.contextmanager
def _agreeing(name: str, path: Path) -> Iterator[None]:
    """Inside, what one process cannot read of the step at `path` becomes a CorruptedError in all of them."""
    reason = ""
    try:
        yield
    except CorruptedError as error:
        reason = error.what
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever Orbax and TensorStore raise for corrupted files
        raise_of_network(error)
        reason = first_line([*causes(error)][-1])
    if not Processes.at_work().all_min(f"{name} of {path.name}", int(not reason), seconds=IO_TIMEOUT):
        raise CorruptedError(reason or "another process cannot read it", path)

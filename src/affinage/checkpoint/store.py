"""The checkpoints of a run: a folder of steps, each of which is complete or not there at all.

The checksum of an array is computed on the devices that hold it: the wrapping sum, over all elements, of a hash of the
element's bits and its index. The hash is a bijection of the bits for a fixed index, so any one changed element changes
the sum; two changes cancel each other out with a probability of 2^-32. A sum has no order: it is equal on any mesh.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as absl_logging
from etils import epath
from jaxtyping import Array, UInt32
from orbax.checkpoint.experimental import v1 as ocp

from affinage.cluster.processes import Processes
from affinage.differing import differing
from affinage.errors import UserError, UserWarned, causes, errno_of, first_line, plain, raise_of_network
from affinage.json_files import check_place, sync
from affinage.stopping import skip_exit_handlers

Trees = Mapping[str, Any]  # of arrays, by name
Facts = dict[str, Any]
StepsInUse = Callable[[], set[int]]
Accept = Callable[[Facts], object]
Checksums = dict[str, list[Any]]  # path of an array -> [dtype, shape, checksum as 8 hexadecimal digits]

CHECKPOINTS = "checkpoints"  # the folder of steps in the folder of a training
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file of a step's metadata
COMMIT = "commit_success.txt"  # Orbax writes it last, when everything else of a step is on disk
IDENTITY = "identity"  # key of the facts that decide about a run's numbers
IO_TIMEOUT = 3600.0  # seconds in which every process has read or written its part of a state
_policies = ocp.training.preservation_policies
_OF_THE_CLOCK = ("saved", "seconds", "clock", "resumed_at")  # facts in which any two checkpoints differ
absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax logs every file, and errors that it raises anyway
# Once a task of Orbax has failed, and its error is raised, asyncio logs those of all other tasks.
logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())


class CheckpointWarning(UserWarned):
    """A checkpoint was passed over, or a run resumes with changed settings."""


class CorruptedError(UserError):
    """A checkpoint is not what was saved, or is that of another model or optimizer, which `misfits`."""

    def __init__(self, what: str, step: Path, *, misfits: bool = False) -> None:
        self.misfits = misfits
        fix = "`affinage checkpoint ls` lists the checkpoints: name another one, MODEL@STEP."
        super().__init__(what, where=str(step), fix=fix)


@dataclass(frozen=True)
class Metadata:
    """What a step records besides its arrays: JSON-able facts about its run, and checksums."""

    facts: Facts
    checksums: Checksums

    @property
    def fingerprint(self) -> str:
        """A hash of all arrays: the same for every checkpoint of the same numbers, whoever saved it on which mesh."""
        return _digest(self.checksums)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class CheckpointStore:
    """Saves and restores training states under `folder/<step>/`, by Orbax.

    A state is a mapping of names to trees of arrays (`params`, ...), each of which can be restored alone. A step counts
    once Orbax has committed it, so a process may die at any moment; a save ends once the disk has it. Checksums of all
    arrays are computed before a save and after a restore: what is corrupted is never restored silently. All processes
    of a run call the same methods in the same order, with one folder, which all of them see, or a `gs://` URL.

    The newest `keep_last` steps stay, and those at multiples of `keep_every`. The first process calls `saved` whenever
    the steps have changed; the steps that it returns are in use, and stay until the next save.
    """

    def __init__(
        self, folder: Path | str, *, keep_last: int = 2, keep_every: int | None = None, saved: StepsInUse = set
    ) -> None:
        self.folder: Path = epath.Path(folder) if "://" in str(folder) else Path(folder).absolute()
        self._keep_last, self._keep_every, self._saved = keep_last, keep_every, saved
        self._corrupted: set[int] = set()  # steps that look complete but could not be restored
        # Not by Orbax's Checkpointer: it calls JAX's preemption sync point in a thread, so that a training misses it.
        self._running: futures.Future[None] | None = None
        self._thread, self._context = futures.ThreadPoolExecutor(1, "checkpoints"), ocp.Context()
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
        """The metadata of a step. Raises CorruptedError if they cannot be read, or are not what was saved."""
        path = self.folder / str(step)
        with _agreeing(METADATA, path):
            saved = json.loads((path / METADATA).read_bytes())["custom_metadata"]["affinage"]
            if saved.pop("hash") != _digest(saved) or saved["step"] != step:
                raise CorruptedError(f"{METADATA} is not what was written for this step", path)
        return Metadata(saved["facts"], saved["checksums"])

    def listing(self) -> list[dict[str, Any]]:
        """{step, saved, bytes, why_not} of all that is named like a step, oldest first; arrays are not read."""
        rows = []
        for step, why_not in steps_in(self.folder).items():
            try:
                saved = None if why_not else self.metadata(step).facts.get("saved")
            except CorruptedError as error:
                saved, why_not = None, error.what
            size = sum(file.stat().st_size for file in (self.folder / str(step)).rglob("*") if file.is_file())
            rows.append({"step": step, "saved": saved, "bytes": size, "why_not": why_not})
        return rows

    def save(self, step: int, state: Trees, meta: Mapping[str, Any]) -> None:
        """Start saving trees of `jax.Array` and JSON-able facts; waits for the save before, see `wait`.

        The arrays may be donated or changed as soon as this returns. A step that is complete stays as it is.
        """
        self.wait()
        check_place(self.folder)
        processes, path = Processes.at_work(), self.folder / str(step)
        exists = processes.first and step in self.steps() and step not in self._corrupted
        if processes.first and not exists:
            _remove(path)  # what a killed save left, or a corrupted step
        if processes.broadcast("a save", exists, seconds=IO_TIMEOUT):
            return
        self._corrupted.discard(step)
        copied = json.loads(json.dumps({"step": step, "facts": dict(meta), "checksums": checksums(state)}))
        metadata = {"affinage": copied | {"hash": _digest(copied)}}
        with self._context:
            saving = ocp.save_checkpointables_async(path, dict(state), custom_metadata=metadata)
        self._running = self._thread.submit(_finish, saving, path if processes.first else None)

    def wait(self, timeout: float | None = None) -> None:
        """Block until the save in progress is on the disk, and the steps that no rule keeps are removed.

        With `timeout` 0 this does not block. Raises OSError if the disk did not take it; the steps before are intact.
        """
        if self._running is None or not futures.wait([self._running], timeout).done:
            return
        running, self._running = self._running, None
        try:
            running.result()
        except (OSError, ValueError) as error:  # TensorStore raises the latter for whatever the file system returned
            skip_exit_handlers.set()  # threads of Orbax wait minutes for the one that failed, and Python for them
            if not (number := errno_of(error) or ("://" in str(self.folder) and errno.EIO)):
                raise
            raise OSError(number, os.strerror(number), str(self.folder)) from error
        if Processes.at_work().first:
            in_use, steps = self._saved(), steps_in(self.folder)
            intact = [step for step, why_not in steps.items() if not why_not and step not in self._corrupted]
            for step in steps.keys() - kept_steps(intact, self._keep_last, self._keep_every) - in_use:
                with contextlib.suppress(OSError):  # the training continues
                    _remove(self.folder / str(step))

    def restore(self, step: int | None, abstract: Trees) -> Trees:
        """The trees of a step that `abstract` has as `jax.ShapeDtypeStruct`, on its shardings, cast to its dtypes.

        `step` None is the newest one, corrupted or not. Raises UserError if there is none, and CorruptedError if it is
        corrupted, or what was saved does not fit.
        """
        if step is None:
            step = Processes.at_work().broadcast("checkpoints", max(self.steps(), default=-1), seconds=IO_TIMEOUT)
            if step < 0:
                raise UserError("there is no checkpoint", where=str(self.folder), fix="Train the model first.")
        return self._read(step, abstract)[0]

    def restore_newest(
        self, abstract: Trees, accept: Accept = lambda facts: None, before: int | None = None
    ) -> tuple[int, Trees, Facts] | None:
        """Step, state and facts of the newest step `before` a step that is intact; None if nothing was ever saved.

        Incomplete and corrupted steps are named in a `CheckpointWarning` and passed over, by all processes alike.
        `abstract` is as for `restore`. `accept` gets the facts of a step before it is loaded, and may raise UserError.
        Raises UserError if there are steps but none can be restored, and OSError if the network of the disk failed.
        """
        processes = Processes.at_work()
        known = processes.broadcast("checkpoints", [*steps_in(self.folder).items()], seconds=IO_TIMEOUT)
        candidates, misfits = {step: reason for step, reason in known if before is None or step < before}, False
        for step, reason in reversed(candidates.items()):
            if not reason:
                try:
                    return step, *self._read(step, abstract, accept)
                except CorruptedError as error:
                    reason, misfits = error.what, error.misfits
                    self._corrupted.add(step)
            if processes.first:
                warnings.warn(f"checkpoint {step} is passed over: {reason}", CheckpointWarning, stacklevel=2)
        if not (corrupted := sorted(self._corrupted & candidates.keys())):
            return None
        what = f"none of the checkpoints {corrupted} can be restored; the last reason: {reason}"
        changed = "Undo changes of the model or the optimizer, or give the run another name"
        fix = changed if misfits else "Their files are incomplete or damaged: copy them from elsewhere"
        raise UserError(what, where=str(self.folder), fix=f"{fix}; or remove the folder, to train from the beginning.")

    def verify(self, step: int) -> str:
        """Read all arrays of a step and compare them with their checksums; returns what is wrong, "" if nothing is."""
        try:
            for name, tree in self.abstract(step).items():  # one by one: a whole state may not fit in memory
                self._read(step, {name: tree})
        except CorruptedError as error:
            return error.what
        return ""

    def abstract(self, step: int) -> Trees:
        """All trees of a step as shapes and dtypes on one device. Raises CorruptedError if they cannot be read."""
        path, here = self.folder / str(step), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        with _agreeing("the trees", path):
            saved, names = ocp.checkpointables_metadata(path).metadata, self.metadata(step).checksums
            trees = {name: saved.get(name, {}) for name in sorted({name.partition(".")[0] for name in names})}
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), trees)

    def _read(self, step: int, wanted: Trees, accept: Accept = lambda facts: None) -> tuple[Trees, Facts]:
        """State and facts of a step. Raises CorruptedError in all processes if one of them cannot read it."""
        path, context, leaves = self.folder / str(step), self._context, _leaves_by_path(wanted)
        metadata = self.metadata(step)
        accept(metadata.facts)
        saved = {name: facts for name, facts in metadata.checksums.items() if name.partition(".")[0] in wanted}
        for name in sorted(saved.keys() | leaves.keys()):
            before = saved[name][1] if name in saved else "nothing"
            now = list(leaves[name].shape) if name in leaves else "nothing"
            if before != now:
                raise CorruptedError(f"{name} was saved as {before}, and is {now} here", path, misfits=True)
        as_saved = [leaf.update(dtype=saved[name][0]) for name, leaf in leaves.items()]  # checksums are of their bits
        if jax.process_count() > 1 and Processes.at_work().count == 1:  # one process reads without the others
            context = ocp.Context(context)
            context.multiprocessing.primary_host = jax.process_index()
            context.multiprocessing.active_processes = {jax.process_index()}
        with _agreeing("an array", path), context:
            abstract = jax.tree.unflatten(jax.tree.structure(dict(wanted)), as_saved)
            loaded = dict(ocp.load_checkpointables(path, abstract))
        with _agreeing("a checksum", path):
            if wrong := [name for name, facts in checksums(loaded).items() if facts != saved[name]]:
                raise CorruptedError(f"{wrong[0]} is not what was saved (checksum)", path)
        return jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), loaded, dict(wanted)), metadata.facts


def _finish(saving: ocp.AsyncResponse[None], path: Path | None) -> None:
    """Wait until Orbax has committed a step, and the disk has it; others' disks have what their processes closed."""
    saving.result()
    if path is not None and "://" not in str(path):
        sync([*path.rglob("*"), path, *path.parents[:2]])


@contextlib.contextmanager
def _agreeing(part: str, path: Path) -> Iterator[None]:
    """Inside, what one process cannot read of a step becomes a CorruptedError in all of them."""
    reason = ""
    try:
        yield
    except CorruptedError as error:
        reason = error.what
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever Orbax and TensorStore raise for corrupted files
        raise_of_network(error)
        reason = f"{part} cannot be read: {first_line([*causes(error)][-1])}"
    if not Processes.at_work().all_min(f"{part} of {path.name}", int(not reason), seconds=IO_TIMEOUT):
        raise CorruptedError(reason or f"another process cannot read {part}", path)


def steps_in(folder: Path) -> dict[int, str]:
    """Everything in a folder that is named like a step, oldest first: {step: why it is not complete, "" if it is}."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))
    is_complete = {step: all((folder / str(step) / name).exists() for name in (METADATA, COMMIT)) for step in steps}
    return {step: "" if is_complete[step] else "it is incomplete: its save was cut off" for step in steps}


def kept_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> set[int]:
    """Those of the ascending `steps` that Orbax's policies preserve: the newest ones, and multiples of `keep_every`."""
    every = [_policies.EveryNSteps(keep_every)] if keep_every else []
    policy = _policies.AnyPreservationPolicy([_policies.LatestN(keep_last), *every])
    known = [ocp.training.CheckpointMetadata(step, epath.Path(), metadata=None) for step in steps]
    return {*itertools.compress(steps, policy.should_preserve(known, context=_policies.PreservationContext()))}


def _remove(path: Path) -> None:
    """Remove a step, its marks first, so that half a step never looks complete; of a link, the link alone."""
    if os.path.islink(path):
        os.unlink(path)
    elif path.is_dir():
        for name in (COMMIT, METADATA):
            (path / name).unlink(missing_ok=True)
        epath.Path(path).rmtree()


def check_compatible(facts: Facts, now: Facts, allowed: Collection[str], *, where: str) -> dict[str, str]:
    """Compare the identity in a checkpoint's facts with that of the run that is to resume from it.

    Facts without an identity, such as those of an import, fit any run. `schedule` in `allowed` includes what is below
    it, as `schedule.peak_lr`. Returns {name: "saved -> now"} of the differences allowed; UserError lists all others.
    """
    pairs = differing([facts.get(IDENTITY, now), now], absent="(not there)")
    changes = {plain(name): " -> ".join(plain(str(value))[:80] for value in pair) for name, pair in sorted(pairs)}
    refused = [name for name in changes if not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)]
    if refused:
        lines = ["this run is not the one that was saved:", *(f"{name}: {changes[name]}" for name in refused)]
        fix = f"Undo the change, or allow it by name: runtime.checkpoint.allow_changes=[{', '.join(refused)}]."
        raise UserError("\n    ".join(lines), where=where, fix=fix)
    return changes


def compare(one: Metadata, other: Metadata) -> dict[str, Any]:
    """What differs: {facts: [{name, saved, now}], arrays: {same: their number, different: [names], only: [names]}}."""
    facts = [{key: value for key, value in each.facts.items() if key not in _OF_THE_CLOCK} for each in (one, other)]
    changed = [{"name": name, "saved": saved, "now": now} for name, (saved, now) in sorted(differing(facts))]
    both, only = one.checksums.keys() & other.checksums.keys(), sorted(one.checksums.keys() ^ other.checksums.keys())
    different = sorted(path for path in both if one.checksums[path] != other.checksums[path])
    return {"facts": changed, "arrays": {"same": len(both) - len(different), "different": different, "only": only}}


def checksums(state: Trees) -> Checksums:
    """The checksum of every array of a state, by its path; one program on the devices, started by all processes."""
    leaves = _leaves_by_path(state)
    named = zip(leaves.items(), np.asarray(_sums(list(leaves.values()))).tolist(), strict=True)
    return {path: [str(leaf.dtype), list(leaf.shape), f"{value:08x}"] for (path, leaf), value in named}


def _leaves_by_path(state: Trees) -> dict[str, Any]:
    """The leaves of trees by their dotted paths; a field of a tuple and the same key of a mapping are alike."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def _sums(leaves: list[Array]) -> UInt32[Array, " N"]:
    return jnp.array([_checksum(leaf) for leaf in leaves], jnp.uint32)


def _checksum(array: Array) -> UInt32[Array, ""]:
    bits = array.view(f"uint{8 * min(array.dtype.itemsize, 4)}").astype(jnp.uint32)  # 8 bytes become two halves
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # The finalizer of MurmurHash3, after the index has been spread over all bits: each line is a bijection of `mixed`.
    mixed = bits ^ (index * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)

"""The checkpoints of a run: a folder of steps, each there completely, bit for bit, or not at all."""

import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import absl.logging
import jax
from orbax.checkpoint import v1 as ocp

from affinage.checkpoint.contents import facts_in, misfit, strange
from affinage.checkpoint.coordination import by_coordinator
from affinage.checkpoint.holding import LEAST_PART, can_be_held, compile_cuts, hold
from affinage.checkpoint.memory import memory_given_back
from affinage.checkpoint.seal import UNSIGNED, damage, seal, seal_hash, sign
from affinage.checkpoint.steps import complete_steps, drop_remains, entries, kept_steps, remove, why_not_read
from affinage.cluster.processes import Processes
from affinage.errors import UserError, UserWarned, disk_error, errno_of, first_line, raise_of_network
from affinage.signing import KEY_VARIABLE, signing_key

PyTree = Any

_PAUSE = 600.0  # seconds in which a disk may do nothing at all
_SLOWEST = 10e6  # bytes per second; a disk that takes or gives fewer is as good as stuck

# Saves of all stores begin here, in the order in which they were asked for: Orbax numbers what hosts do together by one
# count of the process, and two that began at once could be numbered otherwise on another host.
_BEGINS = ThreadPoolExecutor(1, thread_name_prefix="saves")

absl.logging.set_verbosity(absl.logging.FATAL)  # Orbax tells of every file it writes, and thrice of errors it raises


class CheckpointWarning(UserWarned):
    """A checkpoint was passed over."""


class Copies(Protocol):
    """Whoever copies saves elsewhere; see `affinage.checkpoint.mirror`."""

    @property
    def held(self) -> frozenset[int]:
        """Steps that must not be removed yet."""
        ...

    def saved(self) -> None:
        """A save is complete; returns at once."""
        ...


class CheckpointStore:
    """Saves and restores training states under `folder/<step>/`.

    A state is a mapping of names to trees of arrays (`params`, ...), each of which can be restored without the others.
    A step counts only once it is sealed, see `affinage.checkpoint.seal`, so a process may die at any moment; and it is
    restored only if it is what was sealed: Orbax itself loads a flipped bit without a word.

    Where many hosts work together, all of them save and restore, each its own part; the first one decides what, and
    seals it. All see the same folder.

    Args:
        folder: made if it is not there.
        keep_last: how many of the newest steps stay.
        keep_every: steps at multiples of this stay for ever; None for none.
        copies: is told of every save, and says which steps may not be removed yet; None: nobody is.

    Raises:
        UserError: see `affinage.signing.signing_key`; with one, seals are signed, and others are none.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, keep_every: int | None = None, copies: "Copies | None" = None
    ) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key = signing_key()
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._copies = copies
        self._unreadable: set[int] = set()  # steps that look complete, but were tried
        # Orbax runs here only: its coroutines do not bear an exception, such as that of Ctrl-C, in their midst.
        self._orbax = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._began = 0.0  # when it did
        self._context = ocp.Context()
        self._context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        by_coordinator(self._context)
        # By default it makes one of every handler there is, twice for each tree: a third of the time of `save`.
        only_trees = ocp.handlers.local_registry(include_global_registry=False).add(ocp.handlers.PyTreeHandler)
        self._context.checkpointables.registry = only_trees
        # Weights are noise to a compressor: zstd makes a save take three times as long for 8 % fewer bytes.
        self._context.array.saving.use_compression = False
        # Of arrays that several devices hold each sends a part, cut out by a program: not worth it for a vector.
        self._context.array.saving.min_slice_bytes_for_replica_parallel = LEAST_PART

    def steps(self) -> list[int]:
        """The steps that are completely there, oldest first."""
        return complete_steps(self.folder)

    def entries(self) -> list[tuple[int, Path]]:
        """Whatever is called like a step, oldest first."""
        return entries(self.folder)

    def why_not_read(self, step: int) -> str:
        """Why what is called like this step is not among `steps`, in words; "" if it is, or nothing is called so."""
        path = self.folder / str(step)
        return why_not_read(path) if os.path.lexists(path) else ""

    def prepare(self, state: Mapping[str, PyTree]) -> None:
        """Do now, before the first step, what the loop would wait for in its first save of such a state."""
        if not can_be_held(dict(state)):
            compile_cuts(dict(state))

    def save(self, step: int, state: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Start saving; the arrays may be donated or changed as soon as this returns.

        Waits for the save before, if it still runs. A step that is already there stays as it is. Many hosts call it
        with the same steps in the same order.

        Args:
            step: names the save.
            state: trees of `jax.Array`, by name.
            meta: JSON-able facts about the run, read again by `meta`.

        Raises:
            OSError: see `wait`.
            UserError: of many hosts this one has another folder.
        """
        self.wait()
        processes, there = Processes.at_work(), step in self.steps() and step not in self._unreadable
        # The first one has sealed the save before when it says so.
        there, folder = processes.broadcast("a save", [there, str(self.folder)], seconds=seconds_at_most(state))
        if folder != str(self.folder):
            raise UserError(
                f"host {processes.index} would save elsewhere than the first, which saves into {folder}",
                where=str(self.folder),
                fix="Give all hosts the same folder of runs, under the same name.",
            )
        if there:
            return
        target = self.folder / str(step)
        if processes.first and os.path.lexists(target):
            remove(target)  # the remains of a save that was killed, or of one that was damaged since
        self._unreadable.discard(step)
        held, self._began = hold(dict(state)), time.monotonic()
        begun = _BEGINS.submit(self._begin, target, held or dict(state), {"step": step, "facts": dict(meta)})
        self._running = self._orbax.submit(self._finish, begun, target)
        if held is None and begun.exception() is not None:  # until Orbax has what it needs of the arrays
            self.wait()  # raises it

    def _begin(self, target: Path, state: dict[str, PyTree], meta: dict[str, Any]) -> list[ocp.AsyncResponse[None]]:
        self._context.async_options.timeout_secs = int(seconds_at_most(state))
        with self._context:
            return [ocp.save_checkpointables_async(target, state, custom_metadata=meta)]

    def _finish(self, begun: Future[list[ocp.AsyncResponse[None]]], target: Path) -> None:
        with memory_given_back():
            begun.result().pop().result()  # popped, as it holds a copy of the state
            if Processes.at_work().first:
                seal(target, self._key)
                if self._copies is not None:
                    self._copies.saved()
                self._prune()
                drop_remains(self.folder, before=int(target.name))

    def wait(self) -> None:
        """Block until what was saved is on disk and sealed, and the steps that need not be kept are gone.

        Raises:
            OSError: the disk did not take it; the steps before are whole.
        """
        if self._running is not None:
            running, self._running = self._running, None
            try:
                running.result()
            except ValueError as error:  # TensorStore's, of whatever kind
                number = errno_of(error)
                if not number:
                    raise
                raise OSError(number, os.strerror(number), str(self.folder)) from error

    def in_flight(self) -> float:
        """Seconds since the save that still runs began; 0 where none does. Waits for nothing.

        Raises:
            OSError: it has failed, which `wait` would tell, too.
        """
        if self._running is not None and self._running.done():
            self.wait()
        return 0.0 if self._running is None else time.monotonic() - self._began

    def damage(self, step: int, only: Mapping[str, Any] | None = None) -> str:
        """What is wrong with a step; "" if it is what was saved as this step, and nothing that should not be read.

        See `affinage.checkpoint.seal.damage` and `affinage.checkpoint.contents.strange`.

        Raises:
            OSError: the network of the disk failed, which says nothing of the step.
        """
        folder = self.folder / str(step)
        found = damage(folder, None if only is None else only.keys(), self._key)
        if found:
            return found
        try:
            if found := strange(folder, self._trees(step, only)):
                return found
            saved_as = self._metadata(step).get("step")
        except Exception as error:  # whatever Orbax, TensorStore or JSON make of a stranger's files
            raise_of_network(error)
            return f"it cannot be read: {first_line(error)}"
        return "" if saved_as == step else f"it was saved as step {saved_as!r:.80}"

    def _damage_seen_by_first(self, step: int, only: Mapping[str, Any]) -> str:
        """See `damage`; of hosts that work together one reads the files, which may take the others long."""
        processes = Processes.at_work()
        found = self.damage(step, only) if processes.first else ""
        return str(processes.broadcast("damage", found, seconds=seconds_at_most(only)))

    def seal_hash(self, step: int) -> str:
        """A hash of all files of a step: of this save and its copies, and of no other save, be it of the same state."""
        return seal_hash(self.folder / str(step))

    def sign(self, step: int) -> None:
        """Sign a step that was saved without the key, or with another one.

        Raises:
            UserError: there is no key, or what is there is not what was sealed.
        """
        if self._key is None:
            fix = "Name the file of a key with at least 32 bytes, which nobody else may read."
            raise UserError("there is no key to sign with", where=KEY_VARIABLE, fix=fix)
        folder = self.folder / str(step)
        self._refuse_damaged(step, damage(folder))
        sign(folder, self._key)

    def restore(self, step: int, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step, on the devices and shardings that `abstract` asks for, whatever it was saved from.

        Args:
            step: one of `steps()`.
            abstract: trees of `jax.ShapeDtypeStruct` with shardings; only the names given are read.

        Raises:
            UserError: if it is damaged, or what was saved is not what is asked for.
        """
        self._refuse_damaged(step, self._damage_seen_by_first(step, abstract))
        try:
            return self._load(step, abstract)
        except Exception as error:
            misfit = self._misfit(step, abstract)
            if not misfit:
                raise self._unread(step, error) from error
            fix = "Undo the change of the settings that it comes from; a checkpoint is of one model and one optimizer."
            raise UserError(
                f"the checkpoint of step {step} does not fit: {misfit}", where=str(self.folder), fix=fix
            ) from error

    def described(self, step: int) -> dict[str, PyTree]:
        """The trees of a step with the shape and dtype of each array; no array is read.

        Raises:
            UserError: if it is damaged, or does not say it.
        """
        self._refuse_damaged(step, self.damage(step, {}) or strange(self.folder / str(step), self._trees(step)))
        try:
            found = dict(self._ask_orbax(ocp.checkpointables_metadata, self.folder / str(step)).metadata)
        except Exception as error:
            raise self._unread(step, error) from error
        for name, tree in found.items():
            leaves = [] if tree is None else jax.tree.leaves(tree)
            if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
                raise self._unread(step, ValueError(f"what it says of {name} cannot be read"))
        return found

    def _unread(self, step: int, error: Exception) -> UserError:
        """What to tell of it. Raises what is no matter of the checkpoint: of a disk, or of memory."""
        failed = disk_error(error)
        if failed is not None:
            raise failed from error
        if isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
            raise error
        return UserError(f"the checkpoint of step {step} cannot be read: {first_line(error)}", where=str(self.folder))

    def _refuse_damaged(self, step: int, found: str) -> None:
        if found == UNSIGNED:
            fix = "If it is yours, `affinage checkpoint sign` signs it; if others may write there, it may be theirs."
            raise UserError(f"the checkpoint of step {step} is not taken: {found}", where=str(self.folder), fix=fix)
        if found:
            others = ", ".join(f"@{other}" for other in self.steps() if other != step)
            raise UserError(
                f"the checkpoint of step {step} is damaged: {found}",
                where=str(self.folder),
                fix=f"Name one of the others ({others}), or remove it and run its recipe, which goes on from there."
                if others
                else "There is no other.",
            )

    def _misfit(self, step: int, abstract: Mapping[str, PyTree]) -> str:
        """The first array that was saved in another shape than it is asked for, or is on one side only; "" if none."""
        try:
            saved = self._ask_orbax(ocp.checkpointables_metadata, self.folder / str(step)).metadata
        except Exception:  # whatever Orbax makes of it: it is something else that is wrong
            return ""
        return misfit(saved, abstract)

    def restore_newest(
        self,
        abstract: Mapping[str, PyTree],
        accept: Callable[[Mapping[str, Any]], None] = lambda meta: None,
        at_most: int | None = None,
    ) -> tuple[int, dict[str, PyTree], dict[str, Any]] | None:
        """Step, state and meta of the newest step that can be read; None if nothing was ever saved.

        Steps that are not complete, damaged or cannot be read are passed over with a `CheckpointWarning`.

        Args:
            abstract: see `restore`.
            accept: given the meta of a whole step before it is loaded; may refuse it with a UserError, which stands;
                with another error the step is passed over.
            at_most: the newest up to this step is wanted; where none can be read, the first one after it is taken.

        Raises:
            UserError: if there are steps but none can be read; starting from nothing would hide it.
            OSError: the network of the disk failed, which says nothing of the steps.
        """
        share = partial(
            Processes.at_work().broadcast, seconds=seconds_at_most(abstract)
        )  # the first may still seal a save
        steps, reason = share("checkpoints", self.steps()), ""
        called: list[int] = share("what is called like one", [step for step, _ in self.entries()])
        wanted = max(called, default=0) if at_most is None else at_most
        for step in sorted(called, key=lambda step: (step > wanted, abs(step - wanted))):
            if step not in steps:
                _warn_once(step, self.why_not_read(step) or "it is not complete")
                continue
            reason = self._damage_seen_by_first(step, abstract)
            if reason:
                _warn_once(step, reason)
            else:
                found, reason = self._read(step, abstract, accept)
                # All go on from one step, also where what one of them cannot read is whole for the others.
                if Processes.at_work().all_min(
                    "whether it was read", int(not reason), seconds=seconds_at_most(abstract)
                ):
                    return found
                found = None  # its memory, where another one could not read it
                reason = reason or "another host cannot read it"
            self._unreadable.add(step)
        if not steps:
            return None
        raise UserError(
            f"none of the checkpoints {steps} can be restored; the last one says: {reason}",
            where=str(self.folder),
            fix="If the model, the optimizer or another setting of it was changed, undo that, or give the run another "
            "name; otherwise remove the folder to start again.",
        )

    def _read(
        self, step: int, abstract: Mapping[str, PyTree], accept: Callable[[Mapping[str, Any]], None]
    ) -> tuple[tuple[int, dict[str, PyTree], dict[str, Any]] | None, str]:
        """What `restore_newest` gives of a step, or why this host cannot, which it has said. UserErrors are raised."""
        try:
            meta = self._facts(step)
            accept(meta)
            return (step, self._load(step, abstract), meta), ""
        except UserError:
            raise
        except Exception as error:  # whatever Orbax, TensorStore or JSON make of what does not fit
            raise_of_network(error)
            reason = self._misfit(step, abstract) or first_line(error)
            _warn(step, reason)
            return None, reason

    def forget_after(self, step: int) -> None:
        """Remove all later steps: the run has gone back to this one, and will be another from there on."""
        if Processes.at_work().first:
            for later, path in self.entries():
                if later > step:
                    remove(path)

    def restore_params(self, step: int | None, abstract: PyTree) -> PyTree:
        """Only the parameters of a training state; of the newest step if `step` is None.

        Whoever uses or publishes a model is told where that is damaged, and is not given an older one.

        Raises:
            UserError: if there is no checkpoint, or it is damaged.
        """
        if step is None:
            share = partial(Processes.at_work().broadcast, seconds=seconds_at_most(abstract))
            steps = share("checkpoints", self.steps())
            if not steps:
                raise UserError("there is no checkpoint", where=str(self.folder), fix="Train the model first.")
            step = int(steps[-1])
        return self.restore(step, {"params": abstract})["params"]

    def meta(self, step: int) -> dict[str, Any]:
        """The facts that were saved with a step. Raises UserError if they cannot be read."""
        try:
            return self._facts(step)
        except Exception as error:
            raise self._unread(step, error) from error

    def _facts(self, step: int) -> dict[str, Any]:
        return dict(self._metadata(step)["facts"])

    def _trees(self, step: int, only: Mapping[str, Any] | None = None) -> list[str]:
        names = [path.name for path in (self.folder / str(step)).iterdir() if path.is_dir()]
        return sorted(name for name in names if not name.startswith(".") and (only is None or name in only))

    def _metadata(self, step: int) -> dict[str, Any]:
        found = self._ask_orbax(ocp.checkpointables_metadata, self.folder / str(step))
        return facts_in(found.custom_metadata)

    def _load(self, step: int, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return self._ask_orbax(ocp.load_checkpointables, self.folder / str(step), dict(abstract))

    def _ask_orbax(self, function: Callable[..., Any], *arguments: Any) -> Any:
        def ask() -> Any:
            with self._context:
                return function(*arguments)

        return self._orbax.submit(ask).result()

    def _prune(self) -> None:
        readable = [step for step in self.steps() if step not in self._unreadable]
        kept = kept_steps(readable, self._keep_last, self._keep_every)
        held = frozenset() if self._copies is None else self._copies.held
        for step in self.steps():
            if step not in kept and step not in held and step < readable[-1]:
                remove(self.folder / str(step))


def seconds_at_most(state: PyTree) -> float:
    """In which a state of such arrays is written, hashed or read, unless the disk is as good as stuck."""
    return _PAUSE + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / _SLOWEST


def _warn_once(step: int, reason: str) -> None:
    """Of what all hosts know alike."""
    if Processes.at_work().first:
        _warn(step, reason)


def _warn(step: int, reason: str) -> None:
    warnings.warn(f"checkpoint {step} cannot be read: {reason}", CheckpointWarning, stacklevel=3)

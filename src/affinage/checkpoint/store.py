"""The checkpoints of a run: a folder of steps, each there completely or not at all."""

import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import absl.logging
import jax
from orbax.checkpoint import v1 as ocp

from affinage.errors import UserError

PyTree = Any

_STEP = re.compile(r"\d+")
_COMMIT = "commit_success.txt"  # Orbax writes it last, after everything else is on disk
_SAVE_TIMEOUT = 600  # seconds until a save that does not end is an error

absl.logging.set_verbosity(absl.logging.ERROR)  # Orbax tells of every file it writes


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over."""


class CheckpointStore:
    """Saves and restores training states under `folder/<step>/`.

    A state is a mapping of names to trees of arrays (`params`, ...), each of which can be restored without the others.
    A step counts only once Orbax's commit file is written, so a process may die at any moment.

    Args:
        folder: made if it is not there.
        keep_last: how many of the newest steps stay.
        keep_every: steps at multiples of this stay for ever; None for none.
    """

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_every: int | None = None) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._unreadable: set[int] = set()  # steps that look complete, but were tried
        self._running: ocp.AsyncResponse | None = None
        self._context = ocp.Context()
        self._context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        self._context.async_options.timeout_secs = _SAVE_TIMEOUT
        # Weights are noise to a compressor: zstd makes a save take three times as long for 8 % fewer bytes.
        self._context.array.saving.use_compression = False

    def steps(self) -> list[int]:
        """The steps that are completely there, oldest first."""
        found = [path for path in self.folder.iterdir() if _STEP.fullmatch(path.name)]
        # A link could lead anywhere, and Orbax would follow it.
        return sorted(int(path.name) for path in found if not path.is_symlink() and (path / _COMMIT).is_file())

    def save(self, step: int, state: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Start saving; the arrays may be donated or changed as soon as this returns.

        Waits for the save before, if it still runs. A step that is already there stays as it is.

        Args:
            step: names the save.
            state: trees of `jax.Array`, by name.
            meta: JSON-able facts about the run, read again by `meta`.
        """
        self.wait()
        if step in self.steps() and step not in self._unreadable:
            return
        target = self.folder / str(step)
        if jax.process_index() == 0 and target.exists():
            _remove(target)  # the remains of a save that was killed, or of one that was damaged since
        self._unreadable.discard(step)
        with self._context:
            self._running = ocp.save_checkpointables_async(target, dict(state), custom_metadata=dict(meta))

    def wait(self) -> None:
        """Block until what was saved is on disk, and remove the steps that need not be kept."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()
            self._prune()

    def restore(self, step: int, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step, on the devices and shardings that `abstract` asks for, whatever it was saved from.

        Args:
            step: one of `steps()`.
            abstract: trees of `jax.ShapeDtypeStruct` with shardings; only the names given are read.
        """
        with self._context:
            return ocp.load_checkpointables(self.folder / str(step), dict(abstract))

    def restore_newest(self, abstract: Mapping[str, PyTree]) -> tuple[int, dict[str, PyTree], dict[str, Any]] | None:
        """Step, state and meta of the newest step that can be read; None if nothing was ever saved.

        Steps that cannot be read are passed over with a `CheckpointWarning`.

        Raises:
            UserError: if there are steps but none can be read; starting from nothing would hide it.
        """
        steps = self.steps()
        if not steps:
            return None
        for step in reversed(steps):
            try:
                return step, self.restore(step, abstract), self.meta(step)
            except Exception as error:  # whatever Orbax, TensorStore or JSON make of a damaged file
                reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
                self._unreadable.add(step)
                warnings.warn(f"checkpoint {step} cannot be read: {reason}", CheckpointWarning, stacklevel=2)
        raise UserError(
            f"none of the checkpoints {steps} can be restored; the last one says: {reason}",
            where=str(self.folder),
            fix="If the model was changed, give the run another name; otherwise remove the folder to start again.",
        )

    def restore_params(self, step: int | None, abstract: PyTree) -> PyTree:
        """Only the parameters of a training state; of the newest readable step if `step` is None.

        Raises:
            UserError: if there is no checkpoint.
        """
        if step is not None:
            return self.restore(step, {"params": abstract})["params"]
        newest = self.restore_newest({"params": abstract})
        if newest is None:
            raise UserError("there is no checkpoint", where=str(self.folder), fix="Train the model first.")
        return newest[1]["params"]

    def meta(self, step: int) -> dict[str, Any]:
        """The facts that were saved with a step."""
        with self._context:
            return dict(ocp.checkpointables_metadata(self.folder / str(step)).custom_metadata or {})

    def _prune(self) -> None:
        if jax.process_index() != 0:
            return
        readable = [step for step in self.steps() if step not in self._unreadable]
        kept = {*readable[-self._keep_last :], *(s for s in readable if self._keep_every and s % self._keep_every == 0)}
        for step in self.steps():
            if step not in kept and step < readable[-1]:
                _remove(self.folder / str(step))


def _remove(path: Path) -> None:
    (path / _COMMIT).unlink(missing_ok=True)  # first: a step half removed must not look complete
    shutil.rmtree(path)

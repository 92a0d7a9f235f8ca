"""The checkpoints of a training: what is saved when, what a run resumes from, and what it refuses to resume from."""

import datetime
import json
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.store import CHECKPOINTS, IDENTITY, IO_TIMEOUT, check_compatible, checksums
from affinage.cluster.processes import Processes
from affinage.errors import UserError, UserWarned
from affinage.json_files import write_atomically
from affinage.results import versions
from affinage.training.health import HEALTH
from affinage.training.metrics import METRICS, ConsoleWriter, GoodputTimer
from affinage.training.state import FROZEN, TrainState, kept_frozen
from affinage.training.trainer import Trainer
from affinage.training.watchdog import Watchdog

_BY_CLOCK = 10  # steps: several processes must agree on what the clock says, which costs a message
_TO_UPLOAD = 24 * 3600.0  # seconds; a copy that fails ends by itself
Restored = tuple[int, TrainState, dict[str, Any]]  # steps made, the state, and the facts that were saved with it


class Checkpointer:
    """Saves and restores the state of a training, in all processes alike. While entered, the uploader runs."""

    def __init__(self, trainer: Trainer, goodput: GoodputTimer, watchdog: Watchdog) -> None:
        self._trainer, self._job, self._goodput, self._watchdog = trainer, trainer.job, goodput, watchdog
        self._settings = settings = self._job.runtime.checkpoint
        self._uploader = self._job.uploader if Processes.current.first else None
        self._store = self._job.store or CheckpointStore(
            self._job.folder / CHECKPOINTS, keep_last=settings.keep_last, keep_every=settings.keep_every
        )
        self._versions = versions()  # reading them takes milliseconds
        self.resumed_at: list[int] = []  # the steps at which the starts of this run began, except the first
        self._saved_at = time.monotonic()

    def __enter__(self) -> "Checkpointer":
        if self._uploader is not None:
            self._uploader.start()
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._trainer.abstract.named()))
        kept, free = self._settings.keep_last + 1, shutil.disk_usage(self._job.folder).free
        if self._job.store is None and Processes.current.first and free < (kept - len(self._store.steps())) * size:
            what = f"a checkpoint takes {size / 1e9:.3g} GB, of {kept} at once, and the disk has {free / 1e9:.3g} left"
            warnings.warn(f"{what}: the training may end at a save", UserWarned, stacklevel=2)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.wait()  # for the save in flight, which an error in the loop must not take with it

    def restore(self, before: int | None = None) -> Restored:
        """The newest intact checkpoint `before` a step; without any, the one that is extended, or the first weights."""
        job, abstract, steps = self._job, self._trainer.abstract, self._store.steps()
        self._watchdog.beat("the restore", at_most=(2 + len(steps)) * IO_TIMEOUT)
        # Random weights are a program, too.
        with self._goodput.account("restore" if steps or job.extends is not None else "compile"):
            newest = self._store.restore_newest(abstract.named(), self._accept, before)
            if newest is not None:
                step, trees, meta = newest
                state = TrainState(**trees, frozen=kept_frozen(self._store.folder.parent, abstract.frozen))
            else:
                step, state, meta = self._extended(*job.extends) if job.extends else (0, self._trainer.begin(), {})
                if state.frozen is not None:
                    frozen = CheckpointStore(self._store.folder.parent / FROZEN)
                    frozen.save(0, {"params": state.frozen}, {})
                    frozen.wait()
                checksums(state.named())  # compiled now: the first save may come within a grace period
        if before is None:
            self.resumed_at = [*meta.get("resumed_at", []), *([step] if step else [])]
        self._saved_at = time.monotonic()
        return step, state, meta

    def rollback(self, before: int) -> Restored:
        """Go back to the newest checkpoint before an unhealthy step; as a save drains first, there is none after it."""
        self._watchdog.beat("the rollback", at_most=IO_TIMEOUT)
        with self._goodput.account("restore"):
            self._store.wait()
            step, state, meta = self.restore(before)
        self._goodput.lose_since(meta)
        return step, state, meta

    def should_save(self, step: int) -> bool:
        """Whether the state after a step is to be saved; the same in all processes. Raises OSError if a save failed."""
        self._store.wait(0)
        minutes = self._settings.every_minutes
        if step % self._settings.every_steps == 0 or step == self._job.settings.steps:
            return True
        if minutes is None or (Processes.current.count > 1 and step % _BY_CLOCK):
            return False
        is_old = time.monotonic() - self._saved_at >= 60 * minutes
        return bool(Processes.current.broadcast("a save by the clock", is_old))

    def save(self, step: int, state: TrainState, health: Mapping[str, Any]) -> None:
        """Start to save the state after a step; waits for the save before. `health`: the facts of `HealthMonitor`."""
        self._watchdog.beat("the save", at_most=IO_TIMEOUT)
        with self._goodput.account("save"):
            facts: dict[str, Any] = {"name": self._job.name, IDENTITY: identity(self._trainer)}
            facts |= {"mesh": dict(self._trainer.mesh.shape), "seconds": self._goodput.seconds(), "clock": time.time()}
            facts |= {"health": dict(health), "resumed_at": self.resumed_at, "versions": self._versions}
            facts["saved"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._store.save(step, state.named(), facts)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Until the last save is complete."""
        self._watchdog.beat("the last save", at_most=IO_TIMEOUT)
        with self._goodput.account("save"):
            self._store.wait()
            Processes.current.barrier("the last save", seconds=IO_TIMEOUT)

    def finish_upload(self, console: ConsoleWriter) -> None:
        """Wait until the last save is copied, and print what became of it. The first process copies for all."""
        if self._job.uploader is None:
            return
        self._watchdog.beat("the copy of the last save", at_most=_TO_UPLOAD)
        line = "the last save is copied"
        if self._uploader is not None and (missing := self._uploader.settle(self._watchdog.seconds_left)):
            line = f"NOT everything was copied to {self._uploader.url}: {missing}"
        console.say(str(Processes.current.broadcast("the copy of the last save", line, seconds=None)))

    def _accept(self, meta: dict[str, Any]) -> None:
        allowed, where = self._settings.allow_changes, str(self._store.folder)
        for name, change in check_compatible(meta, identity(self._trainer), allowed, where=where).items():
            what = f"{self._job.name} resumes with another {name}: {change}"
            if name == "batch_size":
                what += "; rows are found by counting, so that some come again or are passed over"
            warnings.warn(what, CheckpointWarning, stacklevel=2)

    def _extended(self, training: Path, step: int) -> Restored:
        """The checkpoint of another training, whose metrics and unhealthy steps are copied: curve and lineage go on.

        Raises UserError: there is no such checkpoint, it is corrupted, or more than steps and schedule differs.
        """
        job, store = self._job, CheckpointStore(training / CHECKPOINTS)
        if job.settings.steps <= step:
            what, fix = f"it has made {step} of the {job.settings.steps} steps", f"Set {job.name}.steps to more."
            raise UserError(what, where=f"{job.name}.resume_from", fix=fix)
        meta, allowed = store.metadata(step).facts, (*self._settings.allow_changes, "steps", "schedule")
        check_compatible(meta, identity(self._trainer), allowed, where=str(store.folder))
        frozen = kept_frozen(training, self._trainer.abstract.frozen)
        state = TrainState(**store.restore(step, self._trainer.abstract.named()), frozen=frozen)
        for name in (METRICS, HEALTH):
            if Processes.current.first and (training / name).is_file() and not (job.folder / name).exists():
                write_atomically(job.folder / name, (training / name).read_bytes())
        # The time between the two belongs to neither.
        return step, state, {name: fact for name, fact in meta.items() if name != "clock"}


def identity(trainer: Trainer) -> dict[str, Any]:
    """What decides about the numbers of a run, as JSON: model, settings, seed, batch size, data, plug-ins' code."""
    job = trainer.job
    facts = job.settings.deciding() | {"batch_size": trainer.rows, "model": job.graph.to_dict(), "seed": job.seed}
    facts |= {"data": dict(job.data)} | ({"code": dict(job.code)} if job.code else {})
    del facts["per_device_batch_size"]  # it depends on the devices; what counts is how many rows there were
    return dict(json.loads(json.dumps(facts)))

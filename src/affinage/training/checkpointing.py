"""The checkpoints of a training: what is saved when, what a run resumes from, and what it refuses to resume from."""

import datetime
import json
import shutil
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.metadata import IDENTITY, check_compatible, checksums
from affinage.checkpoint.store import CHECKPOINTS, IO_TIMEOUT
from affinage.cluster.processes import Processes
from affinage.errors import UserError
from affinage.training.frozen import FROZEN, kept_frozen
from affinage.training.goodput import GoodputTimer
from affinage.training.health import HealthMonitor
from affinage.training.job import Extension
from affinage.training.metrics import METRICS
from affinage.training.state import TrainState
from affinage.training.summary import versions
from affinage.training.trainer import Trainer

_BY_CLOCK = 10  # steps: several processes must agree on what the clock says, which costs a message
# What an extension may change. Of `mixture`, only what holds from its first step on.
_OPEN = ("steps", "schedule", "mixture")
_NO_MIXTURE: list[dict[str, Any]] = [{"from_step": 0, "weights": {"all": 1.0}}]


class Restored(NamedTuple):
    """A state, the steps that it has made, and the facts that were saved with it."""

    step: int
    state: TrainState
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores the state of a training, in all processes alike."""

    def __init__(self, trainer: Trainer, goodput: GoodputTimer) -> None:
        self._trainer, self._job, self._goodput = trainer, trainer.job, goodput
        self._settings = self._job.runtime.checkpoint
        self._store = self._job.store or CheckpointStore(
            self._job.folder / CHECKPOINTS,
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
            saved=self._job.uploader.saved if self._job.uploader is not None else lambda: None,
        )
        self.resumed_at: list[int] = []  # the steps at which the starts of this run began, except the first
        self._saved_at = time.monotonic()

    @property
    def seconds_to_restore(self) -> float:
        """Seconds in which all checkpoints are tried, one after another."""
        return (2 + len(self._store.steps())) * IO_TIMEOUT

    def restore(self, at_most: int | None = None) -> Restored:
        """The newest checkpoint that is intact; without any, the one that the job extends, or the first weights.

        With `at_most` the newest up to this step; if there is none, the first one after it.
        """
        job, abstract = self._job, self._trainer.abstract
        resumes = bool(self._store.steps()) or job.extends is not None
        with self._goodput.account("restore" if resumes else "compile"):  # random weights are a program, too
            newest = self._store.restore_newest(abstract.named(), self._accept, at_most)
            if newest is not None:
                step, state, meta = newest
                frozen = kept_frozen(self._store.folder.parent, abstract.frozen)
                restored = Restored(step, TrainState(**state, frozen=frozen), meta)
            else:
                restored = self._extended(job.extends) if job.extends else Restored(0, self._trainer.begin(), {})
                if restored.state.frozen is not None:
                    store = CheckpointStore(self._store.folder.parent / FROZEN)
                    store.save(0, {"params": restored.state.frozen}, {})
                    store.wait()
                checksums(restored.state.named())  # compiled now: the first save may come within a grace period
        if at_most is None:
            self.resumed_at = [*restored.meta.get("resumed_at", []), *([restored.step] if restored.step else [])]
        self._saved_at = time.monotonic()
        return restored

    def rollback(self, at_most: int) -> Restored:
        """Go back to the newest checkpoint up to a step; later ones are removed."""
        with self._goodput.account("restore"):
            self._store.wait()
            restored = self.restore(at_most)
            self._store.forget_after(restored.step)
        self._goodput.lose_since(restored.meta)
        return restored

    def should_save(self, step: int) -> bool:
        """Whether the state after a step is to be saved; the same in all processes. Raises OSError if a save failed."""
        self._store.wait(0)
        settings = self._settings
        if step % settings.every_steps == 0 or step == self._job.settings.steps:
            return True
        if settings.every_minutes is None or (Processes.current.count > 1 and step % _BY_CLOCK):
            return False
        is_old = time.monotonic() - self._saved_at >= 60 * settings.every_minutes
        return bool(Processes.current.broadcast("a save by the clock", is_old))

    def save(self, step: int, state: TrainState, monitor: HealthMonitor) -> None:
        """Start to save the state after a step; waits for the save before."""
        with self._goodput.account("save"):
            facts = {
                "name": self._job.name,
                IDENTITY: identity(self._trainer),
                "mesh": dict(self._trainer.mesh.shape),
                "seconds": self._goodput.seconds(),
                "clock": time.time(),
                "health": monitor.facts(),
                "resumed_at": self.resumed_at,
                "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": versions(),
            }
            self._store.save(step, state.named(), facts)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Until the last save is complete."""
        with self._goodput.account("save"):
            self._store.wait()
            Processes.current.barrier("the last save", seconds=IO_TIMEOUT)

    def close(self) -> None:
        """Wait for the save in flight, which an error in the loop must not take with it."""
        self._store.wait()

    def _accept(self, meta: Mapping[str, Any]) -> None:
        allowed, where = self._settings.allow_changes, str(self._store.folder)
        for name, change in check_compatible(meta, identity(self._trainer), allowed, where=where).items():
            warnings.warn(f"{self._job.name} resumes with another {name}: {change}", CheckpointWarning, stacklevel=2)

    def _extended(self, extension: Extension) -> Restored:
        """The checkpoint of another training; its metrics are copied, so that the curve is complete.

        Raises:
            UserError: there is no such checkpoint, it is corrupted, or more differs than an extension may change.
        """
        job, step, allowed = self._job, extension.step, self._settings.allow_changes
        store, where = CheckpointStore(extension.training / CHECKPOINTS), f"{job.name}.resume_from"
        if step not in store.steps():
            raise UserError(f"there is no checkpoint of step {step}; kept are {store.steps()}", where=where)
        if job.settings.steps <= step:
            fix = f"Set {job.name}.steps to more than {step}."
            raise UserError(f"it has made {step} of the {job.settings.steps} steps", where=where, fix=fix)
        meta, now = store.metadata(step).facts, identity(self._trainer)
        if IDENTITY in meta and "mixture" not in allowed:
            # Rows are drawn by counting from step 0: what was drawn before must be what was trained on.
            mixtures = ([dict(part) for part in facts.get("mixture") or _NO_MIXTURE] for facts in (meta[IDENTITY], now))
            before, after = ([part for part in mixture if part["from_step"] < step] for mixture in mixtures)
            if before != after:
                fix = f"Write what was trained on, too: {json.dumps(before)}, and then what follows from step {step}."
                raise UserError(f"the mixture before step {step} is another one", where=f"{job.name}.mixture", fix=fix)
        check_compatible(meta, now, (*allowed, *_OPEN), where=str(store.folder))
        frozen = kept_frozen(extension.training, self._trainer.abstract.frozen)
        state = TrainState(**store.restore(step, self._trainer.abstract.named()), frozen=frozen)
        lines, own = extension.training / METRICS, job.folder / METRICS
        if Processes.current.first and lines.is_file() and not own.exists():
            part = own.with_suffix(".part")
            shutil.copyfile(lines, part)
            part.replace(own)
        # The time between the two belongs to neither.
        return Restored(step, state, {name: fact for name, fact in meta.items() if name != "clock"})


def identity(trainer: Trainer) -> dict[str, Any]:
    """What decides about the numbers of a run, as JSON: model, settings, seed, batch size, data, plug-ins' code."""
    job = trainer.job
    facts = {
        **job.settings.deciding(),
        "batch_size": trainer.rows,
        "model": job.graph.to_dict(),
        "seed": job.seed,
        "data": dict(job.data),
    }
    if job.code:
        facts["code"] = dict(job.code)
    del facts["per_device_batch_size"]  # it depends on the devices; what counts is how many rows there were
    return dict(json.loads(json.dumps(facts)))

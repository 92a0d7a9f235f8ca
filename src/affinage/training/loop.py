"""A training run from top to bottom: resume, step, log, validate, checkpoint, finish."""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.facts import refuse_changes
from affinage.errors import Preempted
from affinage.hardware.devices import acquire
from affinage.parallel import make_mesh
from affinage.training.job import HostBatch, TrainJob
from affinage.training.ledger import Ledger
from affinage.training.metrics import MetricsLog
from affinage.training.program import Program
from affinage.training.progress import StepDisplay
from affinage.training.reporter import Reporter
from affinage.training.saving import SaveRhythm
from affinage.training.signals import StopRequest
from affinage.training.state import TrainState
from affinage.training.summary import checkpoint_meta, identity, summarize
from affinage.training.validation import validate


def train(job: TrainJob) -> dict[str, Any]:
    """Train until the settings' last step, going on from the newest checkpoint in the job's folder if there is one.

    A run that was killed at any moment and started again ends, on the same mesh, with the same weights bit for bit as
    one that was not: the state is saved whole or not at all, and everything else is a function of seed and step.

    Returns:
        The summary, also written to summary.json when all else is done.

    Raises:
        Preempted: after SIGTERM or SIGINT, when everything done so far is saved.
        UserError: where settings, mesh and model do not fit together.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    settings, steps, ledger = job.settings, job.settings.steps, Ledger()
    with contextlib.ExitStack() as cleanup:
        stop = cleanup.enter_context(StopRequest(job.name, grace=settings.survival.grace_seconds))

        # ---- the program ----
        mesh = make_mesh(job.mesh, acquire())
        program = Program(job, mesh, next(job.feed.iterate(0)))
        with ledger.account("compile"):
            train_step = program.compile_training()
            run_validation = _compiled_validation(program, stop)

        # ---- where it begins: the newest checkpoint, or step 0 ----
        keep = settings.checkpoint
        store = CheckpointStore(job.folder / "checkpoints", keep_last=keep.keep_last, keep_every=keep.keep_every)
        with ledger.account("restore" if store.steps() else "compile"):  # random weights are a program, too
            start, state, meta = _resume_or_begin(program, store)
        rhythm = SaveRhythm(keep, steps)
        ledger.carry(meta.get("seconds", {}))
        resumed_at = [*meta.get("resumed_at", []), *([start] if start else [])]
        metrics = cleanup.enter_context(contextlib.closing(MetricsLog(job.folder / "metrics.jsonl", start)))
        display = cleanup.enter_context(StepDisplay(job.name, steps, start))
        report = Reporter(program, metrics, display, ledger, start)
        if start:
            display.say(f"goes on from the checkpoint at step {start:,}")
        if start and _due(start, settings.validate_every, steps) and metrics.validation(start) is None:
            report.validation(start, run_validation(state))  # the stop came before it was done

        ended = ""
        if job.judge is not None and job.judge.due(start):
            with ledger.account("validation"):
                ended = job.judge.look(start, state)
            report.restart_clock()

        stop.something_to_lose()
        if stop:
            raise Preempted(f"{job.name} stopped by {stop.signal_name} before a new step; nothing to save")

        # ---- the steps ----
        batches = job.feed.iterate(start)
        batch = program.put(next(batches)) if start < steps else None
        last = start
        for step in range(start + 1, steps + 1 if not ended else start + 1):
            state, step_metrics = train_step(state, batch)
            upcoming, waited = _next(batches)  # while the devices compute
            batch = program.put(upcoming)
            report.training(step, step_metrics, waited)
            for hook in job.on_step:
                hook(step, state)
            last = step

            if job.judge is not None and job.judge.due(step):
                report.drain()
                with ledger.account("validation"):
                    ended = job.judge.look(step, state)
                report.restart_clock()

            if ended or _due(step, settings.validate_every, steps):
                report.drain()
                with ledger.account("validation"):
                    report.validation(step, run_validation(state))

            if stop or ended or rhythm.due(step):
                # First every line up to here: what a resumed run does not compute again must be in the file.
                report.drain()
                with ledger.account("save"):
                    facts = checkpoint_meta(program, ledger, resumed_at)
                    store.save(step, state.named(), facts)
                rhythm.saved()
                report.restart_clock()

            if stop:
                with ledger.account("save"):
                    store.wait()
                display.say(f"{stop.signal_name}: saved at step {step:,}; start it again to go on")
                raise Preempted(f"{job.name} stopped by {stop.signal_name} at step {step}")
            if ended:
                display.say(f"ends at step {step:,}: {ended}")
                break

        # ---- the end ----
        with ledger.account("save"):
            store.wait()
        summary = summarize(program, metrics, ledger, resumed_at, last) | ({"ended": ended} if ended else {})
        written = job.folder / "summary.json.part"
        written.write_text(json.dumps(summary, indent=1))
        written.replace(job.folder / "summary.json")
        if stop:
            raise Preempted(f"{job.name} stopped by {stop.signal_name} when it was done")
    return summary


def _next(batches: Iterator[HostBatch]) -> tuple[HostBatch, float]:
    """The next batch, and for how many seconds it was waited for."""
    asked = time.perf_counter()
    batch = next(batches)
    return batch, time.perf_counter() - asked


def _due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def _resume_or_begin(program: Program, store: CheckpointStore) -> tuple[int, TrainState, dict[str, Any]]:
    job = program.job

    def accept(meta: Mapping[str, Any]) -> None:
        setting = f"{job.name}.checkpoint.accept_changes"
        accepted, where = job.settings.checkpoint.accept_changes, str(store.folder)
        for change in refuse_changes(meta, identity(program), accepted, where=where, setting=setting):
            warnings.warn(f"{job.name} goes on with another {change}", CheckpointWarning, stacklevel=2)

    newest = store.restore_newest(program.abstract.named(), accept)
    if newest is None:
        return 0, program.begin(), {}
    step, state, meta = newest
    return step, TrainState(**state), meta


def _compiled_validation(
    program: Program, stop: StopRequest
) -> Callable[[TrainState], dict[str, dict[str, float]] | None]:
    """A function from the state to the scores of all validation sets."""
    sets = program.job.validation
    if not sets:
        return lambda state: None
    step = program.compile_validation(next(iter(next(iter(sets.values())))))
    return lambda state: validate(
        (state.params, state.averages), sets, step=step, put=program.put, stop=lambda: bool(stop)
    )

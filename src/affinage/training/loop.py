"""A training run from top to bottom: resume, step, log, validate, checkpoint, finish."""

import contextlib
import gc
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.compatibility import check_compatible
from affinage.checkpoint.store import seconds_at_most
from affinage.checkpoint.uploader import Uploader
from affinage.cluster.processes import Processes
from affinage.errors import Preempted, UserError
from affinage.hardware.devices import give_back_freed_memory
from affinage.parallel import make_mesh
from affinage.tracking import TrackedRun, Trackers
from affinage.training.diagnosis import diagnose
from affinage.training.examination import Examination
from affinage.training.extension import begin_extended
from affinage.training.frozen import keep_frozen, kept_frozen
from affinage.training.health import Health, Incurable
from affinage.training.job import Checkpoints, HostBatch, TrainJob
from affinage.training.ledger import Ledger, LifeSign
from affinage.training.metrics import MetricsLog
from affinage.training.preemption import PreemptionGuard
from affinage.training.program import Program
from affinage.training.progress import StepDisplay
from affinage.training.reporter import Reporter
from affinage.training.saving import SaveRhythm
from affinage.training.state import TrainState
from affinage.training.summary import check_carried, checkpoint_meta, facts_for_trackers, identity, summarize
from affinage.training.tracing import Tracing
from affinage.training.watchdog import Watchdog

_TO_LEAVE = 2.0  # seconds of the grace period that are kept for the end
_COMPILATION = 3600  # seconds that it may take, and that one process may take longer than another
_COPY = 86400  # seconds: the copy gives up by itself
_FIRST = 3  # steps that leave holes between what they keep; later ones find their buffers' places again


def train(job: TrainJob) -> dict[str, Any]:
    """Train until the settings' last step, going on from the newest checkpoint in the job's folder if there is one.

    A run that was killed at any moment and started again ends, on the same mesh, with the same weights bit for bit as
    one that was not: the state is saved whole or not at all, and everything else is a function of seed and step.

    Of many hosts each calls it with the same job and folder. They stop, judge and go back at the same steps; the first
    one writes what is not the state.

    Returns:
        The summary, also written to summary.json when all else is done.

    Raises:
        Preempted: after SIGTERM or SIGINT, when everything done so far is saved.
        UserError: where settings, mesh and model do not fit together, and where too many updates were left out.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    settings, steps, ledger, processes = job.settings, job.settings.steps, Ledger(), Processes.current
    written = job.folder if processes.first else None
    life = LifeSign(written and written / "alive")
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(processes.all_at_work())
        stop = cleanup.enter_context(PreemptionGuard(job.name, grace=job.runtime.preemption_grace))
        watchdog = cleanup.enter_context(Watchdog(job.name, job.folder, job.runtime, life.show))

        # ---- the program ----
        cleanup.callback(job.hardware.release)
        mesh = make_mesh(job.mesh, job.hardware.acquire())
        program = Program(job, mesh, next(job.feed.iterate(0)))
        watchdog.beat("the compilation", at_most=_COMPILATION)
        with ledger.account("compile"):
            train_step = program.compile_training()
            examination = Examination(program, stop, watchdog)
            watchdog.beat("the end of the compilation", at_most=2 * _COMPILATION)
            processes.barrier("the end of the compilation", seconds=_COMPILATION)

        # ---- where it begins: the newest checkpoint, or step 0 ----
        keep, uploader = job.runtime.checkpoint, job.uploader if processes.first else None
        if uploader is not None:
            cleanup.enter_context(uploader)  # says where nobody can be reached
        store = job.store or CheckpointStore(
            job.folder / "checkpoints", keep_last=keep.keep_last, keep_every=keep.keep_every, uploader=uploader
        )
        cleanup.callback(store.wait)  # an error in the loop does not take the save in flight with it
        goes_on, one_pass = store.steps() or job.extends, seconds_at_most(program.abstract)
        # Each checkpoint that is there may be read in vain before one is restored.
        to_restore = (2 + len(store.steps())) * one_pass
        watchdog.beat("the restore" if goes_on else "the first weights", at_most=to_restore)
        with ledger.account("restore" if goes_on else "compile"):  # random weights are a program, too
            start, state, meta = _resume_or_begin(program, store)
        ledger.carry(meta.get("seconds", {}), meta.get("stalls", []))
        life.book(ledger, meta.get("clock"))
        resumed_at = [*meta.get("resumed_at", []), *([start] if start else [])]
        metrics = MetricsLog(written and written / "metrics.jsonl", start)
        cleanup.callback(metrics.close)
        display = cleanup.enter_context(StepDisplay(job.name, steps, start, shown=processes.first))
        if uploader is not None:
            uploader.say = display.say
        if job.judge is not None:
            job.judge.say = display.say
        if job.benchmarks is not None:
            job.benchmarks.say = display.say
        health = Health(settings.health, written, start, meta.get("health", {}), job.documents, display.say)
        tracked = TrackedRun(job.name, start=start, facts=facts_for_trackers(program))
        trackers = cleanup.enter_context(
            Trackers(
                job.trackers if processes.first else {},
                tracked,
                job.folder,
                before=metrics.rows,
                say=display.say,
                close_seconds=job.close_trackers_within,
            )
        )
        report = Reporter(program, metrics, display, ledger, health, start, trackers)
        if start:
            display.say(f"goes on from the checkpoint at step {start:,}")
        watchdog.beat("its first look", at_most=_COMPILATION)
        processes.barrier("its first look", seconds=one_pass)  # the first may have frozen weights to seal
        ended = ""
        if job.judge is not None and job.judge.due(start):
            with ledger.account("validation"):
                ended = job.judge.look(start, state, examination.asked_to_stop)
            report.restart_clock()
        if processes.broadcast("a look that was missed", examination.left_over(start, metrics, last=bool(ended))):
            with ledger.account("validation"):
                examination.look(start, state, report)

        watchdog.beat("the way to the first step", at_most=_COMPILATION)
        processes.barrier("the first step")
        stop.steps_to_lose()
        if stop.reached():
            raise Preempted(f"{job.name} stopped by {stop.signal_name} before a new step; nothing to save")

        # ---- the steps ----
        gc.collect()
        gc.freeze()  # 200,000 objects of JAX and Orbax live until the end: a full collection looks at them for 0.1 s
        cleanup.callback(gc.unfreeze)
        cleanup.enter_context(ledger.account("compute"))
        rhythm, tracing = SaveRhythm(keep, steps), Tracing(job.runtime.profiled, job.folder)
        profile, profiled = job.runtime.profile, job.runtime.profiled
        if profiled is not None and profiled[0] > steps:
            display.say(f"profile: {profile} begins after the last of {steps:,} steps: nothing is traced")
        elif profiled is not None and profiled[1] <= start:
            display.say(f"profile: {profile} ends before step {start + 1:,}, the next one: nothing is traced")
        cleanup.callback(tracing.close)
        batches, step = program.batches(start), start
        batch = program.put_share(next(batches)) if start < steps else None
        while step < steps and not ended:
            step += 1
            watchdog.step(step, at_most=program.slowest_step)
            try:
                if step in health.left_out:
                    state, batch = program.pass_over(state), program.put_share(next(batches))
                else:
                    with tracing.step(step):
                        state, step_metrics = train_step(state, batch)
                    tracing.dispatched(step, step_metrics)
                    report.dispatched(step, step_metrics)
                    upcoming, waited = _next(batches)  # while the devices compute
                    batch = program.put_share(upcoming)
                    report.training(step, step_metrics, waited)
                    if step <= start + _FIRST:
                        give_back_freed_memory()
                for hook in job.on_step:
                    hook(step, state)
                stopping, judging = stop.reached(), job.judge is not None and job.judge.due(step)
                examining, saving = examination.due(step), stopping or rhythm.due(step)
                if judging or examining or saving:
                    # Every line up to here: what a resumed run does not compute again must be in the file.
                    report.drain()
            except Incurable as end:
                raise _diagnosed(program, state, end) from end

            if health.rewind_from is not None:
                watchdog.beat("going back", at_most=one_pass + to_restore)
                step, state = _go_back(program, store, ledger, report, health)
                batches = program.batches(step)
                batch = program.put_share(next(batches))
                continue

            if judging and job.judge is not None and not stopping:
                watchdog.beat("a look at the benchmarks", at_most=_COMPILATION)
                with ledger.account("validation"):
                    ended = job.judge.look(step, state, examination.asked_to_stop)
                report.restart_clock()
                stopping = stop.reached()  # it may have been given up, too

            if ended or examining:
                watchdog.beat("the validation", at_most=_COMPILATION)
                with ledger.account("validation"):
                    examination.look(step, state, report)
                stopping = stop.reached() or stopping  # it may have been given up: done again from this step

            if stopping and stop.by_hand:
                display.say(f"{stop.signal_name}: saves step {step:,}; Ctrl-C once more leaves without it")
            if stopping or ended or saving:
                watchdog.beat("the save", at_most=one_pass)  # it waits for the one before
                with ledger.stall():
                    store.save(step, state.named(), checkpoint_meta(program, ledger, health, resumed_at))
                rhythm.saved()
                report.restart_clock()

            if stopping:
                with ledger.account("save"):
                    store.wait()
                    processes.barrier("the last save", seconds=one_pass)  # the first seals it
                display.say(f"{stop.signal_name}: saved at step {step:,}; start it again to go on")
                if job.uploader is not None:
                    display.say(_copied(job.uploader, watchdog, stop))
                raise Preempted(f"{job.name} stopped by {stop.signal_name} at step {step}")

        # ---- the end ----
        if ended:
            display.say(f"ends at step {step:,}: {ended}")
        watchdog.beat("the last save", at_most=one_pass)
        with ledger.account("save"):
            store.wait()
            processes.barrier("the last save", seconds=one_pass)
        summary = summarize(program, metrics, ledger, health, resumed_at, step) | ({"ended": ended} if ended else {})
        if written is not None:
            part = written / "summary.json.part"
            part.write_text(json.dumps(summary, indent=1))
            part.replace(written / "summary.json")
        if job.uploader is not None:
            display.say(_copied(job.uploader, watchdog, stop))
    return summary


def _copied(uploader: Uploader, watchdog: Watchdog, stop: PreemptionGuard) -> str:
    """Wait until the last save is copied; in words what became of it.

    The first host copies; the others wait for it, as long as it shows that it is alive.
    """
    processes = Processes.current
    watchdog.beat("the copy of the last save", at_most=_COPY)

    def seconds_left() -> float | None:
        left = stop.seconds_left()
        return None if left is None else left - _TO_LEAVE

    missing = uploader.settle(seconds_left) if processes.first else ""
    newest = uploader.newest
    said = f"copied to {uploader.url}"
    if missing:
        there = "no checkpoint is there" if newest is None else f"the newest checkpoint there is of step {newest:,}"
        said = f"NOT all was copied to {uploader.url}: {missing}; {there}"
    return str(processes.broadcast("the copy of the last save", said, seconds=None))


def _next(batches: Iterator[HostBatch]) -> tuple[HostBatch, float]:
    """The next batch, and for how many seconds it was waited for."""
    asked = time.perf_counter()
    batch = next(batches)
    return batch, time.perf_counter() - asked


class _Beginning(NamedTuple):
    step: int
    state: TrainState
    meta: dict[str, Any]


def _resume_or_begin(program: Program, store: Checkpoints, at_most: int | None = None) -> _Beginning:
    job = program.job

    def accept(meta: Mapping[str, Any]) -> None:
        check_carried(meta)
        allowed, where = job.runtime.checkpoint.allow_changes, str(job.folder / "checkpoints")
        for change in check_compatible(meta, identity(program), allowed, where=where):
            warnings.warn(f"{job.name} goes on with another {change}", CheckpointWarning, stacklevel=2)

    newest = store.restore_newest(program.abstract.named(), accept, at_most)
    if newest is None and job.extends is not None:
        extended = _Beginning(*begin_extended(program, job.extends))
        keep_frozen(job.folder, extended.state.frozen)
        return extended
    if newest is None:
        begun = program.begin()
        keep_frozen(job.folder, begun.frozen)
        return _Beginning(0, begun, {})
    step, state, meta = newest
    return _Beginning(step, TrainState(**state, frozen=kept_frozen(job.folder, program.abstract.frozen)), meta)


def _go_back(
    program: Program, store: Checkpoints, ledger: Ledger, report: Reporter, health: Health
) -> tuple[int, TrainState]:
    """Step and state of the newest checkpoint that no batch which is to be left out has a part in, if there is one.

    What was done since is lost, with the checkpoints of it, and forgotten but for the sick step.
    """
    with ledger.account("restore"):
        store.wait()
        step, state, meta = _resume_or_begin(program, store, health.last_sound)
        store.forget_after(step)
    ledger.lose_since(meta.get("seconds", {}))
    report.rewind(step)
    health.rewound(step)
    return step, state


def _diagnosed(program: Program, state: TrainState, end: Incurable) -> UserError:
    """What the user is told when too many updates were left out; also in diagnosis.json."""
    job = program.job
    held, call = program.held, program.call
    batch = program.put_share(next(program.batches(end.step - 1)))
    if held.reference:
        batch = jax.jit(lambda frozen, batch: held.with_reference(frozen, batch, call))(state.frozen, batch)
    found = {
        "step": end.step,
        **diagnose(job.graph, call, held.whole(state.params, state.frozen), state.averages, batch),
        "learning_rate": program.learning_rate(end.step),
        "documents": None if job.documents is None else job.documents(end.step),
    }
    if Processes.current.first:
        (job.folder / "diagnosis.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return end.told(job.folder, found)

"""A training from top to bottom: restore, step, log, evaluate, save, finish."""

import contextlib
import gc
import json
import time
from typing import Any

from affinage.checkpoint.store import IO_TIMEOUT
from affinage.cluster.processes import Processes
from affinage.errors import Preempted
from affinage.parallel import make_mesh
from affinage.tracking import TrackedRun, Trackers
from affinage.training.checkpointing import Checkpointer
from affinage.training.evaluator import Evaluator
from affinage.training.goodput import GoodputTimer
from affinage.training.health import HealthMonitor, TrainingDiverged, explain
from affinage.training.job import TrainJob
from affinage.training.metrics import METRICS, ConsoleWriter, MetricLogger
from affinage.training.preemption import PreemptionGuard
from affinage.training.profiler import Profiler
from affinage.training.summary import facts_for_trackers, summarize
from affinage.training.trainer import Trainer
from affinage.training.watchdog import Watchdog

_HOUR = 3600.0  # seconds that a compilation may take, and that one process may take longer than another


def train(job: TrainJob) -> dict[str, Any]:
    """Train until the settings' last step, from the newest checkpoint in the job's folder if there is one.

    A run that was killed at any moment and started again ends, on the same mesh, with the same weights bit for bit as
    one that was not: the state is saved completely or not at all, and everything else is a function of seed and step.
    All processes of a run call it with the same job and folder; the first one writes what is not the state.

    Returns:
        The summary, also written to summary.json when all else is done.

    Raises:
        Preempted: after SIGTERM or SIGINT, when everything done so far is saved.
        UserError: settings, mesh and model do not fit together, or too many updates were skipped.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    steps, processes = job.settings.steps, Processes.current
    own_folder = job.folder if processes.first else None
    goodput = GoodputTimer(job.folder / METRICS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.all_at_work())
        preemption = stack.enter_context(PreemptionGuard(job.name, grace=job.runtime.preemption_grace))
        watchdog = Watchdog(job.name, job.folder, job.runtime, preemption.leave_if_too_late)
        stack.enter_context(watchdog)

        # ---- devices and compiled functions ----
        stack.callback(job.hardware.release)
        trainer = Trainer(job, make_mesh(job.mesh, job.hardware.acquire()), next(job.feed.iterate(0)))
        watchdog.beat("the compilation", at_most=2 * _HOUR)
        with goodput.account("compile"):
            train_step = trainer.compile_training()
            evaluator = Evaluator(trainer, preemption, watchdog, goodput)
            processes.barrier("the end of the compilation", seconds=_HOUR)

        # ---- the newest checkpoint, or the first weights ----
        if job.uploader is not None and processes.first:
            job.uploader.start()
        checkpointer = Checkpointer(trainer, goodput)
        stack.callback(checkpointer.close)
        watchdog.beat("the restore", at_most=checkpointer.seconds_to_restore)
        start, state, meta = checkpointer.restore()
        goodput.resume(meta)

        # ---- who learns of steps ----
        console = stack.enter_context(ConsoleWriter(job.name, steps, start, shown=processes.first))
        for part in (job.uploader, job.monitor):
            if part is not None:
                part.say = console.say
        run = TrackedRun(job.name, start=start, facts=facts_for_trackers(trainer))
        makers, seconds = job.trackers if processes.first else {}, job.close_trackers_within
        trackers = stack.enter_context(Trackers(makers, run, job.folder, say=console.say, close_seconds=seconds))
        logger = MetricLogger(trainer, goodput, start, trackers, console)
        stack.callback(logger.close)
        health = meta.get("health", {})
        monitor = HealthMonitor(job.settings.health, own_folder, start, health, job.documents, console.say)
        profiler = Profiler(job.runtime.profiled, job.folder)
        stack.callback(profiler.close)
        if start:
            console.say(f"resuming from checkpoint {start:,}")
        watchdog.beat("the evaluation", at_most=_HOUR)
        why_ended = evaluator(start, state, logger, resumed=True)
        processes.barrier("the first step", seconds=IO_TIMEOUT)
        preemption.steps_to_lose()
        if preemption.reached():
            raise Preempted(f"{job.name} stopped by {preemption.signal_name} before a new step; nothing to save")

        # ---- the steps ----
        gc.collect()
        gc.freeze()  # 200,000 objects of JAX and Orbax live until the end: a full collection looks at them for 0.1 s
        stack.callback(gc.unfreeze)
        stack.enter_context(goodput.account("compute"))
        step, batches = start, trainer.batches(start + monitor.data_offset)
        batch = trainer.put_share(next(batches)) if step < steps else None
        while step < steps and not why_ended:
            step += 1
            watchdog.step(step)
            with profiler.step(step):
                state, metrics = train_step(state, batch)
            profiler.dispatched(step, metrics)
            waits_since = time.perf_counter()
            host_batch = next(batches)  # while the devices compute
            data_time = time.perf_counter() - waits_since
            batch = trainer.put_share(host_batch)
            try:
                for done, values in logger.log(step, metrics, data_time):
                    monitor.update(done, values)
                for hook in job.on_step:
                    hook(step, state)
                stopping, evaluating = preemption.reached(), evaluator.due(step)
                saving = checkpointer.should_save(step) or stopping
                if saving or evaluating:  # every line up to here: a resumed run does not compute these steps again
                    for done, values in logger.drain():
                        monitor.update(done, values)
            except TrainingDiverged as error:
                raise explain(trainer, state, error, monitor.data_offset) from error

            if monitor.rollback_from is not None:
                watchdog.beat("the rollback", at_most=IO_TIMEOUT + checkpointer.seconds_to_restore)
                step, state, _ = checkpointer.rollback(monitor.last_healthy)
                monitor.rolled_back(step)
                logger.cut(step)
                batches = trainer.batches(step + monitor.data_offset)
                batch = trainer.put_share(next(batches))
                continue

            if evaluating and not stopping:
                watchdog.beat("the evaluation", at_most=_HOUR)
                why_ended = evaluator(step, state, logger)
                stopping = preemption.reached()  # then it was interrupted, and is repeated from this step
            if saving or stopping or why_ended:
                if stopping and preemption.by_hand:
                    console.say(f"{preemption.signal_name}: saving step {step:,}; Ctrl-C again leaves without it")
                watchdog.beat("the save", at_most=IO_TIMEOUT)  # it waits for the one before
                logger.check_folder()
                checkpointer.save(step, state, monitor)
                logger.restart_clock()
            if stopping:
                checkpointer.wait()
                console.say(f"{preemption.signal_name}: saved at step {step:,}; start it again to continue")
                _finish_upload(job, watchdog, preemption, console)
                raise Preempted(f"{job.name} stopped by {preemption.signal_name} at step {step}")

        # ---- the end ----
        if why_ended:
            console.say(f"ends at step {step:,}: {why_ended}")
        watchdog.beat("the last save", at_most=IO_TIMEOUT)
        checkpointer.wait()
        summary = summarize(trainer, goodput, monitor, checkpointer.resumed_at, step, "monitor" if why_ended else "")
        if own_folder is not None:
            logger.check_folder()
            part_file = own_folder / "summary.json.part"
            part_file.write_text(json.dumps(summary, indent=1), encoding="utf-8")
            part_file.replace(own_folder / "summary.json")
        _finish_upload(job, watchdog, preemption, console)
    return summary


def _finish_upload(job: TrainJob, watchdog: Watchdog, preemption: PreemptionGuard, console: ConsoleWriter) -> None:
    """Wait until the last save is copied, and print what became of it. The first process copies for all."""
    if job.uploader is not None:
        watchdog.beat("the copy of the last save", at_most=24 * _HOUR)  # a copy that fails ends by itself
        missing = job.uploader.settle(preemption.seconds_left) if Processes.current.first else ""
        line = f"NOT everything was copied to {job.uploader.url}: {missing}" if missing else "the last save is copied"
        console.say(str(Processes.current.broadcast("the copy of the last save", line, seconds=None)))

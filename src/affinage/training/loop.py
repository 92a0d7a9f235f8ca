"""A training from top to bottom: restore, step, log, evaluate, save, finish."""

import contextlib
import gc
import time
from typing import Any

from affinage.checkpoint.store import IO_TIMEOUT
from affinage.cluster.processes import Processes
from affinage.errors import Preempted
from affinage.parallel.sharding import make_mesh
from affinage.training.checkpointing import Checkpointer
from affinage.training.evaluator import Evaluator
from affinage.training.health import HealthMonitor, TrainingDiverged, explain
from affinage.training.metrics import METRICS, ConsoleWriter, GoodputTimer, MetricLogger, Profiler, write_summary
from affinage.training.trainer import Trainer, TrainJob
from affinage.training.watchdog import Watchdog

_HOUR = 3600.0  # seconds that a compilation may take, and that one process may take longer than another


def train(job: TrainJob) -> dict[str, Any]:
    """Train until the settings' last step, from the newest checkpoint in the job's folder if there is one.

    A run that was killed at any moment and started again ends, on the same mesh, with the same weights bit for bit as
    one that was not: the state is saved completely or not at all, and everything else is a function of seed, step and
    the number of batches that rollbacks have left out, which is saved with it. All processes of a run call it with the
    same job and folder; the first one writes what is not the state.

    Returns:
        The summary, also written to summary.json when all else is done.

    Raises:
        Preempted: after SIGTERM or SIGINT, when everything done so far is saved.
        UserError: settings, mesh and model do not fit together, or too many updates were skipped.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    steps, processes, goodput = job.settings.steps, Processes.current, GoodputTimer(job.folder / METRICS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.all_at_work())
        watchdog = stack.enter_context(Watchdog(job.name, job.folder, job.runtime))

        # ---- devices and compiled functions ----
        stack.callback(job.hardware.release)
        trainer = Trainer(job, make_mesh(job.mesh, job.hardware.acquire()), next(job.feed.iterate(0)))
        watchdog.beat("the compilation", at_most=2 * _HOUR)
        with goodput.account("compile"):
            train_step = trainer.compile_training()
            evaluator = Evaluator(trainer, watchdog, goodput)
            processes.barrier("the end of the compilation", seconds=_HOUR)

        # ---- the newest checkpoint, or the first weights ----
        checkpointer = stack.enter_context(Checkpointer(trainer, goodput, watchdog))
        start, state, meta = checkpointer.restore()
        goodput.resume(meta)

        # ---- who learns of steps ----
        console = ConsoleWriter(job.name, steps, start, shown=processes.first)
        for part in (job.uploader, job.monitor):
            if part is not None:
                part.say = console.say
        logger = stack.enter_context(MetricLogger(trainer, goodput, start, console))
        own_folder = job.folder if processes.first else None
        monitor = HealthMonitor(job.settings.health, own_folder, start, meta.get("health", {}), console.say)
        profiler = Profiler(job.runtime.profile, job.folder)
        stack.callback(profiler.end)
        if start:
            console.say(f"resuming from checkpoint {start:,}")
        why_ended = evaluator(start, state, logger, resumed=True)
        processes.barrier("the first step", seconds=IO_TIMEOUT)
        watchdog.steps_to_lose = True
        if watchdog.reached():
            raise Preempted(f"{job.name} stopped by {watchdog.signal_name} before a new step; nothing to save")

        # ---- the steps ----
        gc.collect()
        gc.freeze()  # 200,000 objects of JAX and Orbax live until the end: a full collection looks at them for 0.1 s
        stack.callback(gc.unfreeze)
        stack.enter_context(goodput.account("compute"))
        step = start  # the last step that was made
        batches = trainer.batches(monitor.batch_after(step))
        while step < steps and not why_ended:
            step += 1
            watchdog.step(step)
            waits_since = time.perf_counter()
            host_batch = next(batches)  # while the devices compute the steps before
            data_time = time.perf_counter() - waits_since
            with profiler.step(step):
                state, metrics = train_step(state, trainer.put(host_batch, trainer.rows))
            profiler.end(step, metrics)
            unhealthy = logger.log(step, metrics, data_time)
            for hook in job.on_step:
                hook(step, state)
            stopping, evaluating = watchdog.reached(), evaluator.due(step)
            saving = checkpointer.should_save(step) or stopping
            if saving or evaluating:  # every line up to here: a resumed run does not compute these steps again
                unhealthy += logger.drain()
            try:
                for done, values in unhealthy:
                    monitor.update(done, values)
            except TrainingDiverged as error:
                raise explain(trainer, state, error, done, monitor.batch_after(done - 1)) from error

            if monitor.rollback_from is not None:
                step, state, _ = checkpointer.rollback(before=monitor.rollback_from)
                monitor.rolled_back(step)
                logger.cut(step)
                if job.monitor is not None:
                    job.monitor.rolled_back(step, state)
                batches = trainer.batches(monitor.batch_after(step))
                continue
            if evaluating and not stopping:
                why_ended = evaluator(step, state, logger)
                stopping = watchdog.reached()  # then it was interrupted, and is repeated from this step
            if saving or stopping or why_ended:
                if stopping:
                    again = "; a second Ctrl-C leaves without it" if watchdog.signal_name == "SIGINT" else ""
                    console.say(f"{watchdog.signal_name}: saving step {step:,}{again}")
                checkpointer.save(step, state, monitor.facts())
                logger.restart_clock()
            if stopping:
                checkpointer.wait()
                console.say(f"{watchdog.signal_name}: saved at step {step:,}; start it again to continue")
                checkpointer.finish_upload(console)
                raise Preempted(f"{job.name} stopped by {watchdog.signal_name} at step {step}")

        # ---- the end ----
        if why_ended:
            console.say(f"ends at step {step:,}: {why_ended}")
        checkpointer.wait()
        ended = "monitor" if why_ended else ""
        facts = {"health": monitor.facts(), "resumed_at": checkpointer.resumed_at, "ended": ended}
        summary = write_summary(trainer, goodput, step, **facts)
        for name, rise in summary["validation_rise"].items():
            lowest, last = (f"{rise[end]:.4f} at step {rise[f'{end}_step']:,}" for end in ("lowest", "last"))
            console.say(f"the validation loss on {name} has risen from {lowest} to {last}")
        checkpointer.finish_upload(console)
    return summary

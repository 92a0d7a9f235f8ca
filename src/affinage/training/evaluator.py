"""Scores of a model while it is trained: its loss on held-out text, benchmarks, and whether they end the training."""

import math
from typing import Any

import jax

from affinage.cluster.processes import Processes
from affinage.results import read_json_lines
from affinage.training.metrics import METRICS, GoodputTimer, MetricLogger
from affinage.training.state import TrainState
from affinage.training.trainer import Trainer
from affinage.training.watchdog import Watchdog

_IN_FLIGHT = 2  # batches, so that the devices never wait for the host
_BENCHMARKS = 3600.0  # seconds until they ask whether to stop: a compilation, or a long answer


class Evaluator:
    """Evaluates the state as often as the job requires. A preemption interrupts it; then it is repeated."""

    def __init__(self, trainer: Trainer, watchdog: Watchdog, goodput: GoodputTimer) -> None:
        self._job, self._trainer, self._watchdog, self._goodput = trainer.job, trainer, watchdog, goodput
        sets = self._job.validation
        self._step: Any = trainer.compile_validation(next(iter(next(iter(sets.values()))))) if sets else None

    def due(self, step: int) -> bool:
        """Whether the state after this step is evaluated."""
        return self._validates(step) or (self._job.monitor is not None and self._job.monitor.due(step))

    def __call__(self, step: int, state: TrainState, logger: MetricLogger, *, resumed: bool = False) -> str:
        """Evaluate the state after a step, write the scores, and return why the training should end here, or "".

        `resumed`: the run begins or resumes here, so what metrics.jsonl has of this step is not repeated.
        """
        written: list[str] = []
        if resumed:
            rows = read_json_lines(self._job.folder / METRICS)
            written = [name for row in rows if row["step"] == step for name in row]
            written = Processes.current.broadcast("scores that were written", written)
        with self._goodput.account("validation"):
            monitor, evaluation, why = self._job.monitor, None, ""
            self._watchdog.beat("the evaluation", at_most=_BENCHMARKS)
            if monitor is not None and monitor.due(step):
                evaluation, why = monitor.look(step, state, self._stops)
            logger.restart_clock()
            if evaluation is not None and "evaluation" not in written:
                logger.write(step, evaluation=evaluation)
            if "validation" not in written and step > 0 and (why or self._validates(step)):
                validation = self.validate(state)
                if validation:
                    logger.write(step, validation=validation)
        return why

    def validate(self, state: TrainState) -> dict[str, dict[str, float]] | None:
        """Loss in nats per counted token, and bits per byte of text, of every validation set; None if interrupted.

        Bits per byte = total nats / ln 2 / bytes of the text in UTF-8; of rows that are no text what the graph reports.
        """
        weights, scores = (state.params, state.ema_params, state.frozen), dict[str, dict[str, float]]()
        in_flight = 0 if self._trainer.is_simulated else _IN_FLIGHT
        for name, rows in self._job.validation.items():
            sums: list[Any] = []
            for batch in rows:
                self._watchdog.beat("a batch of the validation")
                if self._watchdog.reached():
                    return None
                sums.append(self._step(weights, self._trainer.put(batch)))
                jax.block_until_ready(sums[: len(sums) - in_flight][-1:])
            batches = jax.device_get(sums)
            nats, mean = _total_and_mean([(each["sum"], each["count"]) for each in batches])
            scores[name] = {"loss": mean}
            if rows.bytes:
                scores[name]["bits_per_byte"] = nats / math.log(2) / rows.bytes
            else:
                for metric in batches[0]["metrics"]:
                    scores[name][metric] = _total_and_mean([each["metrics"][metric] for each in batches])[1]
        return scores

    def _stops(self) -> bool:
        """What benchmarks call between their batches, which is a sign of progress."""
        self._watchdog.beat("a batch of the benchmarks", at_most=_BENCHMARKS)
        return self._watchdog.reached()

    def _validates(self, step: int) -> bool:
        return step % self._job.settings.eval_every == 0 or step == self._job.settings.steps


def _total_and_mean(sums: list[tuple[Any, Any]]) -> tuple[float, float]:
    """The sum of (sum, count) of many batches, in float64, and the sum over the count."""
    total, count = (math.fsum(map(float, values)) for values in zip(*sums, strict=True))
    return total, total / max(count, 1.0)

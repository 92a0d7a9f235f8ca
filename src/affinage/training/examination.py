"""What is asked of a model while it is trained: its loss on held-out text, and benchmarks."""

from collections.abc import Callable

from affinage.training.metrics import MetricsLog
from affinage.training.preemption import PreemptionGuard
from affinage.training.program import Program
from affinage.training.reporter import Reporter
from affinage.training.state import TrainState
from affinage.training.validation import validate
from affinage.training.watchdog import Watchdog

Scores = dict[str, dict[str, float]]

_BENCHMARKS = 3600.0  # seconds until they ask whether to stop: a compilation, or a long answer


class Examination:
    """Validates at the job's rhythm, and has its benchmarks scored at theirs."""

    def __init__(self, program: Program, stop: PreemptionGuard, watchdog: Watchdog) -> None:
        self._job, self._stop, self._watchdog = program.job, stop, watchdog
        self._validate = _compiled_validation(program, stop, watchdog)

    def due(self, step: int) -> bool:
        """Whether the state after this step is looked at."""
        return self._validates(step) or self._scores(step)

    def left_over(self, step: int, metrics: MetricsLog, *, last: bool) -> bool:
        """Whether anything is due at the step that a run begins from: what a stop came before, or a beginning.

        It is validated in any case if it is also the `last` one.
        """
        unvalidated = step > 0 and (last or self._validates(step)) and metrics.validation(step) is None
        return unvalidated or (self._scores(step) and not metrics.evaluated(step))

    def look(self, step: int, state: TrainState, report: Reporter) -> None:
        """Write down how the state does. A stop gives it up; it is then done again from this step."""
        validation = self._validate(state)
        report.validation(step, validation)
        if self._job.benchmarks is not None and self._scores(step) and not self._stop.reached():
            scores = self._job.benchmarks.scores(step, state, validation or {}, self.asked_to_stop)
            if scores is not None:
                report.evaluation(step, scores)

    def asked_to_stop(self) -> bool:
        """What benchmarks ask between their batches; that they ask is a sign of progress."""
        self._watchdog.beat("a batch of the benchmarks", at_most=_BENCHMARKS)
        return self._stop.reached()

    def _validates(self, step: int) -> bool:
        return step % self._job.settings.eval_every == 0 or step == self._job.settings.steps

    def _scores(self, step: int) -> bool:
        return self._job.benchmarks is not None and self._job.benchmarks.due(step)


def _compiled_validation(
    program: Program, stop: PreemptionGuard, watchdog: Watchdog
) -> Callable[[TrainState], Scores | None]:
    """A function from the state to the scores of all validation sets."""
    sets = program.job.validation
    if not sets:
        return lambda state: None
    step = program.compile_validation(next(iter(next(iter(sets.values())))))

    def asked_to_stop() -> bool:
        watchdog.beat("a batch of the validation")
        return stop.reached()

    return lambda state: validate(
        (state.params, state.averages, state.frozen), sets, step=step, put=program.put, stop=asked_to_stop
    )

"""What `num_epochs` does to the steps of a tuning, as far as it can be said before conversations are packed."""

from affinage.config.training import TrainSettings
from affinage.config.tuning import TuningSettings


def epoch_guard(settings: TrainSettings, rows: int, context: int, found: int | None) -> str:
    """In words: where `num_epochs` ends a training before its steps; "" where there is none, or it does not.

    Args:
        settings: of a training; those of tunings alone can have the guard.
        rows: of a step.
        context: tokens of a row.
        found: rows that the training has, None where they are not known yet.
    """
    if not isinstance(settings, TuningSettings) or settings.num_epochs is None:
        return ""
    epochs, steps = settings.num_epochs, settings.steps
    needed = steps * rows / epochs
    guard = (
        f"num_epochs: {epochs:g} ends the training, and its schedule, once its rows have been seen so often, and this "
        f"plan counts all {steps:,} steps, which need {needed:,.0f} rows"
    )
    if settings.mixture is not None:
        return f"{guard}; which source is seen so often first depends on the mixture"
    if found is not None:
        last = max(1, int(found * epochs / rows))
        return f"{guard}; there are {found:,}, so it ends after step {last:,}" if last < steps else ""
    known = [source.max_examples for source in settings.sources if source.max_examples is not None]
    if len(known) < len(settings.sources):
        return f"{guard}; how many there are is known once conversations are packed"
    given = sum(known) * settings.sample * (1 - settings.validation_fraction)
    share = given / needed
    told = f"{guard}; its sources give at most {given:,.0f} conversations, as many as fit in a row"
    if share <= 1:
        return f"{told}, so it ends after step {max(1, int(steps * share)):,} or before"
    return (
        f"{told}. Where they have fewer than {context / share:,.0f} tokens on average, more than {share:.2f} share "
        "a row, and the training ends before its steps"
    )

"""Benchmarks scored while a model is pretrained, on small subsets that are always the same."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from affinage.config.training import PretrainSettings
from affinage.pipeline.looks import evaluated, in_percent, model_in_training
from affinage.pipeline.models import made_from
from affinage.pipeline.step import StepContext

if TYPE_CHECKING:
    from affinage.data.dataloader import ValidationRows
    from affinage.model import Graph
    from affinage.training.state import TrainState


class InLoop:
    """See `affinage.training.job.Benchmarks`."""

    def __init__(
        self,
        context: StepContext,
        settings: PretrainSettings,
        graph: "Graph",
        length: int,
        held_out: "Mapping[str, ValidationRows]",
    ) -> None:
        assert settings.monitor is not None
        self.say: Callable[[str], None] = print
        self._context, self._settings, self._asked = context, settings, settings.monitor
        self._graph, self._length, self._held_out = graph, length, held_out
        self._world = made_from(context.inputs["tokenize"], "synthesize")

    def due(self, step: int) -> bool:
        """Every so many steps, at the beginning and at the end."""
        return step % self._asked.every_steps == 0 or step == self._settings.steps

    def scores(
        self,
        step: int,
        state: "TrainState",
        validation: Mapping[str, Mapping[str, float]],
        stop: Callable[[], bool],
    ) -> dict[str, Any] | None:
        """{tasks: {task: {metric: {value, stderr}}}, bits_per_byte: {language: bits}}; None if stopped."""
        model = model_in_training(self._context, self._settings, self._graph, self._length, "", state.params)
        results = evaluated(self._context, self._asked, "pretrain.monitor", model, state, stop, world=self._world)
        if results is None:
            return None
        tasks = {task: entry["metrics"] for task, entry in results["tasks"].items()}
        self.say(f"step {step:,}/{self._settings.steps:,}  benchmarks: {', '.join(_in_words(tasks))}")
        return {"tasks": tasks, "bits_per_byte": by_language(validation, self._held_out)}


def _in_words(tasks: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> Iterator[str]:
    """Each by the metric that stands for it: shares in percent with their standard errors, others as they are."""
    # With pyarrow, which has a thread, as nothing may have that hosts are forked from.
    from affinage.report.evaluations import headline, is_share

    for task, metrics in tasks.items():
        known = {name: score for name, score in metrics.items() if score["value"] is not None}
        metric = headline(task, known)
        if is_share(metric):
            yield in_percent(task, known[metric])
        elif metric:
            yield f"{task} {metric} {known[metric]['value']:.4g}"


def by_language(
    validation: Mapping[str, Mapping[str, float]], held_out: "Mapping[str, ValidationRows]"
) -> dict[str, float]:
    """Bits per UTF-8 byte of all validation text of a language, over its sources (sets are `source.language`)."""
    bits: dict[str, float] = {}
    size: dict[str, int] = {}
    for name, score in validation.items():
        language = name.rpartition(".")[2]
        bits[language] = bits.get(language, 0.0) + score["bits_per_byte"] * held_out[name].bytes
        size[language] = size.get(language, 0) + held_out[name].bytes
    return {language: bits[language] / size[language] for language in bits}

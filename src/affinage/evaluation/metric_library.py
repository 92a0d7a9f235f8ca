"""What tasks of the harness ask of the library `evaluate`, computed by libraries that are installed here.

That library has no metrics: it fetches a program for each by its name, and runs it. While the harness is at work it is
`MODULE` instead, which has those metrics whose programs only call a package that is here, with the same
values, fetches nothing, and runs nothing of anybody else's.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from affinage.errors import UserError

NAME = "evaluate"  # of the library
_ROUGES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge(
    predictions: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    rouge_types: Sequence[str] = _ROUGES,
    use_aggregator: bool = True,
    use_stemmer: bool = False,
    tokenizer: Callable[[str], list[str]] | None = None,
) -> dict[str, Any]:
    """F-measures of `rouge_score`, in [0, 1]; of several references of a text the best one counts.

    Of all texts together it is the middle of 1,000 resampled means (numpy's global state draws them); without
    `use_aggregator` a list of every text's. Words are runs of a to z and 0 to 9: an é parts words.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.scoring import BootstrapAggregator

    words = None if tokenizer is None else _Words(tokenizer)
    scorer = RougeScorer(list(rouge_types), use_stemmer=use_stemmer, tokenizer=words)
    compare = scorer.score if isinstance(references[0], str) else scorer.score_multi
    scores = [compare(reference, text) for reference, text in zip(references, predictions, strict=True)]
    if not use_aggregator:
        return {kind: [score[kind].fmeasure for score in scores] for kind in rouge_types}
    together = BootstrapAggregator()
    for score in scores:
        together.add_scores(score)
    return {kind: found.mid.fmeasure for kind, found in together.aggregate().items()}


class _Words:
    """A function that splits a text, as `rouge_score` wants it."""

    def __init__(self, tokenize: Callable[[str], list[str]]) -> None:
        self.tokenize = tokenize


def accuracy(predictions: Sequence[Any], references: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """The share of whole numbers that are right."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": float(accuracy_score(_whole(references), _whole(predictions), **settings))}


def f1(predictions: Sequence[Any], references: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Of whole numbers scikit-learn's F1, one of every class where `average` is None."""
    from sklearn.metrics import f1_score

    found = f1_score(_whole(references), _whole(predictions), **settings)
    return {"f1": float(found) if np.ndim(found) == 0 else found}


def exact_match(predictions: Sequence[str], references: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The share of texts that are what they should be; the harness has it itself."""
    from lm_eval.api.metrics import exact_match_hf_evaluate

    found: dict[str, Any] = exact_match_hf_evaluate(predictions, references, **settings)
    return found


def _whole(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values]


METRICS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "rouge": rouge,
    "accuracy": accuracy,
    "f1": f1,
    "exact_match": exact_match,
}


class Metric:
    """What `evaluate.load` gives."""

    def __init__(self, name: str) -> None:
        self.name = name
        # As there: what is drawn depends on numpy's state when the metric was loaded, which the harness seeds.
        state: Any = np.random.get_state(legacy=False)
        words, position = state["state"]["key"], state["state"]["pos"]
        self._seed = int(words[position] if position < len(words) else words[0])

    def compute(self, *, predictions: Sequence[Any], references: Sequence[Any], **settings: Any) -> dict[str, Any]:
        """The scores by name. numpy's global state is afterwards as before."""
        before = np.random.get_state()
        np.random.seed(self._seed)
        try:
            return METRICS[self.name](list(predictions), list(references), **settings)
        finally:
            np.random.set_state(before)


def load(name: str, *_: Any, **__: Any) -> Metric:
    """What `evaluate.load` is meanwhile. Raises UserError for a metric that no installed library computes."""
    if name not in METRICS:
        raise UserError(f"the harness has no metric `{name}`", fix="Metrics that are programs of others are not run.")
    return Metric(name)


@contextmanager
def library() -> Iterator[None]:
    """What imports `evaluate` gets this; that itself would import transformers and torch, 4 to 6 s."""
    before = sys.modules.get(NAME)
    sys.modules[NAME] = MODULE
    try:
        yield
    finally:
        del sys.modules[NAME]
        if before is not None:
            sys.modules[NAME] = before


MODULE = ModuleType(NAME)
MODULE.__spec__ = ModuleSpec(NAME, None)  # whoever asks whether the library is there finds that it is
MODULE.load = load  # type: ignore[attr-defined]

"""The number of token ids of a model, which may be more than its tokenizer has."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from affinage.generation.model import LoadedModel
from affinage.hub.family_spec import Decoder
from affinage.model.graph import Graph, parse
from affinage.model.parameter import PyTree

Rows = Float[np.ndarray, "V D"]


def trimmed(model: LoadedModel) -> LoadedModel:
    """The model without the ids above its tokenizer's: their rows of the embedding and of the unembedding are left out.

    What remains of the logits is what it was.
    """
    size = model.tokenizer.vocabulary
    if size >= model.graph.vocabulary:
        return model
    graph, params = _resized(model.graph, model.params, size, lambda rows: rows[:size])
    return replace(model, graph=graph, params=params)


def with_ids(graph: Graph, params: PyTree, ids: Sequence[int]) -> tuple[Graph, PyTree]:
    """The model with rows for new ids, each the mean of those below the first of them.

    A vocabulary that is padded that far stays as large as it is. So begun, a token that was never seen is no likelier
    than the others (Hewitt, Initializing new word embeddings, 2021).
    """
    if not ids:
        return graph, params
    size = max(graph.vocabulary, max(ids) + 1)

    def grown(rows: Rows) -> Rows:
        old = np.asarray(rows)
        new = np.zeros((size, old.shape[1]), old.dtype)
        new[: len(old)] = old
        new[list(ids)] = old[: min(ids)].mean(axis=0, dtype=np.float64)
        return new

    return _resized(graph, params, size, grown)


def _resized(graph: Graph, params: PyTree, size: int, change: Callable[[Rows], Rows]) -> tuple[Graph, PyTree]:
    """Another vocabulary, with every matrix of a row for each id changed."""
    decoder, written, changed = Decoder.of(graph), graph.to_dict(), dict(params)
    for name in (decoder.nodes["embed"].name, decoder.nodes["logits"].name):
        settings: dict[str, Any] = written["nodes"][name]
        settings |= {"vocab": size} if "vocab" in settings else {}
        if name in params:
            changed[name] = {leaf: change(rows) for leaf, rows in params[name].items()}
    return parse(written), changed

"""The number of token ids of a model, which may be more than its tokenizer has."""

from dataclasses import replace
from typing import Any

from affinage.generation.model import LoadedModel
from affinage.hub.decoder import Decoder
from affinage.model.graph import parse


def trimmed(model: LoadedModel) -> LoadedModel:
    """The model without the ids above its tokenizer's: their rows of the embedding and of the unembedding are left out.

    What remains of the logits is what it was.
    """
    size, decoder = model.tokenizer.vocabulary, Decoder.of(model.graph)
    if size >= model.graph.vocabulary:
        return model
    written = model.graph.to_dict()
    params = dict(model.params)
    for name in (decoder.embed_name, decoder.unembed_name):
        settings: dict[str, Any] = written["nodes"][name]
        settings |= {"vocab": size} if "vocab" in settings else {}
        if name in params:
            params[name] = {leaf: array[:size] for leaf, array in params[name].items()}
    return replace(model, graph=parse(written), params=params)

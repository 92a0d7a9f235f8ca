"""The graph of a language model with the loss of preference pairs in place of that of the next token."""

from affinage.config.tuning import DpoSettings
from affinage.errors import UserError
from affinage.model.graph import Graph, parse

ANSWERS = "answer_log_probabilities"  # the node


def preference_graph(graph: Graph, settings: DpoSettings, documents: int) -> Graph:
    """The same model with the loss of pairs, of which a row holds `documents`, two for each pair, at most.

    Raises:
        UserError: its loss is another one.
    """
    told = graph.to_dict()
    loss = told["nodes"].pop(graph.loss)
    if loss["kind"] != "next_token_loss":
        raise UserError("preferences are learned by a language model, whose loss is a next_token_loss", where="model")
    chunk = {key: loss[key] for key in ("chunk",) if key in loss}
    told["nodes"] |= {
        ANSWERS: {"kind": "document_log_probabilities", "in": loss["in"], "documents": documents, **chunk},
        graph.loss: {
            "kind": "preference_loss",
            "in": ANSWERS,
            "form": settings.loss,
            "beta": settings.beta,
            "label_smoothing": settings.label_smoothing,
        },
    }
    return parse(told)

"""The kinds of nodes that come with the package; importing this registers them."""

from affinage.model.kinds import (
    block,
    dropout,
    embedding,
    head,
    losses,
    norm,
    preference,
)

__all__ = [
    "block",
    "dropout",
    "embedding",
    "head",
    "losses",
    "norm",
    "preference",
]

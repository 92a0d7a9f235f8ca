"""The kinds of nodes that come with the package; importing this registers them."""

from affinage.model.kinds import (
    augment,
    block,
    dropout,
    ema,
    embedding,
    head,
    image,
    losses,
    norm,
    preference,
    regression,
)

__all__ = [
    "augment",
    "block",
    "dropout",
    "ema",
    "embedding",
    "head",
    "image",
    "losses",
    "norm",
    "preference",
    "regression",
]

"""A model of a few thousand weights and a feed of random rows: enough to train in a test."""

from collections.abc import Iterator

import numpy as np

from affinage.model import Graph, parse
from affinage.recipe.training import PretrainSettings

VOCABULARY, CONTEXT = 64, 16


def graph(dropout: float = 0.0, layers: int = 2, width: int = 64) -> Graph:
    return parse(
        {
            "inputs": ["tokens"],
            "nodes": {
                "embed": {"kind": "embedding", "in": "tokens", "vocab": VOCABULARY, "width": 32},
                "drop": {"kind": "dropout", "in": "embed", "rate": dropout},
                "blocks": {
                    "kind": "transformer_block",
                    "in": "drop",
                    "repeat": layers,
                    "attention": {"heads": 4, "rope": {"theta": 10000}},
                    "ffn": {"kind": "swiglu", "width": width},
                    "norm": {"kind": "rms", "eps": 1e-6},
                },
                "norm": {"kind": "rms_norm", "in": "blocks"},
                "logits": {"kind": "unembed", "in": "norm", "vocab": VOCABULARY, "tied": False},
                "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
            },
        }
    )


class RandomFeed:
    """Rows of two documents each, with masks of very different sums; a function of (seed, step) alone."""

    def __init__(self, rows: int = 8, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed

    def batch(self, step: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng((self.seed, step))
        shape = (self.rows, CONTEXT)
        # A skewed distribution, so that there is something to learn.
        tokens = (VOCABULARY * draw.random(shape) ** 3).astype(np.int32)
        border = draw.integers(2, CONTEXT - 2, (self.rows, 1))
        index = np.arange(CONTEXT)[None, :]
        return {
            "tokens": tokens,
            "segment_ids": (index >= border).astype(np.int32),
            "positions": np.where(index >= border, index - border, index).astype(np.int32),
            "loss_mask": (draw.random(shape) < np.linspace(0.1, 1.0, self.rows)[:, None]).astype(np.float32),
            "rows": np.arange(self.rows, dtype=np.int32),
        }

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        step = start_step
        while True:
            yield self.batch(step)
            step += 1


class HeldOut:
    """Two batches of rows for validation."""

    bytes = 1000

    def __init__(self, rows: int = 8) -> None:
        self._feed = RandomFeed(rows, seed=99)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter([self._feed.batch(0), self._feed.batch(1)])


def settings(steps: int = 20, **changes: object) -> PretrainSettings:
    return PretrainSettings.model_validate(
        {
            "steps": steps,
            "batch": 8,
            "schedule": {"peak": 1e-2, "floor": 1e-3, "warmup_steps": 4},
            "validate_every": 10,
            "log_every": 1,
            "checkpoint": {"every_steps": 5},
            **changes,
        }
    )

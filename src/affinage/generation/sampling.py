"""From the logits of the next token to the next token, and from tokens to their text.

The filters are those of Hugging Face's `generate`, in its order: temperature, top-k, top-p, min-p. Each row has values
of its own, as arrays, so that no setting compiles anything again; filters that no row uses are skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from affinage.data.tokenizer import REPLACEMENT, Tokenizer
from affinage.errors import UserError

_EXCLUDED = -jnp.inf
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_RANGES = {
    "max_new_tokens": (0, 2**31 - 1),
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True)
class SamplingParams:
    """What to generate after a prompt. The defaults are greedy: the most likely token, always."""

    max_new_tokens: int = 256
    temperature: float = 0.0  # 0 takes the most likely token; 1 draws from the model's own distribution
    top_k: int = 0  # draw among this many of the most likely tokens; 0: among all
    top_p: float = 1.0  # draw among the smallest set of tokens with at least this probability (Holtzman et al., 2020)
    min_p: float = 0.0  # draw among tokens at least this share as likely as the most likely one (Nguyen et al., 2024)
    seed: int = 0
    ignore_eos: bool = False  # go on after a token that ends a text
    stop: tuple[str, ...] = ()  # texts before which the answer ends

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UserError(f"{name} = {value} is out of range", fix=f"It must be between {low} and {high}.")
        if "" in self.stop:
            raise UserError("a text to stop before is empty", where="stop", fix="Leave it out.")


class SamplingTensors(NamedTuple):
    """The values of one `SamplingParams` for each row [B]."""

    ignore_eos: Bool[Array, "B"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    seed: Int[Array, "B"]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> "SamplingTensors":
        """Return the values of these rows, as arrays of the host."""
        dtypes = zip(cls._fields, (np.bool_, np.float32, np.int32, np.float32, np.float32, np.uint32), strict=True)
        columns: Any = [np.array([getattr(row, name) for row in rows], dtype) for name, dtype in dtypes]
        return cls(*columns)


def filtered(logits: Float[Array, "B V"], tensors: SamplingTensors) -> Float[Array, "B V"]:
    """The float32 logits that the next token is drawn by: minus infinity for tokens that are excluded.

    Rows of temperature 0 are not filtered.
    """
    temperature, top_k, top_p, min_p = (value[:, None] for value in tensors[1:-1])
    logits = logits.astype(jnp.float32)
    draws = temperature > 0
    logits = logits / jnp.where(draws, temperature, 1.0)

    def with_filters(logits: Array) -> Array:
        vocabulary = logits.shape[1]
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        place = jnp.where((top_k > 0) & draws, jnp.minimum(top_k, vocabulary), vocabulary) - 1
        kth = jnp.take_along_axis(descending, place, axis=-1)
        kept = jnp.where(descending >= kth, descending, _EXCLUDED)  # those tied with the last one stay
        probabilities = jax.nn.softmax(kept, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # At 1 all stay: the sum of a long tail rounds to 1 before its end.
        stays = (kept > _EXCLUDED) & ((before < top_p) | (top_p >= 1) | ~draws)
        last = jnp.min(jnp.where(stays, kept, jnp.inf), axis=-1, keepdims=True)
        least = jnp.where(draws, descending[:, :1] + jnp.log(min_p), _EXCLUDED)
        return jnp.where((logits >= last) & (logits >= least), logits, _EXCLUDED)

    wanted = jnp.any(draws & ((top_k > 0) | (top_p < 1) | (min_p > 0)))
    return jax.lax.cond(wanted, with_filters, lambda logits: logits, logits)


def choose(
    logits: Float[Array, "B V"],
    tensors: SamplingTensors,
    rows: Int[Array, "B"],
    steps: Int[Array, "B"],
) -> Int[Array, "B"]:
    """The next token of every row; see `filtered`.

    A draw is named by (seed, row, step), so that it does not depend on who shares the batch.
    """

    def draw(seed: Array, row: Array, step: Array, logits: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), step)
        return jax.random.categorical(key, logits)

    logits = filtered(logits, tensors)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # no filter excludes it
    drawn = jax.lax.cond(
        jnp.any(tensors.temperature > 0),
        lambda: jax.vmap(draw)(tensors.seed, rows, steps, logits).astype(jnp.int32),
        lambda: best,
    )
    return jnp.where(tensors.temperature > 0, drawn, best)


class Detokenizer:
    """The text of a growing list of tokens, released as soon as no later token can change it.

    Bytes of an unfinished character are held back, and so is text that a stop string may begin with. Text from a stop
    string on is never released. (`DecodeStream` of tokenizers raises for bytes that are no text.)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, list(stop)
        self._undecoded: list[int] = []
        self._held = ""
        self.stopped = False  # a stop string was met

    def push(self, token: int | None) -> str:
        """Return the text that one more token makes certain; None, after the last one: the text still held back."""
        self._undecoded += [] if token is None else [token]
        text = self._tokenizer.decode(self._undecoded)
        unfinished = 0 < len(text) - len(text.rstrip(REPLACEMENT)) < _LONGEST_CHARACTER
        if self.stopped or (unfinished and token is not None):
            return ""
        self._undecoded, held = [], self._held + text
        ends = [held.find(stop) for stop in self._stops if stop in held]
        self.stopped = bool(ends)
        if not ends and token is not None:
            ends = [place for place in range(len(held)) if any(stop.startswith(held[place:]) for stop in self._stops)]
        end = min(ends, default=len(held))
        self._held = held[end:]
        return held[:end]

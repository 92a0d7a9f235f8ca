"""What to generate after a prompt, how the next token is chosen of its logits, and the text of tokens.

The filters are those of Hugging Face's `generate`, in its order: temperature, top-k, top-p, min-p. Each row has values
of its own, as arrays, so that no setting compiles anything again; filters that no row uses are skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from affinage.data.tokenizer import REPLACEMENT, Tokenizer
from affinage.errors import UserError

Rows = dict[str, Any]  # arrays [B], see `rows_of`

_LONGEST_CHARACTER = 4  # bytes of UTF-8
_RANGES = {"max_new_tokens": (0, 2**31 - 1), "temperature": (0, 100), "top_k": (0, 2**31 - 1), "top_p": (1e-6, 1)}
_RANGES |= {"min_p": (0, 1), "seed": (0, 2**32 - 1)}
_DTYPES = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}


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
    logprobs: int | None = None  # of how many likely tokens in the place of each one, None: compute none

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UserError(f"{name} = {value} is out of range", fix=f"It must be between {low} and {high}.")
        if "" in self.stop:
            raise UserError("a text to stop before is empty", where="stop", fix="Leave it out.")


@dataclass(eq=False)
class EngineRequest:
    """A prompt (token ids) to be continued, and what follows it so far."""

    prompt: Sequence[int]
    params: SamplingParams
    index: int = 0  # distinguishes requests of the same prompt and seed
    cancelled: bool = False  # gives its slot back at the next step
    limit: int = 0  # the largest number of tokens to generate; set by `Engine.submit`
    tokens: list[int] = field(default_factory=list)  # up to the one that completed a stop string, without a final eos
    text: str = ""  # up to a stop string
    finish_reason: str = ""  # once it has ended: eos (a token that ends a text or a turn), stop or length
    logprobs: list[Any] = field(default_factory=list)  # `token_logprobs` of prompt and answer, if requested
    _undecoded: list[int] = field(default_factory=list)
    _held: str = ""  # text with which a stop string may begin

    def push(self, token: int | None, tokenizer: Tokenizer) -> str:
        """Add a token, and return the text that no later one can change; None, after the last: the rest of it.

        Bytes of an unfinished character are held back, and so is text that a stop string may begin with. Text from a
        stop string on is never released. (`DecodeStream` of tokenizers raises for bytes that are no text.)
        """
        new = [] if token is None else [token]
        self.tokens += new
        self._undecoded += new
        text, stops = tokenizer.decode(self._undecoded), self.params.stop
        unfinished = 0 < len(text) - len(text.rstrip(REPLACEMENT)) < _LONGEST_CHARACTER
        if self.finish_reason == "stop" or (unfinished and token is not None):
            return ""
        self._undecoded, held = [], self._held + text
        if ends := [held.find(stop) for stop in stops if stop in held]:
            self.finish_reason = "stop"
        elif token is not None:
            ends = [place for place in range(len(held)) if any(stop.startswith(held[place:]) for stop in stops)]
        end = min(ends, default=len(held))
        self._held, text = held[end:], held[:end]
        self.text += text
        return text


def rows_of(requests: Sequence[EngineRequest]) -> Rows:
    """Return how the requests of a batch choose their next token, and where they stand, as arrays of the host."""
    chosen = {name: np.array([getattr(each.params, name) for each in requests], _DTYPES[name]) for name in _DTYPES}
    return chosen | {
        "index": np.array([each.index for each in requests], np.int32),
        "token": np.array([(each.tokens or each.prompt)[-1] for each in requests], np.int32),  # not yet in the cache
        "position": np.array([len(each.prompt) + len(each.tokens) - 1 for each in requests], np.int32),
        "generated": np.array([len(each.tokens) for each in requests], np.int32),
    }


def filtered(logits: Float[Array, "B V"], rows: Rows) -> Float[Array, "B V"]:
    """The logits that the next token is drawn by: minus infinity for tokens that are excluded, never the likeliest."""
    temperature, top_k, top_p, min_p = (rows[name][:, None] for name in ("temperature", "top_k", "top_p", "min_p"))
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)

    def with_filters(logits: Array) -> Array:
        descending = jnp.sort(logits, axis=-1, descending=True)
        place = jnp.where(top_k > 0, top_k, logits.shape[1]) - 1
        kth = jnp.take_along_axis(descending, place, axis=-1, mode="clip")
        kept = jnp.where(descending >= kth, descending, -jnp.inf)  # those tied with the last one stay
        probabilities = jax.nn.softmax(kept, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # At 1 all stay: the sum of a long tail rounds to 1 before its end.
        stays = (kept > -jnp.inf) & ((before < top_p) | (top_p >= 1))
        last = jnp.min(jnp.where(stays, kept, jnp.inf), axis=-1, keepdims=True)
        least = descending[:, :1] + jnp.log(min_p)
        return jnp.where((logits >= last) & (logits >= least), logits, -jnp.inf)

    return jax.lax.cond(jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0)), with_filters, lambda logits: logits, logits)


def choose(logits: Float[Array, "V B"], rows: Rows) -> Int[Array, "B"]:
    """The next token of every row, by float32 logits; see `filtered`.

    A draw is named by (seed, index, number of tokens before), so that it does not depend on who shares the batch.
    """
    is_best = logits == jnp.max(logits, axis=0, keepdims=True)
    # The first of the best: argmax, which XLA:CPU computes in a loop over single elements.
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    best = jnp.min(jnp.where(is_best, ids, len(logits) - 1), axis=0)

    def draw(seed: Array, index: Array, step: Array, logits: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), step)
        return jax.random.categorical(key, logits)

    def drawn() -> Array:
        tokens = jax.vmap(draw)(rows["seed"], rows["index"], rows["generated"], filtered(logits.T, rows))
        return jnp.where(rows["temperature"] > 0, tokens.astype(jnp.int32), best)

    return jax.lax.cond(jnp.any(rows["temperature"] > 0), drawn, lambda: best)

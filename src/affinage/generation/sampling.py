"""From the logits of the next token to the next token.

Every filter is a pure function of logits [B, V] that sets what it excludes to minus infinity. They are applied in the
order of Hugging Face's `generate`: repetition penalty, temperature, top-k, top-p, min-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from affinage.errors import UserError

_EXCLUDED = -jnp.inf


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: the most likely token, always."""

    temperature: float = 0.0  # 0 takes the most likely token; 1 draws from the model's own distribution
    top_k: int = 0  # draw among this many of the most likely tokens; 0: among all
    top_p: float = 1.0  # draw among the smallest set of tokens with at least this probability (Holtzman et al., 2020)
    min_p: float = 0.0  # draw among tokens at least this share as likely as the most likely one (Nguyen et al., 2024)
    repetition_penalty: float = 1.0  # divides the logits of tokens already seen (Keskar et al., 2019); 1: none
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "seed": 0 <= self.seed < 2**32,
        }
        for name, fits in ranges.items():
            if not fits:
                raise UserError(
                    f"{name} = {getattr(self, name)} is out of range",
                    where="sampling",
                    fix="temperature, top_k >= 0; 0 < top_p <= 1; 0 <= min_p <= 1; repetition_penalty > 0; "
                    "0 <= seed < 2**32",
                )

    @property
    def filters(self) -> frozenset[str]:
        """Names of the steps that these settings switch on; what is compiled depends on them alone."""
        active = {"repetition_penalty"} if self.repetition_penalty != 1.0 else set()
        if self.temperature > 0:
            active.add("temperature")
            active |= {"top_k"} if self.top_k > 0 else set()
            active |= {"top_p"} if self.top_p < 1.0 else set()
            active |= {"min_p"} if self.min_p > 0.0 else set()
        return frozenset(active)


GREEDY = Sampling()


class Knobs(NamedTuple):
    """The values of a `Sampling` as arrays, so that changing one does not compile anything again.

    They are scalars that hold for a whole batch, or [B] with a value for each of its rows.
    """

    temperature: Float[Array, "*B"]
    top_k: Int[Array, "*B"]
    top_p: Float[Array, "*B"]
    min_p: Float[Array, "*B"]
    repetition_penalty: Float[Array, "*B"]
    seed: Int[Array, "*B"]


def knobs(sampling: Sampling) -> Knobs:
    """The values of `sampling` as scalars for the compiled step."""
    return Knobs(
        jnp.float32(sampling.temperature),
        jnp.int32(min(sampling.top_k, 2**31 - 1)),  # no vocabulary is larger
        jnp.float32(sampling.top_p),
        jnp.float32(sampling.min_p),
        jnp.float32(sampling.repetition_penalty),
        jnp.uint32(sampling.seed),
    )


def knobs_of_rows(samplings: Sequence[Sampling]) -> Knobs:
    """The values of one `Sampling` for each row."""
    columns = zip(*(knobs(sampling) for sampling in samplings))
    return Knobs(*(jnp.stack(column) for column in columns))


def penalise_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, "*one"]
) -> Float[Array, "B V"]:
    """Make tokens that were seen less likely: positive logits are divided by `penalty`, negative ones multiplied."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Float[Array, "B V"], k: Int[Array, "*one"]) -> Float[Array, "B V"]:
    """Exclude all but the `k` most likely tokens, none if it is 0; those tied with the last one stay."""
    rows, vocabulary = logits.shape
    descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    place = jnp.where(k > 0, jnp.minimum(k, vocabulary), vocabulary) - 1
    last = jnp.take_along_axis(descending, jnp.broadcast_to(place, (rows, 1)), axis=-1)
    return jnp.where(logits >= last, logits, _EXCLUDED)


def keep_top_p(logits: Float[Array, "B V"], p: Float[Array, "*one"]) -> Float[Array, "B V"]:
    """Exclude all but the smallest set of most likely tokens whose probabilities sum to at least `p`; ties stay."""
    descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # At 1 all stay: the sum of a long tail rounds to 1 before its end.
    last = jnp.min(jnp.where((before < p) | (p >= 1), descending, jnp.inf), axis=-1)
    return jnp.where(logits >= last[:, None], logits, _EXCLUDED)


def keep_min_p(logits: Float[Array, "B V"], p: Float[Array, "*one"]) -> Float[Array, "B V"]:
    """Exclude tokens less likely than `p` times the most likely one."""
    return jnp.where(logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p), logits, _EXCLUDED)


def row_keys(seed: Int[Array, "*B"], rows: Int[Array, "B"], steps: Int[Array, "B"]) -> Key[Array, "B"]:
    """One random key per (seed, row, step): what is drawn for a row does not depend on who shares its batch."""

    def key(seed: Int[Array, ""], row: Int[Array, ""], step: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), step)

    return jax.vmap(key)(jnp.broadcast_to(seed, rows.shape), rows, steps)


def filtered(
    logits: Float[Array, "B V"], knobs: Knobs, filters: frozenset[str], seen: Bool[Array, "B V"] | None = None
) -> Float[Array, "B V"]:
    """The logits that the next token is drawn by, or after the repetition penalty alone if the rows are greedy.

    `filters` (see `Sampling.filters`) says which steps run; `seen` marks the tokens of the row so far and is needed
    for the repetition penalty.
    """
    logits = logits.astype(jnp.float32)
    temperature, top_k, top_p, min_p, penalty = (jnp.atleast_1d(value)[:, None] for value in knobs[:-1])
    if "repetition_penalty" in filters:
        assert seen is not None, "the repetition penalty needs to know the tokens seen"
        logits = penalise_repetition(logits, seen, penalty)
    if "temperature" not in filters:
        return logits
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    if "top_k" in filters:
        logits = keep_top_k(logits, top_k)
    if "top_p" in filters:
        logits = keep_top_p(logits, top_p)
    if "min_p" in filters:
        logits = keep_min_p(logits, min_p)
    return logits


def choose(
    logits: Float[Array, "B V"],
    knobs: Knobs,
    filters: frozenset[str],
    rows: Int[Array, "B"],
    steps: Int[Array, "B"],
    seen: Bool[Array, "B V"] | None = None,
) -> Int[Array, "B"]:
    """The next token of every row; see `filtered`.

    `rows` and `steps` name the draw. Rows whose temperature is 0 are greedy whatever runs.
    """
    logits = filtered(logits, knobs, filters, seen)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # no filter excludes it
    if "temperature" not in filters:
        return best
    drawn = jax.vmap(jax.random.categorical)(row_keys(knobs.seed, rows, steps), logits).astype(jnp.int32)
    return jnp.where(jnp.atleast_1d(knobs.temperature) > 0, drawn, best)

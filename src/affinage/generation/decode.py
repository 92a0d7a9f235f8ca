"""Generation with a KV cache: one compiled prefill and one compiled decode step per shape."""

from collections.abc import Callable, Sequence
from collections.abc import Generator as Generating
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from affinage.data.special_tokens import PAD
from affinage.generation.model import LoadedModel, logits_of
from affinage.generation.sampling import GREEDY, Knobs, Sampling, choose, knobs
from affinage.generation.shapes import half_step, power_of_two
from affinage.generation.text import TextStream
from affinage.model.call import multiply_out
from affinage.model.graph import Graph
from affinage.model.module import init_cache, one_by_one
from affinage.model.parameter import Tree

_NOTHING = -1  # in a row that is done; no token has this id
_STREAMED_STEPS = 4  # tokens per dispatch when someone reads along
_FEWEST_TOKENS = 16  # of a padded prompt, and:
_FEWEST_SLOTS = 64  # of a cache, so that short prompts of all lengths share their compilation


EndedBy = Literal["token", "text", "length"]


@dataclass(frozen=True)
class Request:
    """What to generate for every prompt of a call."""

    max_new_tokens: int = 256
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] | None = None  # default: those of the tokenizer
    stop_strings: tuple[str, ...] = ()


DEFAULT = Request()


@dataclass(frozen=True)
class Generation:
    """What came after a prompt: tokens without the one that ended it, text up to a stop string, why it ended.

    The tokens are those up to the one that completed a stop string.
    """

    tokens: list[int]
    text: str
    ended_by: EndedBy


class State(NamedTuple):
    """A batch in the middle of generation. `token` is chosen but not yet in the cache; `position` is where it goes."""

    cache: Tree | None
    token: Int[Array, "B"]
    position: Int[Array, "B"]
    generated: Int[Array, "B"]  # number of tokens
    limit: Int[Array, "B"]  # tokens to generate at most
    done: Bool[Array, "B"]
    rows: Int[Array, "B"]  # names of the rows in random draws
    seen: Bool[Array, "B V"] | None  # for the repetition penalty, otherwise absent


def _advance(
    state: State, logits: Array, knobs: Knobs, filters: frozenset[str], stop_ids: Int[Array, "N"]
) -> tuple[State, Int[Array, "B"]]:
    """Choose a token for every row that is not done, and say which; the others are left as they are."""
    chosen = choose(logits, knobs, filters, state.rows, state.generated, state.seen)
    emitted = jnp.where(state.done, _NOTHING, chosen)
    generated = state.generated + ~state.done
    done = state.done | jnp.any(chosen[:, None] == stop_ids[None, :], axis=-1) | (generated >= state.limit)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(seen.shape[0]), chosen].set(True)
    token = jnp.where(state.done, state.token, chosen)
    return state._replace(token=token, generated=generated, done=done, seen=seen), emitted


@lru_cache(maxsize=8)
def compiled(graph: Graph, dtype: str) -> tuple[Any, Any]:
    """The two jitted functions of a graph; jit keeps one executable per shape and per set of filters."""

    @partial(jax.jit, static_argnames=("filters", "slots"))
    def prefill(
        params: Tree,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, "B"],
        limit: Int[Array, "B"],
        rows: Int[Array, "B"],
        knobs: Knobs,
        stop_ids: Int[Array, "N"],
        filters: frozenset[str],
        slots: int,
    ) -> tuple[State, Int[Array, "B 1"]]:
        batch, width = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
        # Padding to the right lands in the cache, too, where there is room, and is overwritten before it is looked at.
        empty = init_cache(graph, batch, slots, jnp.dtype(dtype))
        lazy, cache = logits_of(graph, params, tokens, positions, dtype, empty, at=(lengths - 1)[:, None])
        logits = multiply_out(lazy.hidden[:, 0], lazy.kernel, lazy.softcap)
        seen = None
        if "repetition_penalty" in filters:
            inside = positions < lengths[:, None]
            at = jnp.where(inside, tokens, tokens[:, :1])  # the first token stands in for padding
            seen = jnp.zeros(logits.shape, bool).at[jnp.arange(batch)[:, None], at].set(True)
        zero = jnp.zeros_like(lengths)
        state = State(cache, zero, lengths - 1, zero, limit, limit <= 0, rows, seen)
        state, emitted = _advance(state, logits, knobs, filters, stop_ids)
        return state, emitted[:, None]

    @partial(jax.jit, static_argnames=("filters", "steps"), donate_argnames=("state",))
    def decode(
        params: Tree, state: State, knobs: Knobs, stop_ids: Int[Array, "N"], filters: frozenset[str], steps: int
    ) -> tuple[State, Int[Array, "B steps"]]:
        params = one_by_one(graph, params)

        def unfinished(carry: tuple[Array, State, Array]) -> Array:
            step, state, _ = carry
            return (step < steps) & ~jnp.all(state.done)

        def one(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
            step, state, out = carry
            state = state._replace(position=state.position + ~state.done)
            lazy, cache = logits_of(graph, params, state.token[:, None], state.position[:, None], dtype, state.cache)
            logits = multiply_out(lazy.hidden[:, 0], lazy.kernel, lazy.softcap)
            state, emitted = _advance(state._replace(cache=cache), logits, knobs, filters, stop_ids)
            return step + 1, state, out.at[:, step].set(emitted)

        out = jnp.full((state.token.shape[0], steps), _NOTHING, jnp.int32)
        _, state, out = jax.lax.while_loop(unfinished, one, (jnp.int32(0), state, out))
        return state, out

    return prefill, decode


class Generator:
    """Generates with one model, up to `batch` rows at a time."""

    def __init__(self, model: LoadedModel, *, batch: int = 16, steps_per_dispatch: int = 16) -> None:
        self.model = model
        self._batch = batch
        self._steps = steps_per_dispatch  # the host looks at stop strings, and streams, once per so many tokens
        self._prefill, self._decode = compiled(model.graph, model.compute_dtype)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        request: Request = DEFAULT,
        told: Callable[[int, Generation], None] = lambda _index, _generation: None,
    ) -> list[Generation]:
        """What follows each prompt (token ids, at least one, fewer than the context), in the order of the prompts.

        The result does not depend on `batch`, beyond rounding: random draws are named by the prompt's index. `told` is
        called with the index of a prompt and what follows it as batches are done.
        """
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        # One batch size for all, also for what is left over at the end: a row without a prompt costs less than a shape.
        multiple = self.model.row_multiple
        batch = -(-min(self._batch, power_of_two(len(prompts))) // multiple) * multiple
        results: dict[int, Generation] = {}
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            progress = [self._progress(request) for _ in rows]
            for _ in self._run([prompts[row] for row in rows], rows, batch, request, progress, self._steps):
                pass
            for row, one in zip(rows, progress, strict=True):
                results[row] = one.result()
                told(row, results[row])
        return [results[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], request: Request = DEFAULT) -> Generating[str, None, Generation]:
        """Pieces of the text that follows a prompt, as they come; the generator's return value is the whole."""
        progress = self._progress(request)
        rows = self.model.row_multiple
        shown = 0
        for (piece,) in self._run([prompt], [0], rows, request, [progress], min(_STREAMED_STEPS, self._steps)):
            shown += len(piece)
            if piece:
                yield piece
        result = progress.result()
        if rest := result.text[shown:]:
            yield rest
        return result

    def _progress(self, request: Request) -> "RowProgress":
        return RowProgress(TextStream(self.model.tokenizer, request.stop_strings), self._stop_ids(request))

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return self.model.tokenizer.stops if request.stop_ids is None else request.stop_ids

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        batch: int,
        request: Request,
        progress: Sequence["RowProgress"],
        steps: int,
    ) -> Generating[list[str], None, None]:
        """Run prompts, padded to `batch` rows, to their end; yields each prompt's new text after every dispatch."""
        settings = knobs(request.sampling)
        filters = request.sampling.filters
        stop_ids = np.array(self._stop_ids(request), np.int32)
        limits = [request.max_new_tokens] * len(prompts)
        tokens, lengths, limit = padded(prompts, limits, batch, self.model.context)
        needed = half_step(max(map(len, prompts)) + request.max_new_tokens)
        slots = min(max(needed, _FEWEST_SLOTS), self.model.context)
        names = np.concatenate([rows, np.zeros(len(tokens) - len(rows))]).astype(np.int32)
        place = self.model.place
        state, emitted = self._prefill(
            self.model.params, place(tokens), place(lengths), place(limit), place(names), settings, stop_ids,
            filters=filters, slots=slots,
        )  # fmt: skip
        while True:
            columns = self.model.on_host(emitted)
            yield [one.push(columns[index]) for index, one in enumerate(progress)]
            done = self.model.on_host(state.done)
            stopped = np.array([one.stream.stopped for one in progress] + [True] * (len(done) - len(progress)))
            if np.all(done | stopped):
                return
            if np.any(stopped & ~done):
                state = state._replace(done=place(done | stopped))
            state, emitted = self._decode(self.model.params, state, settings, stop_ids, filters=filters, steps=steps)


def padded(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int, context: int
) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Prompts padded to a bucket: tokens, lengths, and how many tokens may follow each in a context.

    Raises ValueError for a prompt that is empty or leaves no room for a token.
    """
    longest = max(map(len, prompts))
    if min(map(len, prompts)) == 0 or longest >= context:
        raise ValueError(f"a prompt must have between 1 and {context - 1} tokens")
    width = min(max(power_of_two(longest), _FEWEST_TOKENS), context)
    tokens = np.full((batch, width), PAD, np.int32)
    lengths, limit = np.ones(batch, np.int32), np.zeros(batch, np.int32)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)] = prompt
        lengths[index] = len(prompt)
        limit[index] = min(limits[index], context - len(prompt))
    return tokens, lengths, limit


class RowProgress:
    """What one row has generated so far, on the host."""

    def __init__(self, stream: TextStream, stop_ids: Sequence[int]) -> None:
        self.stream = stream
        self._stop_ids = frozenset(stop_ids)
        self._tokens: list[int] = []
        self._ended_by_token = False

    def push(self, emitted: np.ndarray) -> str:
        """The new text of what the device emitted for this row."""
        if self.stream.stopped or self._ended_by_token:
            return ""
        new = [int(token) for token in emitted if token != _NOTHING]
        if new and new[-1] in self._stop_ids:
            self._ended_by_token = True
            new.pop()
        text = ""
        # One by one, so that it does not hang on the rhythm of dispatches what comes after a stop string.
        for token in new:
            self._tokens.append(token)
            text += self.stream.push([token])
            if self.stream.stopped:
                break
        return text

    def result(self) -> Generation:
        """Everything generated; to be called once, at the end."""
        self.stream.finish()
        ended_by: EndedBy = "text" if self.stream.stopped else "token" if self._ended_by_token else "length"
        return Generation(self._tokens, self.stream.released, ended_by)

"""One engine for all generation: fixed slots, prefill by length bucket, one decode program, a donated KV cache.

`Engine.step` admits waiting requests into free slots, then generates some tokens for every slot. The text of a request
does not depend on the slots beside it: its random draws are folded from its own seed, index and step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from affinage.data.special_tokens import PAD
from affinage.generation.detokenizer import Detokenizer
from affinage.generation.model import LoadedModel, logits_of
from affinage.generation.sampling import SamplingParams, SamplingTensors, choose
from affinage.model.forward import init_cache, one_by_one
from affinage.model.graph import Graph
from affinage.model.parameter import PyTree
from affinage.model.products import multiply_out
from affinage.parallel import MeshLayout

_NOTHING = -1  # stands where a row generates no token
_SHORTEST_BUCKET = 64  # tokens of a padded prompt, and of a cache
_MAX_STOP_IDS = 32  # of a request
TOP_LOGPROBS = 20  # the largest number of alternatives of a token
_WORTH_KEEPING = 16  # tokens of a prompt that a slot holds already

FinishReason = Literal["eos", "stop", "length"]


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and of the most likely tokens in its place: (id, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Generation:
    """What follows a prompt.

    Attributes:
        tokens: up to the one that completed a stop string, without a token that ended the text.
        text: up to a stop string.
        finish_reason: eos for a token that ends a text or a turn, stop for a stop string, length for neither.
        logprobs: of the tokens, if requested.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None


@dataclass(eq=False)
class EngineRequest:
    """A prompt (token ids) to be continued. `index` distinguishes requests of the same prompt and seed.

    `on_text` is called with new text, at the end with the whole generation, or with the error that prevented it. The
    engine fills in the fields after `cancelled`.
    """

    prompt: Sequence[int]
    params: SamplingParams
    on_text: Callable[[str, Generation | Exception | None], None]
    index: int = 0
    cancelled: bool = False
    limit: int = 0  # tokens to generate at most
    stop_ids: tuple[int, ...] = ()
    detokenizer: Detokenizer | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[str, Generation | None]:
        """Take what the device generated; return the new text and, if that was the end, the whole."""
        assert self.detokenizer is not None
        text, reason = "", None
        # Token by token, so that a stop string ends the text at the same place for any number of tokens a dispatch.
        for place, token in enumerate(tokens):
            if token == _NOTHING or reason:
                break
            if token in self.stop_ids:
                reason = "eos"
                break
            self.tokens.append(token)
            self.logprobs += logprobs[place : place + 1]
            text += self.detokenizer.push(token)
            reason = "stop" if self.detokenizer.stopped else None
        if reason is None and len(self.tokens) < self.limit:
            return text, None
        text += self.detokenizer.finish()
        found: FinishReason = "stop" if self.detokenizer.stopped else "eos" if reason else "length"
        logprobs_of = None if self.params.logprobs is None else self.logprobs
        return text, Generation(self.tokens, self.detokenizer.released, found, logprobs_of)


class State(NamedTuple):
    """What stays on the device, donated from program to program."""

    cache: Any  # arrays [layers, B, K, T, D]
    seen: Bool[Array, "B V"]  # tokens of each slot, for the repetition penalty


class Rows(NamedTuple):
    """Where each row stands; made from the requests for every dispatch."""

    token: Int[Array, "B"]  # the last one, not yet in the cache
    position: Int[Array, "B"]  # of that token
    generated: Int[Array, "B"]
    limit: Int[Array, "B"]  # tokens to generate at most; after a stop token, those generated
    number: Int[Array, "B"]  # of the request, for its draws
    stop_ids: Int[Array, "B N"]  # padded with _NOTHING
    wants_logprobs: Bool[Array, "B"]
    sampling: SamplingTensors

    @property
    def done(self) -> Bool[Array, "B"]:
        """Whether a row has ended."""
        return self.generated >= self.limit


class Emitted(NamedTuple):
    """What a dispatch generated: tokens and, if a row wants them, log-probabilities."""

    token: Int[Array, "B steps"]
    logprob: Float[Array, "B steps"]
    top_ids: Int[Array, "B steps N"]
    top_logprobs: Float[Array, "B steps N"]


def _top_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"], wanted: Bool[Array, ""]) -> tuple[Array, ...]:
    """Log-probabilities of tokens, and the ids and log-probabilities of the most likely ones; zeros if not wanted."""

    def compute() -> tuple[Array, ...]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        values, ids = jax.lax.top_k(logprobs, min(TOP_LOGPROBS, logits.shape[1]))
        return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], ids.astype(jnp.int32), values

    shapes = jax.eval_shape(compute)
    return jax.lax.cond(wanted, compute, lambda: tuple(jnp.zeros(one.shape, one.dtype) for one in shapes))


def _advance(
    rows: Rows, seen: Bool[Array, "B V"], logits: Float[Array, "B V"]
) -> tuple[Rows, Bool[Array, "B V"], tuple[Array, ...]]:
    """Choose a token for every row that is not done; the others stay as they are."""
    done = rows.done
    chosen = choose(logits, rows.sampling, rows.number, rows.generated, seen)
    generated = rows.generated + ~done
    stopped = jnp.any(chosen[:, None] == rows.stop_ids, axis=-1) & ~done
    advanced = rows._replace(
        token=jnp.where(done, rows.token, chosen),
        position=rows.position + ~done,
        generated=generated,
        limit=jnp.where(stopped, generated, rows.limit),
    )
    logprobs = _top_logprobs(logits, chosen, jnp.any(rows.wants_logprobs & ~done))
    seen = seen.at[jnp.arange(len(chosen)), chosen].set(True)
    return advanced, seen, (jnp.where(done, _NOTHING, chosen), *logprobs)


@lru_cache(maxsize=8)
def _compiled(graph: Graph, dtype: str, layout: MeshLayout | None) -> tuple[Any, Any, Any]:
    """The jitted programs of a graph; jit keeps one executable per shape."""

    def sharded(state: State) -> State:
        if layout is None:
            return state
        axes = (None, "batch", "kv_heads", None, "head_dim")
        cache = jax.tree.map(lambda leaf: layout.constrain(leaf, axes), state.cache)
        return State(cache, layout.constrain(state.seen, ("batch", None)))

    @partial(jax.jit, static_argnames=("slots", "length"))
    def empty(slots: int, length: int) -> State:
        seen = jnp.zeros((slots, graph.shapes[graph.logits].width), bool)
        return sharded(State(init_cache(graph, slots, length, jnp.dtype(dtype)), seen))

    @partial(jax.jit, static_argnames=("fresh",), donate_argnames=("state",))
    def prefill(
        params: PyTree,
        state: State,
        rows: Rows,
        seen: Bool[Array, "rows V"],
        tokens: Int[Array, "rows S"],
        starts: Int[Array, " rows"],
        lengths: Int[Array, " rows"],
        slots: Int[Array, " rows"],
        fresh: bool,
    ) -> tuple[State, Emitted]:
        """Put prompts into slots from `starts` on, all 0 if `fresh`; rows of a slot that does not exist are dropped."""
        count, width = tokens.shape
        positions = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        cache: PyTree | None
        if fresh:
            cache = init_cache(graph, count, width, jnp.dtype(dtype))
        else:
            cache = jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=1, mode="clip"), state.cache)
        # Padding to the right enters the cache as well, and is overwritten before any query sees it.
        lazy, cache = logits_of(graph, params, tokens, positions, dtype, cache, logit_positions=(lengths - 1)[:, None])
        _, seen, first = _advance(rows, seen, multiply_out(lazy.hidden[:, 0], lazy.kernel))

        def into(old: Array, part: Array) -> Array:
            return old.at[:, slots, :, : part.shape[3]].set(part[:, :, :, : old.shape[3]], mode="drop")

        state = State(jax.tree.map(into, state.cache, cache), state.seen.at[slots].set(seen, mode="drop"))
        return sharded(state), Emitted(*(part[:, None] for part in first))

    @partial(jax.jit, static_argnames=("steps", "span"), donate_argnames=("state",))
    def decode(params: PyTree, state: State, rows: Rows, steps: int, span: int) -> tuple[State, Emitted]:
        """Up to `steps` tokens for every row; only the first `span` places of the cache are read and written."""
        params = one_by_one(graph, params)
        slots, count = len(rows.token), min(TOP_LOGPROBS, state.seen.shape[1])
        tokens = jnp.full((slots, steps), _NOTHING, jnp.int32)
        top_ids = jnp.zeros((slots, steps, count), jnp.int32)
        out = Emitted(tokens, jnp.zeros((slots, steps)), top_ids, jnp.zeros(top_ids.shape))
        cache = jax.tree.map(lambda leaf: leaf[:, :, :, :span], state.cache)

        def unfinished(carry: tuple[Array, State, Rows, Emitted]) -> Array:
            step, _, rows, _ = carry
            return (step < steps) & ~jnp.all(rows.done)

        def one(carry: tuple[Array, State, Rows, Emitted]) -> tuple[Array, State, Rows, Emitted]:
            step, (cache, seen), rows, out = carry
            lazy, cache = logits_of(graph, params, rows.token[:, None], rows.position[:, None], dtype, cache)
            rows, seen, parts = _advance(rows, seen, multiply_out(lazy.hidden[:, 0], lazy.kernel))
            out = Emitted(*(whole.at[:, step].set(part) for whole, part in zip(out, parts, strict=True)))
            return step + 1, State(cache, seen), rows, out

        _, (cache, seen), _, out = jax.lax.while_loop(
            unfinished, one, (jnp.int32(0), State(cache, state.seen), rows, out)
        )
        cache = jax.tree.map(lambda old, part: old.at[:, :, :, :span].set(part), state.cache, cache)
        return sharded(State(cache, seen)), out

    return empty, prefill, decode


class Engine:
    """Generates with one model, up to `max_num_seqs` requests at a time, of at most `max_model_len` tokens each."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        steps: int = 16,
        enable_prefix_caching: bool = False,
    ) -> None:
        """Make an engine of one model.

        Args:
            model: with its weights and tokenizer.
            max_num_seqs: requests at a time.
            max_model_len: tokens of a request with its answer; by default the model's context.
            steps: tokens per dispatch: how often text is passed on and requests are admitted.
            enable_prefix_caching: a request skips the part of its prompt that a free slot still holds, as from the
                turn before in a conversation. Requests are then prefilled one at a time.
        """
        self.model = model
        self.slots = -(-max_num_seqs // model.row_multiple) * model.row_multiple
        self.length = min(max_model_len or model.context, model.context)
        self._steps, self._prefix_caching = steps, enable_prefix_caching
        self._empty, self._prefill, self._decode = _compiled(model.graph, model.compute_dtype, model.layout)
        self._buckets = [1 << bit for bit in range(6, self.length.bit_length()) if 1 << bit < self.length]
        self._buckets.append(self.length)
        # Short conversations need not read all of a long cache.
        self._spans = [self.length // 4, self.length] if self.length >= 4 * _SHORTEST_BUCKET else [self.length]
        self.reset()

    def reset(self) -> None:
        """Forget all requests and what the slots hold, as after an error of the device."""
        self.waiting: deque[EngineRequest] = deque()
        self.active: dict[int, EngineRequest] = {}  # by slot
        self._held: list[list[int]] = [[] for _ in range(self.slots)]  # tokens whose keys and values a slot has
        self._state: State | None = None

    def prepare(self, request: EngineRequest) -> EngineRequest:
        """Return a request that is ready for the queue `waiting`.

        Raises ValueError for a prompt that is empty or leaves no room for a token, and for too many stop tokens.
        """
        own = request.params.stop_token_ids
        request.stop_ids = self.model.tokenizer.stops if own is None else own
        if not 0 < len(request.prompt) < self.length:
            raise ValueError(f"a prompt must have between 1 and {self.length - 1} tokens")
        if len(request.stop_ids) > _MAX_STOP_IDS:
            raise ValueError(f"a request may have {_MAX_STOP_IDS} stop tokens, not {len(request.stop_ids)}")
        request.limit = min(request.params.max_new_tokens, self.length - len(request.prompt))
        request.detokenizer = Detokenizer(self.model.tokenizer, request.params.stop)
        return request

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Yield pieces of the text that follows a prompt, as they come."""
        pieces: list[str] = []
        request = self.prepare(EngineRequest(prompt, params, lambda text, _: pieces.append(text)))
        self.waiting.append(request)
        try:
            while self.waiting or self.active:
                self.step()
                yield from filter(None, pieces)
                pieces.clear()
        finally:
            request.cancelled = True
            self.step()  # frees its slot

    def warm_up(self) -> None:
        """Compile every program that requests can need, so that no client waits for one."""
        for bucket in self._buckets:
            prompt = [PAD] * min(bucket, self.length - 1)
            request = self.prepare(EngineRequest(prompt, SamplingParams(), lambda *_: None))
            for start in (0, 1):
                self._fill([request], [0], start)
        for span in self._spans:
            self._dispatch(
                self._decode, self._rows([None] * self.slots, range(self.slots)), steps=self._steps, span=span
            )
        self.reset()

    def step(self) -> None:
        """Admit waiting requests into free slots, then generate some tokens for every slot."""
        self.active = {slot: request for slot, request in self.active.items() if not request.cancelled}
        self.waiting = deque(request for request in self.waiting if not request.cancelled)
        self._admit()
        if not self.active:
            return
        longest = max(len(request.prompt) + len(request.tokens) for request in self.active.values())
        span = next(span for span in self._spans if span >= min(longest + self._steps, self.length))
        rows = self._rows([self.active.get(slot) for slot in range(self.slots)], range(self.slots))
        emitted = self._dispatch(self._decode, rows, steps=self._steps, span=span)
        self._push(emitted, {slot: slot for slot in self.active})

    def _admit(self) -> None:
        free = sorted(set(range(self.slots)) - self.active.keys(), key=lambda slot: len(self._held[slot]))
        while self.waiting and free:
            start, count = 0, 1
            if self._prefix_caching:
                slot = max(free, key=lambda slot: self._shared(slot, self.waiting[0]))
                if (shared := self._shared(slot, self.waiting[0])) >= _WORTH_KEEPING:
                    start = shared
                    free.insert(0, free.pop(free.index(slot)))
            elif len(self.waiting) > 1:  # one or all slots at a time: every other number would be another program
                count = min(len(free), len(self.waiting))
            requests = [self.waiting.popleft() for _ in range(count)]
            slots, free = free[:count], free[count:]  # the slots that hold least; more may still be of use
            emitted = self._fill(requests, slots, start)
            self.active |= dict(zip(slots, requests, strict=True))
            self._push(emitted, {slot: row for row, slot in enumerate(slots)})

    def _shared(self, slot: int, request: EngineRequest) -> int:
        """The number of tokens of the prompt that the slot holds; the last one is computed in any case."""
        most = min(len(self._held[slot]), len(request.prompt) - 1)
        differ = (n for n in range(most) if self._held[slot][n] != request.prompt[n])
        return next(differ, most)

    def _fill(self, requests: Sequence[EngineRequest], slots: Sequence[int], start: int) -> Emitted:
        """Prefill prompts from a start on, and choose the first token of each."""
        count = self.model.row_multiple if len(requests) <= self.model.row_multiple else self.slots
        longest = max(len(request.prompt) for request in requests) - start
        width = next(bucket for bucket in self._buckets if bucket >= longest)
        tokens = np.full((count, width), PAD, np.int32)
        seen = np.zeros((count, self.model.graph.shapes[self.model.graph.logits].width), bool)
        lengths = np.ones(count, np.int32)
        for row, (slot, request) in enumerate(zip(slots, requests, strict=True)):
            lengths[row] = len(request.prompt) - start
            tokens[row, : lengths[row]] = request.prompt[start:]
            seen[row, np.asarray(request.prompt)] = True
            self._held[slot] = list(request.prompt)
        missing = count - len(requests)
        slots = [*slots, *[self.slots] * missing]
        rows = self._rows([*requests, *[None] * missing], slots)
        arrays = (seen, tokens, np.full(count, start, np.int32), lengths, np.array(slots, np.int32))
        return self._dispatch(self._prefill, rows, *arrays, fresh=start == 0)

    def _dispatch(self, program: Any, rows: Rows, *arrays: np.ndarray, **static: Any) -> Emitted:
        """Run a program on the donated state."""
        state, self._state = self._state or self._empty(slots=self.slots, length=self.length), None
        rows, arrays = jax.tree.map(self.model.place, (rows, arrays))
        self._state, emitted = program(self.model.params, state, rows, *arrays, **static)
        return emitted

    def _rows(self, requests: Sequence[EngineRequest | None], slots: Sequence[int]) -> Rows:
        """Where the requests stand; a row without one is done, and writes after what its slot holds."""
        numbers = np.zeros((5, len(requests)), np.int32)
        stop_ids = np.full((len(requests), _MAX_STOP_IDS), _NOTHING, np.int32)
        for row, (request, slot) in enumerate(zip(requests, slots, strict=True)):
            if request is None:
                numbers[1, row] = len(self._held[slot]) if slot < self.slots else 0
                continue
            tokens, generated = [*request.prompt[-1:], *request.tokens[-1:]], len(request.tokens)
            position = len(request.prompt) + generated - 1
            numbers[:, row] = tokens[-1], position, generated, request.limit, request.index
            stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        params = [SamplingParams() if request is None else request.params for request in requests]
        wants_logprobs = np.array([one.logprobs is not None for one in params])
        columns: list[Any] = [*numbers, stop_ids, wants_logprobs, SamplingTensors.of(params)]
        return Rows(*columns)

    def _push(self, emitted: Emitted, rows: dict[int, int]) -> None:
        """Pass on what was generated in slots, by their rows of `emitted`, and free the slots that are done."""
        tokens = self.model.on_host(emitted.token)
        wanted = any(self.active[slot].params.logprobs is not None for slot in rows)
        parts = [self.model.on_host(part) for part in emitted[1:]] if wanted else []
        for slot, row in rows.items():
            request, logprobs = self.active[slot], list[TokenLogprobs]()
            if request.params.logprobs is not None:
                logprobs = _listed(tokens[row], *(part[row] for part in parts), count=request.params.logprobs)
            text, generation = request.push(tokens[row].tolist(), logprobs)
            self._held[slot] = [*request.prompt, *request.tokens][:-1]
            if generation is not None:
                del self.active[slot]
            if not request.cancelled and (generation or text):
                request.on_text(text, generation)


def _listed(
    tokens: np.ndarray, logprobs: np.ndarray, top_ids: np.ndarray, top_values: np.ndarray, *, count: int
) -> list[TokenLogprobs]:
    """The log-probabilities of one row's tokens, with `count` of the most likely ones of each."""
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(top_ids[:, :count].tolist(), top_values[:, :count].tolist())]
    return [TokenLogprobs(*one) for one in zip(tokens.tolist(), logprobs.tolist(), tops)]


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    on_done: Callable[[int, Generation], None] = lambda _index, _generation: None,
    *,
    max_num_seqs: int = 16,
) -> list[Generation]:
    """Return what follows each prompt (token ids), in the order of the prompts, which also names random draws.

    The engine is as large as these prompts need. `on_done` is called with the index of each prompt and its generation
    as they end. Raises ValueError for a prompt that is empty or leaves no room for a token.
    """
    if not prompts:
        return []
    length = _bucket(max(map(len, prompts)) + params.max_new_tokens)
    slots = min(max_num_seqs, 1 << (len(prompts) - 1).bit_length())
    engine = Engine(model, max_num_seqs=slots, max_model_len=length)
    results: dict[int, Generation] = {}

    def ended(index: int, _text: str, generation: Generation | Exception | None) -> None:
        if isinstance(generation, Generation):
            results[index] = generation
            on_done(index, generation)

    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        request = EngineRequest(prompts[index], params, partial(ended, index), index)
        engine.waiting.append(engine.prepare(request))
    while engine.waiting or engine.active:
        engine.step()
    return [results[index] for index in range(len(prompts))]


def _bucket(tokens: int) -> int:
    return max(_SHORTEST_BUCKET, 1 << (tokens - 1).bit_length())


@lru_cache(maxsize=8)
def _scoring(graph: Graph, dtype: str, layout: MeshLayout | None) -> Any:
    @jax.jit
    def score(params: PyTree, tokens: Int[Array, "R S"]) -> tuple[Array, ...]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        lazy, _ = logits_of(graph, params, tokens, positions, dtype, layout=layout)
        logits = multiply_out(lazy.hidden[0, :-1], lazy.kernel)
        return _top_logprobs(logits, tokens[0, 1:], jnp.bool_(True))

    return score


def prompt_logprobs(model: LoadedModel, prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probability of every token of a prompt but the first, given those before it."""
    tokens = np.full((model.row_multiple, min(_bucket(len(prompt)), model.context)), PAD, np.int32)
    tokens[:, : len(prompt)] = prompt
    scored = _scoring(model.graph, model.compute_dtype, model.layout)(model.params, model.place(tokens))
    parts = [model.on_host(part)[: len(prompt) - 1] for part in scored]
    return _listed(np.asarray(prompt[1:]), *parts, count=count)

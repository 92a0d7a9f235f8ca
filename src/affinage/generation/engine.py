"""One engine for all generation: fixed slots, a prefill by length bucket, one decode, and a state that is donated.

`Engine.step` lets waiting requests into free slots and generates some tokens for every slot. What a request generates
does not depend on the slots beside it: its random draws are named by its own seed and index.
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
from affinage.model.call import multiply_out
from affinage.model.graph import Graph
from affinage.model.module import init_cache, one_by_one
from affinage.model.parameter import Tree
from affinage.parallel import MeshLayout

_NOTHING = -1  # where a row generates no token; no token has this id
_SHORTEST_BUCKET = 64  # tokens of a padded prompt, and of a cache
_MOST_STOP_IDS = 32  # of a request
TOP_LOGPROBS = 20  # of the most likely tokens, at most
_WORTH_KEEPING = 16  # tokens of a prompt that a slot has already

FinishReason = Literal["eos", "stop", "length"]


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and of the most likely ones in its place: (id, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Generation:
    """What came after a prompt: tokens without the one that ended it, text up to a stop string, why it ended.

    The tokens are those up to the one that completed a stop string. `logprobs` are of the tokens, where asked for.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason  # eos: a token that ends a text or a turn; stop: a stop string
    logprobs: list[TokenLogprobs] | None = None


@dataclass(eq=False)
class EngineRequest:
    """A prompt (token ids) to be continued. `index` tells requests of the same prompt and seed apart.

    `on_text` is called with new text, and with the whole generation once it has ended.
    """

    prompt: Sequence[int]
    params: SamplingParams
    on_text: Callable[[str, Generation | None], None]
    index: int = 0
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended_by_token: bool = False
    detokenizer: Detokenizer | None = None

    def push(self, emitted: Sequence[int], logprobs: Sequence[TokenLogprobs], stop_ids: frozenset[int]) -> str:
        """The new text of tokens that the device generated."""
        assert self.detokenizer is not None
        text = ""
        # One by one, so that what comes after a stop string does not depend on the rhythm of dispatches.
        for place, token in enumerate(emitted):
            if token == _NOTHING or self.ended_by_token or self.detokenizer.stopped:
                break
            if token in stop_ids:
                self.ended_by_token = True
                break
            self.tokens.append(token)
            self.logprobs += logprobs[place : place + 1]
            text += self.detokenizer.push(token)
        return text

    def result(self) -> Generation:
        """Everything that was generated; called once, at the end."""
        assert self.detokenizer is not None
        self.detokenizer.finish()
        reason: FinishReason = "stop" if self.detokenizer.stopped else "eos" if self.ended_by_token else "length"
        logprobs = self.logprobs if self.params.logprobs is not None else None
        return Generation(self.tokens, self.detokenizer.released, reason, logprobs)


class State(NamedTuple):
    """The slots on the device. `token` is chosen but not yet in the cache; `position` is where it goes."""

    cache: Any  # arrays [layers, B, K, T, D]; None for rows that have no slot yet
    token: Int[Array, "B"]
    position: Int[Array, "B"]
    generated: Int[Array, "B"]  # number of tokens
    limit: Int[Array, "B"]  # tokens to generate at most
    done: Bool[Array, "B"]
    row_index: Int[Array, "B"]  # names the row in random draws
    stop_ids: Int[Array, "B N"]  # padded with a value that no token has
    seen: Bool[Array, "B V"]  # for the repetition penalty
    wants_logprobs: Bool[Array, "B"]
    sampling: SamplingTensors


class Emitted(NamedTuple):
    """What a dispatch generated: tokens and, where a row wants them, log-probabilities."""

    token: Int[Array, "B steps"]
    logprob: Float[Array, "B steps"]
    top_ids: Int[Array, "B steps N"]
    top_logprobs: Float[Array, "B steps N"]


def top_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"], wanted: Bool[Array, ""]) -> tuple[Array, ...]:
    """Log-probabilities of tokens, and the ids and log-probabilities of the most likely ones; zeros if not wanted."""
    count = min(TOP_LOGPROBS, logits.shape[1])

    def compute() -> tuple[Array, ...]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        values, ids = jax.lax.top_k(logprobs, count)
        return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], ids.astype(jnp.int32), values

    def nothing() -> tuple[Array, ...]:
        rows = len(tokens)
        return jnp.zeros(rows), jnp.zeros((rows, count), jnp.int32), jnp.zeros((rows, count))

    return jax.lax.cond(wanted, compute, nothing)


def _advance(state: State, logits: Float[Array, "B V"]) -> tuple[State, tuple[Array, ...]]:
    """Choose a token for every row that is not done; the others are left as they are."""
    chosen = choose(logits, state.sampling, state.row_index, state.generated, state.seen)
    emitted = jnp.where(state.done, _NOTHING, chosen)
    wanted = jnp.any(state.wants_logprobs & ~state.done)
    generated = state.generated + ~state.done
    ended = jnp.any(chosen[:, None] == state.stop_ids, axis=-1) | (generated >= state.limit)
    advanced = state._replace(
        token=jnp.where(state.done, state.token, chosen),
        generated=generated,
        done=state.done | ended,
        seen=state.seen.at[jnp.arange(len(chosen)), chosen].set(True),
    )
    return advanced, (emitted, *top_logprobs(logits, chosen, wanted))


@lru_cache(maxsize=8)
def _compiled(graph: Graph, dtype: str, layout: MeshLayout | None) -> tuple[Any, Any, Any]:
    """The jitted functions of a graph; jit keeps one executable per shape."""

    def split(cache: Tree) -> Tree:
        if layout is None:
            return cache
        axes = (None, "batch", "kv_heads", None, "head_dim")
        return jax.tree.map(lambda leaf: layout.constrain(leaf, axes), cache)

    @partial(jax.jit, static_argnames=("slots", "length"))
    def empty(rows: State, slots: int, length: int) -> State:
        return rows._replace(cache=split(init_cache(graph, slots, length, jnp.dtype(dtype))))

    @partial(jax.jit, static_argnames=("fresh",), donate_argnames=("state",))
    def prefill(
        params: Tree,
        state: State,
        new: State,
        tokens: Int[Array, "rows S"],
        starts: Int[Array, " rows"],
        lengths: Int[Array, " rows"],
        slots: Int[Array, " rows"],
        fresh: bool,
    ) -> tuple[State, Emitted]:
        """Put prompts into slots, from a start on; with `fresh` the starts are 0. A slot that is not there is none."""
        rows, width = tokens.shape
        positions = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        if fresh:
            cache: Tree | None = init_cache(graph, rows, width, jnp.dtype(dtype))
        else:
            cache = jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=1, mode="clip"), state.cache)
        # Padding to the right lands in the cache, too, where there is room, and is overwritten before it is looked at.
        lazy, cache = logits_of(graph, params, tokens, positions, dtype, cache, at=(lengths - 1)[:, None])
        new, first = _advance(new, multiply_out(lazy.hidden[:, 0], lazy.kernel, lazy.softcap))
        new = new._replace(position=starts + lengths - 1)

        def into_cache(old: Array, part: Array) -> Array:
            return old.at[:, slots, :, : part.shape[3]].set(part[:, :, :, : old.shape[3]], mode="drop")

        def into(old: Array, part: Array) -> Array:
            return old.at[slots].set(part, mode="drop")

        others = jax.tree.map(into, state._replace(cache=None), new._replace(cache=None))
        state = others._replace(cache=split(jax.tree.map(into_cache, state.cache, cache)))
        return state, Emitted(*(part[:, None] for part in first))

    @partial(jax.jit, static_argnames=("steps", "span"), donate_argnames=("state",))
    def decode(params: Tree, state: State, steps: int, span: int) -> tuple[State, Emitted]:
        """Up to `steps` tokens for every row; no row is longer than `span` then, beyond which the cache is not read."""
        params = one_by_one(graph, params)
        whole = state.cache
        state = state._replace(cache=jax.tree.map(lambda leaf: leaf[:, :, :, :span], whole))
        slots, count = len(state.token), min(TOP_LOGPROBS, state.seen.shape[1])
        out = Emitted(
            jnp.full((slots, steps), _NOTHING, jnp.int32),
            jnp.zeros((slots, steps)),
            jnp.zeros((slots, steps, count), jnp.int32),
            jnp.zeros((slots, steps, count)),
        )

        def unfinished(carry: tuple[Array, State, Emitted]) -> Array:
            step, state, _ = carry
            return (step < steps) & ~jnp.all(state.done)

        def one(carry: tuple[Array, State, Emitted]) -> tuple[Array, State, Emitted]:
            step, state, out = carry
            state = state._replace(position=state.position + ~state.done)
            lazy, cache = logits_of(graph, params, state.token[:, None], state.position[:, None], dtype, state.cache)
            logits = multiply_out(lazy.hidden[:, 0], lazy.kernel, lazy.softcap)
            state, parts = _advance(state._replace(cache=cache), logits)
            out = Emitted(*(all_.at[:, step].set(part) for all_, part in zip(out, parts, strict=True)))
            return step + 1, state, out

        _, state, out = jax.lax.while_loop(unfinished, one, (jnp.int32(0), state, out))
        cache = jax.tree.map(lambda old, part: old.at[:, :, :, :span].set(part), whole, state.cache)
        return state._replace(cache=split(cache)), out

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
        """An engine of one model.

        Args:
            model: with its weights and tokenizer.
            max_num_seqs: requests at a time.
            max_model_len: tokens of a request with its answer; by default the model's context.
            steps: tokens per dispatch: how often text is passed on and requests are let in.
            enable_prefix_caching: a request does not compute again what a free slot still has of its prompt, as of the
                turn before in a conversation. Requests are then prefilled one at a time.
        """
        multiple = model.row_multiple
        self.model = model
        self.slots = -(-max_num_seqs // multiple) * multiple
        self.length = min(max_model_len or model.context, model.context)
        self._steps, self._keeps_prefixes = steps, enable_prefix_caching
        self._empty, self._prefill, self._decode = _compiled(model.graph, model.compute_dtype, model.layout)
        self.waiting: deque[EngineRequest] = deque()
        self.active: dict[int, EngineRequest] = {}  # by slot
        self._held: list[list[int]] = [[] for _ in range(self.slots)]  # tokens whose keys and values a slot has
        self._state: State | None = None

    # ---- requests ----

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError for a prompt that is empty or leaves no room for a token."""
        if not 0 < len(request.prompt) < self.length:
            raise ValueError(f"a prompt must have between 1 and {self.length - 1} tokens")
        stop_ids = self._stop_ids(request)
        if len(stop_ids) > _MOST_STOP_IDS:
            raise ValueError(f"a request may have {_MOST_STOP_IDS} stop tokens, not {len(stop_ids)}")
        request.detokenizer = Detokenizer(self.model.tokenizer, request.params.stop)
        self.waiting.append(request)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_done: Callable[[int, Generation], None] = lambda _index, _generation: None,
    ) -> list[Generation]:
        """What follows each prompt (token ids), in the order of the prompts; random draws are named by that order.

        `on_done` is called with the index of a prompt and what follows it as they end.
        """
        results: dict[int, Generation] = {}

        def ended(index: int, _text: str, generation: Generation | None) -> None:
            if generation is not None:
                results[index] = generation
                on_done(index, generation)

        for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
            self.add(EngineRequest(prompts[index], params, partial(ended, index), index))
        while self.waiting or self.active:
            self.step()
        return [results[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Pieces of the text that follows a prompt, as they come. What it shares with the one before is kept."""
        pieces: list[str] = []
        request = EngineRequest(prompt, params, lambda text, _: pieces.append(text))
        self.add(request)
        try:
            while self.waiting or self.active:
                self.step()
                while pieces:
                    if piece := pieces.pop(0):
                        yield piece
        finally:
            request.cancelled = True
            self.step()  # its slot is free

    def warm_up(self) -> None:
        """Compile every program that requests can need, so that no client waits for one."""
        for bucket in self._buckets():
            for start in (0, 1):
                self._fill(
                    [EngineRequest([PAD] * min(bucket, self.length - 2), SamplingParams(2), _ignored)], [0], start
                )
        for span in self._spans():
            assert self._state is not None
            self._state, _ = self._decode(self.model.params, self._state, steps=self._steps, span=span)
        self.reset()

    def reset(self) -> None:
        """Forget all requests and what the slots hold, as after an error of the device."""
        self.waiting.clear()
        self.active.clear()
        self._held = [[] for _ in range(self.slots)]
        self._state = None

    # ---- one step ----

    def step(self) -> None:
        """Let waiting requests into free slots, then generate some tokens for every slot."""
        for slot in [slot for slot, request in self.active.items() if request.cancelled]:
            self._leave(slot)
        self.waiting = deque(request for request in self.waiting if not request.cancelled)
        self._admit()
        if not self.active:
            return
        assert self._state is not None
        idle = np.array([slot not in self.active for slot in range(self.slots)])
        state = self._state._replace(done=self._state.done | self.model.place(idle))
        longest = max(len(request.prompt) + len(request.tokens) for request in self.active.values())
        span = next(span for span in self._spans() if span >= min(longest + self._steps, self.length))
        self._state, emitted = self._decode(self.model.params, state, steps=self._steps, span=span)
        self._push(emitted, {slot: slot for slot in self.active})

    def _admit(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self.active]
        while self.waiting and free:
            first = self.waiting[0]
            slot = max(free, key=lambda slot: self._shared(slot, first))
            shared = self._shared(slot, first)
            if self._keeps_prefixes and shared >= _WORTH_KEEPING:
                self._enter([self.waiting.popleft()], [slot], shared)
                free.remove(slot)
                continue
            # One request at a time, or all slots at once: every other number would be another program.
            alone = self._keeps_prefixes or len(self.waiting) == 1
            count = min(len(free), len(self.waiting), self.model.row_multiple if alone else self.slots)
            together = [self.waiting.popleft() for _ in range(count)]
            taken = sorted(free, key=lambda slot: len(self._held[slot]))[:count]  # what is longest is worth keeping
            free = [slot for slot in free if slot not in taken]
            self._enter(together, taken, 0)

    def _shared(self, slot: int, request: EngineRequest) -> int:
        """How many tokens of the prompt the slot holds, of which one is computed in any case."""
        most = len(request.prompt) - 1
        pairs = zip(self._held[slot], request.prompt[:most], strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(self._held[slot]), most))

    def _enter(self, requests: Sequence[EngineRequest], slots: Sequence[int], start: int) -> None:
        emitted = self._fill(requests, slots, start)
        for slot, request in zip(slots, requests, strict=True):
            self.active[slot] = request
        self._push(emitted, {slot: row for row, slot in enumerate(slots)})

    def _fill(self, requests: Sequence[EngineRequest], slots: Sequence[int], start: int) -> Emitted:
        """Prefill prompts from a start on, and choose the first token of each."""
        rows = self.model.row_multiple if len(requests) <= self.model.row_multiple else self.slots
        place, vocabulary = self.model.place, self.model.graph.shapes[self.model.graph.logits].width
        width = self._bucket(max(len(request.prompt) for request in requests) - start)
        padded = [*requests, *([None] * (rows - len(requests)))]
        tokens, seen = np.full((rows, width), PAD, np.int32), np.zeros((rows, vocabulary), bool)
        lengths, limit = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        stop_ids = np.full((rows, _MOST_STOP_IDS), _NOTHING - 1, np.int32)
        for row, request in enumerate(requests):
            prompt = np.asarray(request.prompt, np.int32)
            lengths[row] = len(prompt) - start
            tokens[row, : lengths[row]] = prompt[start:]
            seen[row, prompt] = True
            limit[row] = min(request.params.max_new_tokens, self.length - len(prompt))
            row_stops = self._stop_ids(request)
            stop_ids[row, : len(row_stops)] = row_stops
        zero = np.zeros(rows, np.int32)
        params = [SamplingParams() if request is None else request.params for request in padded]
        values: dict[str, Any] = {
            "cache": None,
            "token": zero,
            "position": zero,
            "generated": zero,
            "limit": limit,
            "done": limit <= 0,
            "row_index": np.array([0 if request is None else request.index for request in padded], np.int32),
            "stop_ids": stop_ids,
            "seen": seen,
            "wants_logprobs": np.array([one.logprobs is not None for one in params]),
            "sampling": SamplingTensors.of(params),
        }
        new = State(**values)
        if self._state is None:
            blank = jax.tree.map(lambda leaf: np.zeros((self.slots, *leaf.shape[1:]), leaf.dtype), new)
            blank = jax.tree.map(place, blank._replace(done=np.ones(self.slots, bool)))
            self._state = self._empty(blank, slots=self.slots, length=self.length)
        targets = np.array([*slots, *([self.slots] * (rows - len(slots)))], np.int32)
        starts = np.full(rows, start, np.int32)
        state, self._state = self._state, None  # it is given to the device
        self._state, emitted = self._prefill(
            self.model.params,
            state,
            jax.tree.map(place, new),
            *map(place, (tokens, starts, lengths, targets)),
            fresh=start == 0,
        )
        for slot, request in zip(slots, requests, strict=True):
            self._held[slot] = list(request.prompt)
        return emitted

    def _push(self, emitted: Emitted, rows: dict[int, int]) -> None:
        """Pass on what was generated in slots, by their rows of `emitted`, and free the slots that are done."""
        assert self._state is not None
        done = self.model.on_host(self._state.done)
        tokens = self.model.on_host(emitted.token)
        parts: tuple[np.ndarray, ...] | None = None
        for slot, row in rows.items():
            request = self.active[slot]
            logprobs: list[TokenLogprobs] = []
            if request.params.logprobs is not None:
                parts = parts or tuple(map(self.model.on_host, emitted[1:]))
                logprobs = token_logprobs(tokens[row], *(part[row] for part in parts), count=request.params.logprobs)
            text = request.push(tokens[row].tolist(), logprobs, frozenset(self._stop_ids(request)))
            assert request.detokenizer is not None
            ended = bool(done[slot]) or request.detokenizer.stopped
            # A slot that is done writes its last token where the one before it was, as long as others go on.
            self._held[slot] = [*request.prompt, *request.tokens][:-2]
            generation = None
            if ended:
                before = len(request.detokenizer.released)
                generation = request.result()
                text += generation.text[before:]
                self._leave(slot)
            if not request.cancelled and (ended or text):
                request.on_text(text, generation)

    def _leave(self, slot: int) -> None:
        del self.active[slot]

    def _stop_ids(self, request: EngineRequest) -> tuple[int, ...]:
        own = request.params.stop_token_ids
        return self.model.tokenizer.stops if own is None else own

    # ---- shapes ----

    def _buckets(self) -> list[int]:
        """The lengths that prompts are padded to: powers of two, and the whole length."""
        found, size = [], _SHORTEST_BUCKET
        while size < self.length:
            found.append(size)
            size *= 2
        return [*found, self.length]

    def _bucket(self, length: int) -> int:
        return next(size for size in self._buckets() if size >= length)

    def _spans(self) -> list[int]:
        """The lengths of cache that a decode reads: short conversations need not look at all of a long one."""
        return [self.length // 4, self.length] if self.length >= 4 * _SHORTEST_BUCKET else [self.length]


def _ignored(_text: str, _generation: Generation | None) -> None:
    """The news of a request that nobody waits for."""


def token_logprobs(
    tokens: np.ndarray, logprobs: np.ndarray, top_ids: np.ndarray, top_values: np.ndarray, *, count: int
) -> list[TokenLogprobs]:
    """The log-probabilities of one row's tokens, with `count` of the most likely ones of each."""
    return [
        TokenLogprobs(
            int(token),
            float(logprobs[step]),
            tuple(zip(top_ids[step, :count].tolist(), top_values[step, :count].tolist(), strict=True)),
        )
        for step, token in enumerate(tokens)
    ]


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    on_done: Callable[[int, Generation], None] = lambda _index, _generation: None,
    *,
    max_num_seqs: int = 16,
) -> list[Generation]:
    """What follows each prompt, by an engine that is as large as these prompts need; see `Engine.generate`."""
    if not prompts:
        return []
    needed = max(map(len, prompts)) + params.max_new_tokens
    length = max(_SHORTEST_BUCKET, 1 << (needed - 1).bit_length())
    slots = min(max_num_seqs, 1 << (len(prompts) - 1).bit_length())
    return Engine(model, max_num_seqs=slots, max_model_len=length).generate(prompts, params, on_done)


@lru_cache(maxsize=8)
def _scored(graph: Graph, dtype: str, layout: MeshLayout | None) -> Any:
    @jax.jit
    def score(params: Tree, tokens: Int[Array, "R S"]) -> tuple[Array, ...]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        lazy, _ = logits_of(graph, params, tokens, positions, dtype, layout=layout)
        hidden, following = lazy.hidden[0, :-1], tokens[0, 1:]
        return top_logprobs(multiply_out(hidden, lazy.kernel, lazy.softcap), following, jnp.bool_(True))

    return score


def prompt_logprobs(model: LoadedModel, prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The log-probability of every token of a prompt but the first, given those before it."""
    width = min(max(_SHORTEST_BUCKET, 1 << (len(prompt) - 1).bit_length()), model.context)
    tokens = np.full((model.row_multiple, width), PAD, np.int32)
    tokens[:, : len(prompt)] = prompt
    scored = _scored(model.graph, model.compute_dtype, model.layout)(model.params, model.place(tokens))
    return token_logprobs(np.asarray(prompt[1:]), *map(model.on_host, scored), count=count)

"""One engine for all generation: fixed slots, prefill by length bucket, one decode program, a donated KV cache.

`Engine.step` admits waiting requests into free slots, then generates some tokens for every slot. The text of a request
does not depend on the slots beside it: its random draws are folded from its own seed, index and step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import takewhile
from operator import eq
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from affinage.config.training import AttentionImplementation
from affinage.data.special_tokens import PAD
from affinage.data.tokenizer import Tokenizer
from affinage.generation.sampling import Detokenizer, SamplingParams, SamplingTensors, choose
from affinage.model.apply_config import ApplyConfig
from affinage.model.forward import apply, for_decoding, init_cache
from affinage.model.graph import Graph
from affinage.model.layer import PyTree
from affinage.model.layers.embedding import Logits, multiply_out
from affinage.parallel.sharding import MeshLayout

TOP_LOGPROBS = 20  # the largest number of alternatives of a token
_NOTHING = -1  # stands where a row generates no token
_SHORTEST_BUCKET = 64  # tokens of a padded prompt, and of a cache
_WORTH_KEEPING = 16  # tokens of a prompt that a slot holds already
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class LoadedModel:
    """A graph with its weights and tokenizer, on one device or sharded over a mesh."""

    graph: Graph
    params: PyTree
    tokenizer: Tokenizer
    name: str
    context: int  # the longest row in tokens
    layout: MeshLayout | None = None  # None: the default device
    system_prompt: str = ""  # of conversations without a system message
    compute_dtype: str = "float32"
    chat: bool = False  # whether it was trained to chat; a template of its tokenizer alone is no sign of that

    def place(self, array: ArrayLike) -> Any:
        """Return `array` with its rows split over the mesh; without a mesh, jit puts it on the device."""
        if self.layout is None:
            return array
        sharding = self.layout.batch_sharding
        whole = np.asarray(array)  # the same on every host, each of which has some of the devices
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def on_host(self, array: Array) -> np.ndarray:
        """Return a computed array as numpy; where several hosts have parts of it, all of them must call this."""
        has_all = array.is_fully_addressable or array.is_fully_replicated
        return np.asarray(array if has_all else process_allgather(array, tiled=True))

    @property
    def row_multiple(self) -> int:
        """What the number of rows of a batch must be a multiple of."""
        return 1 if self.layout is None else self.layout.parts("batch")


def logits_of(
    graph: Graph,
    params: PyTree,
    tokens: Int[Array, "B S"],
    dtype: str,
    cache: PyTree | None = None,
    *,
    places: Mapping[str, Int[Array, "B S"]] = MappingProxyType({}),
    layout: MeshLayout | None = None,
    **config: Any,
) -> tuple[Logits, PyTree | None]:
    """Return the logits of rows, not yet multiplied out; and the advanced cache if one is given.

    `places` are the batch's `positions`, by default from 0 on, and its `segment_ids` and `prefix_segment_ids` if rows
    hold several texts. `config` is more of `ApplyConfig`: with segments, or a cache unless rows are computed
    `from_start`, attention is xla's.
    """
    config |= {} if layout is None else {"layout": layout}
    how = ApplyConfig(compute_dtype=jnp.dtype(dtype), cache=cache, until=graph.logits, **config)
    outputs = apply(graph, params, {"tokens": tokens, **places}, how)
    return outputs.values[graph.logits], outputs.cache


@dataclass(eq=False)
class EngineRequest:
    """A prompt (token ids) to be continued, and what follows it so far."""

    prompt: Sequence[int]
    params: SamplingParams
    index: int = 0  # distinguishes requests of the same prompt and seed
    cancelled: bool = False  # gives its slot back at the next step
    tokens: list[int] = field(default_factory=list)  # up to the one that completed a stop string, without a final eos
    text: str = ""  # up to a stop string
    finish_reason: str = ""  # once it has ended: eos (a token that ends a text or a turn), stop or length
    limit: int = 0  # the largest number of tokens to generate; set by `Engine.submit`, as is the next
    detokenizer: Detokenizer = field(init=False)


Event = tuple[EngineRequest, str, bool]  # new text of a request, and whether it has ended


class Rows(NamedTuple):
    """Where each row stands, made from the requests for every dispatch; at its limit it has ended."""

    sampling: SamplingTensors
    token: Int[Array, "B"]  # the last one, not yet in the cache
    position: Int[Array, "B"]  # of that token
    generated: Int[Array, "B"]
    limit: Int[Array, "B"]  # the largest number of tokens; after a token that ends the text, the number generated
    number: Int[Array, "B"]  # of the request, for its draws


@lru_cache(maxsize=8)
def _compiled(graph: Graph, dtype: str, layout: MeshLayout | None, stops: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """The jitted programs of a graph; jit keeps one executable per shape. `stops` are the ids that end a text."""

    def sharded(cache: Any) -> Any:
        axes = (None, "batch", "kv_heads", None, "head_dim")
        return cache if layout is None else jax.tree.map(lambda leaf: layout.constrain(leaf, axes), cache)

    def advance(rows: Rows, logits: Logits) -> tuple[Rows, Int[Array, "B"]]:
        """Choose a token for every row that is not done; the others stay as they are."""
        done = rows.generated >= rows.limit
        chosen = choose(multiply_out(logits.hidden[:, 0], logits.kernel), rows.sampling, rows.number, rows.generated)
        generated = rows.generated + ~done
        stopped = jnp.isin(chosen, jnp.array(stops, jnp.int32)) & ~rows.sampling.ignore_eos & ~done
        advanced = rows._replace(
            token=jnp.where(done, rows.token, chosen),
            position=rows.position + ~done,
            generated=generated,
            limit=jnp.where(stopped, generated, rows.limit),
        )
        return advanced, jnp.where(done, _NOTHING, chosen)

    @partial(jax.jit, static_argnames=("slots", "length"))
    def empty(slots: int, length: int) -> Any:
        return sharded(init_cache(graph, slots, length, jnp.dtype(dtype)))

    @partial(jax.jit, donate_argnames=("cache",))
    def prefill(
        params: PyTree,
        cache: Any,
        rows: Rows,
        tokens: Int[Array, "rows S"],
        lengths: Int[Array, " rows"],
        slots: Int[Array, " rows"],
        starts: Int[Array, " rows"] | None = None,
    ) -> tuple[Any, Int[Array, "rows 1"]]:
        """Put prompts into slots, from `starts` on if given; rows of a slot that does not exist are dropped."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        if starts is None:  # nothing is read of the cache, so that a kernel can compute attention
            part = sharded(init_cache(graph, len(tokens), tokens.shape[1], jnp.dtype(dtype)))
        else:
            positions += starts[:, None]
            part = jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=1, mode="clip"), cache)
        # Padding to the right enters the cache as well, and is overwritten before any query sees it.
        last: dict[str, Any] = {"logit_positions": (lengths - 1)[:, None], "from_start": starts is None}
        kernel: AttentionImplementation = "auto" if layout is None else "xla"
        places = {"positions": positions}
        lazy, part = logits_of(graph, params, tokens, dtype, part, places=places, attention=kernel, **last)
        _, first = advance(rows, lazy)

        def insert(old: Array, new: Array) -> Array:
            return old.at[:, slots, :, : new.shape[3]].set(new, mode="drop")

        return sharded(jax.tree.map(insert, cache, part)), first[:, None]

    @partial(jax.jit, static_argnames=("steps", "span"), donate_argnames=("cache",))
    def decode(params: PyTree, cache: Any, rows: Rows, steps: int, span: int) -> tuple[Any, Int[Array, "B steps"]]:
        """Up to `steps` tokens for every row; only the first `span` places of the cache are read and written."""

        def unfinished(carry: tuple[Array, Any, Rows, Array]) -> Array:
            step, _, rows, _ = carry
            return (step < steps) & jnp.any(rows.generated < rows.limit)

        def generate_token(carry: tuple[Array, Any, Rows, Array]) -> tuple[Array, Any, Rows, Array]:
            step, part, rows, out = carry
            places = {"positions": rows.position[:, None]}
            lazy, part = logits_of(graph, params, rows.token[:, None], dtype, part, places=places)
            rows, chosen = advance(rows, lazy)
            return step + 1, part, rows, out.at[:, step].set(chosen)

        part = jax.tree.map(lambda leaf: leaf[:, :, :, :span], cache)
        out = jnp.full((len(rows.token), steps), _NOTHING, jnp.int32)
        _, part, _, out = jax.lax.while_loop(unfinished, generate_token, (jnp.int32(0), part, rows, out))
        return sharded(jax.tree.map(lambda old, new: old.at[:, :, :, :span].set(new), cache, part)), out

    prepare = jax.jit(lambda params: for_decoding(graph, params, jnp.dtype(dtype)))
    return prepare, empty, prefill, decode


class Engine:
    """Generates with one model, up to `max_num_seqs` requests at a time, of at most `max_model_len` tokens each.

    `steps` is the number of tokens per dispatch: how often text is passed on and requests are admitted. With
    `enable_prefix_caching` a request skips the part of its prompt that a free slot still holds, as from the turn before
    in a conversation; requests are then prefilled one at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        steps: int = 16,
        enable_prefix_caching: bool = False,
    ) -> None:
        self.model = model
        self.slots = -(-max_num_seqs // model.row_multiple) * model.row_multiple
        self.length = min(max_model_len or model.context, model.context)
        self._steps, self._prefix_caching, self._stops = steps, enable_prefix_caching, tuple(model.tokenizer.stops)
        programs = _compiled(model.graph, model.compute_dtype, model.layout, self._stops)
        prepare, self._empty, self._prefill, self._decode = programs
        self._params = prepare(model.params)
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
        self._cache: Any = None  # on the device: arrays [layers, slots, K, T, D], donated from program to program

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; another thread may call this during a step.

        Raises ValueError for a prompt that is empty or leaves no room for a token.
        """
        if not 0 < len(request.prompt) < self.length:
            raise ValueError(f"a prompt must have between 1 and {self.length - 1} tokens")
        request.limit = min(request.params.max_new_tokens, self.length - len(request.prompt))
        request.detokenizer = Detokenizer(self.model.tokenizer, request.params.stop)
        self.waiting.append(request)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Yield pieces of the text that follows a prompt, as they come."""
        request = EngineRequest(prompt, params)
        self.submit(request)
        try:
            while self.waiting or self.active:
                yield from [text for _, text, _ in self.step() if text]
        finally:
            request.cancelled = True
            self.step()  # frees its slot

    def warm_up(self) -> None:
        """Compile every program that requests can need, so that no client waits for one."""
        for bucket in self._buckets:
            for start in (0, 1) if self._prefix_caching else (0,):
                self._fill([_unused(min(bucket + start, self.length - 1))], [0], start)
            token_logprobs(self.model, [PAD] * bucket, 1)
        for span in self._spans:
            self._dispatch(self._decode, [_unused(1)] * self.slots, steps=self._steps, span=span)
        self.reset()

    def step(self) -> list[Event]:
        """Admit waiting requests into free slots, then generate some tokens for every slot; return the new texts."""
        self.active = {slot: request for slot, request in self.active.items() if not request.cancelled}
        events = self._admit()
        if not self.active:
            return events
        longest = max(len(request.prompt) + len(request.tokens) for request in self.active.values())
        span = next(span for span in self._spans if span >= min(longest + self._steps, self.length))
        # A slot without a request writes after what it holds.
        requests = [self.active.get(slot) or _unused(len(held) + 1) for slot, held in enumerate(self._held)]
        emitted = self._dispatch(self._decode, requests, steps=self._steps, span=span)
        return events + self._events(emitted, range(self.slots))

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        # The slots that hold least come first; what the others hold may still be of use.
        free = sorted(set(range(self.slots)) - self.active.keys(), key=lambda slot: len(self._held[slot]))
        while free and self.waiting:
            count = min(1 if self._prefix_caching else len(free), len(self.waiting))
            first = [self.waiting.popleft() for _ in range(count)]
            requests, start = [request for request in first if not request.cancelled], 0
            if not requests:
                continue
            if self._prefix_caching:
                prompt = requests[0].prompt[:-1]  # the last token is computed in any case
                shared = {slot: sum(takewhile(bool, map(eq, self._held[slot], prompt))) for slot in free}
                best = max(free, key=shared.__getitem__)
                if shared[best] >= _WORTH_KEEPING:
                    start = shared[best]
                    free.insert(0, free.pop(free.index(best)))
            slots, free = free[: len(requests)], free[len(requests) :]
            emitted = self._fill(requests, slots, start)
            self.active |= dict(zip(slots, requests, strict=True))
            events += self._events(emitted, slots)
        return events

    def _fill(self, requests: Sequence[EngineRequest], slots: Sequence[int], start: int) -> Array:
        """Prefill prompts from a start on, and choose the first token of each."""
        # One or all slots at a time: every other number of rows would be another program.
        count = self.model.row_multiple if len(requests) <= self.model.row_multiple else self.slots
        longest = max(len(request.prompt) for request in requests) - start
        width = next(bucket for bucket in self._buckets if bucket >= longest)
        tokens = np.full((count, width), PAD, np.int32)
        lengths = np.ones(count, np.int32)
        places = np.full(count, self.slots, np.int32)  # a slot that does not exist, for rows without a request
        places[: len(slots)] = slots
        for row, (slot, request) in enumerate(zip(slots, requests, strict=True)):
            lengths[row] = len(request.prompt) - start
            tokens[row, : lengths[row]] = request.prompt[start:]
            self._held[slot] = list(request.prompt)
        arrays = [tokens, lengths, places, *([np.full(count, start, np.int32)] if start else [])]
        return self._dispatch(self._prefill, [*requests, *[_unused(1)] * (count - len(requests))], *arrays)

    def _dispatch(self, program: Any, requests: Sequence[EngineRequest], *arrays: np.ndarray, **static: Any) -> Array:
        """Run a program on the donated cache, with one row for each request; return the tokens that it chose."""
        columns: Any = np.array(
            [
                [(each.tokens or each.prompt)[-1] for each in requests],
                [len(each.prompt) + len(each.tokens) - 1 for each in requests],
                [len(each.tokens) for each in requests],
                [each.limit for each in requests],
                [each.index for each in requests],
            ],
            np.int32,
        )
        rows = Rows(SamplingTensors.of([each.params for each in requests]), *columns)
        cache, self._cache = self._cache or self._empty(slots=self.slots, length=self.length), None
        rows, arrays = jax.tree.map(self.model.place, (rows, arrays))
        self._cache, emitted = program(self._params, cache, rows, *arrays, **static)
        return emitted

    def _events(self, emitted: Array, slots: Sequence[int]) -> list[Event]:
        """The new texts of slots, one for each row of `emitted`; slots whose requests are done become free."""
        events: list[Event] = []
        for slot, tokens in zip(slots, self.model.on_host(emitted).tolist()):
            if (request := self.active.get(slot)) is None:
                continue
            text, is_eos, detokenizer = "", False, request.detokenizer
            # One by one, so that a stop string ends the text at the same place for any number of tokens a dispatch.
            for token in tokens:
                if token == _NOTHING or detokenizer.stopped:
                    break
                if is_eos := token in self._stops and not request.params.ignore_eos:
                    break
                request.tokens.append(token)
                text += detokenizer.push(token)
            self._held[slot] = [*request.prompt, *request.tokens][:-1]
            if ended := is_eos or detokenizer.stopped or len(request.tokens) >= request.limit:
                del self.active[slot]
                text += detokenizer.push(None)
                request.finish_reason = "stop" if detokenizer.stopped else "eos" if is_eos else "length"
            request.text += text
            if text or ended:
                events.append((request, text, ended))
        return events


def _unused(length: int) -> EngineRequest:
    """What a row without a request computes: nothing, at a place of its slot."""
    return EngineRequest([PAD] * length, _GREEDY)


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    on_done: Callable[[EngineRequest], None] = lambda _: None,
    *,
    max_num_seqs: int = 16,
) -> list[EngineRequest]:
    """Return a request for each prompt (token ids), in their order, with what follows it.

    The index of a prompt also names its random draws. The engine is as large as these prompts need. `on_done` is called
    with each request as it ends. Raises ValueError for a prompt that is empty or leaves no room for a token.
    """
    if not prompts:
        return []
    length = _bucket(max(map(len, prompts)) + params.max_new_tokens)
    engine = Engine(model, max_num_seqs=min(max_num_seqs, 1 << (len(prompts) - 1).bit_length()), max_model_len=length)
    requests = [EngineRequest(prompt, params, index) for index, prompt in enumerate(prompts)]
    for request in sorted(requests, key=lambda request: len(request.prompt)):
        engine.submit(request)
    while engine.waiting or engine.active:
        for request, _, ended in engine.step():
            if ended:
                on_done(request)
    return requests


def _bucket(tokens: int) -> int:
    return max(_SHORTEST_BUCKET, 1 << (tokens - 1).bit_length())


@partial(jax.jit, static_argnums=(0, 1, 2))
def _scores(
    graph: Graph, dtype: str, layout: MeshLayout | None, params: PyTree, tokens: Int[Array, "R S"]
) -> tuple[Int[Array, "S-1 N"], Float[Array, "S-1 N"]]:
    """Each token but the first of the first row, then the likeliest ones in its place; and their log-probabilities."""
    lazy, _ = logits_of(graph, params, tokens, dtype, layout=layout)
    logprobs = jax.nn.log_softmax(multiply_out(lazy.hidden[0, :-1], lazy.kernel), axis=-1)
    _, likeliest = jax.lax.top_k(logprobs, min(TOP_LOGPROBS, logprobs.shape[1]))
    ids = jnp.concatenate([tokens[0, 1:, None], likeliest], axis=1)
    return ids, jnp.take_along_axis(logprobs, ids, axis=1)


def token_logprobs(model: LoadedModel, tokens: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
    """Return for every token but the first (id, log-probability), and those of the `count` likeliest in its place."""
    padded = np.full((model.row_multiple, min(_bucket(len(tokens)), model.context)), PAD, np.int32)
    padded[:, : len(tokens)] = tokens
    scored = _scores(model.graph, model.compute_dtype, model.layout, model.params, model.place(padded))
    ids, values = (model.on_host(part)[: len(tokens) - 1, : count + 1].tolist() for part in scored)
    return [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]

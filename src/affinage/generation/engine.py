"""One engine for all generation: fixed slots, prefill by length bucket, one decode program, a donated KV cache.

`Engine.step` admits waiting requests into free slots, then generates some tokens for every slot. The text of a request
does not depend on the slots beside it: its random draws are folded from its own seed, index and step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Array, Float, Int

from affinage.data.special_tokens import PAD
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.generation.sampling import EngineRequest, Rows, SamplingParams, choose, rows_of
from affinage.model.apply_config import ApplyConfig
from affinage.model.forward import apply, for_decoding, init_cache
from affinage.model.graph import Graph
from affinage.model.layer import Batch, PyTree
from affinage.model.layers.dense import product32
from affinage.model.layers.embedding import Logits, multiply_out
from affinage.parallel.sharding import MeshLayout

TOP_LOGPROBS = 20  # the largest number of alternatives of a token
_SHORTEST_BUCKET = 64  # tokens of a padded prompt, and of a cache
_WORTH_KEEPING = 16  # tokens of a prompt that a slot holds already

Event = tuple[EngineRequest, str, bool]  # new text of a request, and whether it has ended
Program = tuple[Graph, str, MeshLayout | None]  # of a graph in a dtype, on one device or sharded


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

    def place(self, array: Any) -> Any:
        """Return `array` with its rows split over the mesh; without a mesh, jit puts it on the device."""
        if self.layout is None:
            return array
        whole = np.asarray(array)  # the same on every host, each of which has some of the devices
        return jax.make_array_from_callback(whole.shape, self.layout.batch_sharding, lambda index: whole[index])

    def on_host(self, array: Array) -> np.ndarray:
        """Return a computed array as numpy; where several hosts have parts of it, all of them must call this."""
        has_all = array.is_fully_addressable or array.is_fully_replicated
        return np.asarray(array if has_all else process_allgather(array, tiled=True))

    @property
    def row_multiple(self) -> int:
        """What the number of rows of a batch must be a multiple of."""
        return 1 if self.layout is None else self.layout.parts("batch")


def logits_of(program: Program, params: PyTree, batch: Batch, **config: Any) -> tuple[Logits, Any]:
    """Return the logits of a batch, not yet multiplied out, and the advanced cache; `config` is of `ApplyConfig`."""
    graph, dtype, layout = program
    config |= {} if layout is None else {"layout": layout}
    outputs = apply(graph, params, batch, ApplyConfig(compute_dtype=jnp.dtype(dtype), until=graph.logits, **config))
    return outputs.values[graph.logits], outputs.cache


@partial(jax.jit, static_argnames=("program", "slots", "length"))
def _empty_cache(program: Program, slots: int, length: int) -> PyTree:
    """A tree of arrays [layers, slots, K, length, D]."""
    return _sharded(program, init_cache(program[0], slots, length, jnp.dtype(program[1])))


def _sharded(program: Program, cache: PyTree) -> PyTree:
    layout, axes = program[2], (None, "batch", "kv_heads", None, "head_dim")
    return cache if layout is None else jax.tree.map(lambda leaf: layout.constrain(leaf, axes), cache)


@partial(jax.jit, static_argnames="program", donate_argnames="cache")
def _prefill(
    program: Program, params: PyTree, cache: PyTree, tokens: Array, slots: Array, starts: Array | None
) -> PyTree:
    """Put prompts [R, S] into slots [R], from their starts [R] on; rows of a slot that does not exist are dropped.

    Padding to the right enters the cache as well, and is overwritten before any query sees it.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    if starts is None:  # nothing is read of the cache, so that a kernel can compute attention
        part = _empty_cache(program, *tokens.shape)
    else:
        positions += starts[:, None]
        part = jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=1, mode="clip"), cache)
    batch, attention = {"tokens": tokens, "positions": positions}, "auto" if program[2] is None else "xla"
    _, part = logits_of(program, params, batch, cache=part, attention=attention, from_start=starts is None)

    def insert(old: Array, new: Array) -> Array:
        return old.at[:, slots, :, : new.shape[3]].set(new, mode="drop")

    return _sharded(program, jax.tree.map(insert, cache, part))


@partial(jax.jit, static_argnames=("program", "most", "span"), donate_argnames="cache")
def _decode(
    program: Program, params: PyTree, cache: PyTree, rows: Rows, steps: Int[Array, ""], most: int, span: int
) -> tuple[PyTree, Int[Array, "B most"]]:
    """Generate `steps` tokens, at most `most`, for every row; read and write the first `span` places of the cache."""

    def generate_token(step: Array, carry: tuple[PyTree, Rows, Array]) -> tuple[PyTree, Rows, Array]:
        part, rows, out = carry
        batch = {"tokens": rows["token"][:, None], "positions": rows["position"][:, None]}
        lazy, part = logits_of(program, params, batch, cache=part)
        # XLA:CPU multiplies a large matrix from the left as it lies, and copies one from the right.
        token = choose(product32("vd,bd->vb", lazy.kernel, lazy.hidden[:, 0]), rows)
        rows = rows | {"token": token, "position": rows["position"] + 1, "generated": rows["generated"] + 1}
        return part, rows, out.at[:, step].set(token)

    part = jax.tree.map(lambda leaf: leaf[:, :, :, :span], cache)
    out = jnp.zeros((len(rows["token"]), most), jnp.int32)
    part, _, out = jax.lax.fori_loop(0, steps, generate_token, (part, rows, out))
    return _sharded(program, jax.tree.map(lambda old, new: old.at[:, :, :, :span].set(new), cache, part)), out


@partial(jax.jit, static_argnames="program")
def _scores(program: Program, params: PyTree, tokens: Array) -> tuple[Int[Array, "S N"], Float[Array, "S N"]]:
    """Each token but the first of the first row, then the likeliest ones in its place; and their log-probabilities."""
    lazy, _ = logits_of(program, params, {"tokens": tokens})
    logprobs = jax.nn.log_softmax(multiply_out(lazy.hidden[0, :-1], lazy.kernel), axis=-1)
    _, likeliest = jax.lax.top_k(logprobs, min(TOP_LOGPROBS, logprobs.shape[1]))
    ids = jnp.concatenate([tokens[0, 1:, None], likeliest], axis=1)
    return ids, jnp.take_along_axis(logprobs, ids, axis=1)


class Engine:
    """Generates with one model, up to `max_num_seqs` requests at a time, of at most `max_model_len` tokens each.

    If `interactive`, text is passed on and requests are admitted more often, and a request skips the part of its prompt
    that a free slot still holds, as from the turn before in a conversation; requests are then prefilled one at a time.
    """

    def __init__(
        self, model: LoadedModel, *, max_num_seqs: int = 16, max_model_len: int | None = None, interactive: bool = False
    ) -> None:
        self.model = model
        self.slots = -(-max_num_seqs // model.row_multiple) * model.row_multiple
        self.length = min(max_model_len or model.context, model.context)
        self._interactive, self._stops, self._steps = interactive, model.tokenizer.stops, 4 if interactive else 16
        graph, needed = model.graph, model.graph.needed_for(model.graph.logits)
        for node in (node for node in graph.nodes if node.name in needed and not node.layer.joins):
            if not node.layer.cache(node.takes, 1, 1):
                what = f"node `{node.name}` may look at earlier tokens, and keeps none to generate by"
                raise UserError(what, fix="Register it with joins=True if it looks at none, else give it a `cache`.")
        self._program: Program = model.graph, model.compute_dtype, model.layout
        prepare = jax.jit(for_decoding, static_argnames=("graph", "dtype"))
        self._params = prepare(graph=model.graph, params=model.params, dtype=jnp.dtype(model.compute_dtype))
        # Short conversations need not read all of a long cache.
        self._spans = [self.length // 4, self.length] if self.length >= 4 * _SHORTEST_BUCKET else [self.length]
        self.reset()

    def reset(self) -> None:
        """Forget all requests and what the slots hold, as after an error of the device."""
        self.waiting: deque[EngineRequest] = deque()
        self.active: dict[int, EngineRequest] = {}  # by slot
        self._held: dict[int, list[int]] = {slot: [] for slot in range(self.slots)}  # tokens that the cache has of each
        self._cache = _empty_cache(self._program, self.slots, self.length)  # donated from program to program

    def submit(self, request: EngineRequest) -> None:
        """Queue a request, also from another thread. ValueError: its prompt is empty, or leaves no room for a token."""
        if not 0 < len(request.prompt) < self.length:
            raise ValueError(f"a prompt must have between 1 and {self.length - 1} tokens")
        request.limit = min(request.params.max_new_tokens, self.length - len(request.prompt))
        self.waiting.append(request)

    def run(self, requests: Sequence[EngineRequest]) -> Iterator[Event]:
        """Queue requests and yield what follows them, until all have ended; those that are left alone are cancelled."""
        for request in requests:
            self.submit(request)
        try:
            while self.waiting or self.active:
                yield from self.step()
        except KeyboardInterrupt:
            self.reset()  # a program may have had the cache
            raise
        finally:
            for request in requests:
                request.cancelled = True
            self.step()  # frees the slots

    def warm_up(self) -> None:
        """Compile every program that requests can need, so that no client waits for one."""
        for width in sorted({min(_bucket(tokens), self.length) for tokens in range(1, self.length + 1)}):
            for start in (0, 1) if self._interactive else (0,):
                self._fill({0: [PAD] * width}, start)
            token_logprobs(self.model, [PAD] * width, 1)
        for span in self._spans:
            self._generate(span)

    def step(self) -> list[Event]:
        """Admit waiting requests into free slots, then generate some tokens for every slot; return the new texts."""
        self.active = {slot: request for slot, request in self.active.items() if not request.cancelled}
        self._admit()
        if not self.active:
            return []
        longest = max(len(request.prompt) + len(request.tokens) for request in self.active.values())
        tokens = self._generate(next(span for span in self._spans if span >= min(longest + self._steps, self.length)))
        events = [self._receive(slot, tokens[slot].tolist()) for slot in list(self.active)]
        return [event for event in events if event[1] or event[2]]

    def _admit(self) -> None:
        """Put waiting requests into free slots, with the part of each prompt that its slot does not hold."""
        # The slots that hold least come first; what the others hold may still be of use.
        free = sorted(set(range(self.slots)) - self.active.keys(), key=lambda slot: len(self._held[slot]))
        while free and self.waiting:
            count, start = min(1 if self._interactive else len(free), len(self.waiting)), 0
            popped = [self.waiting.popleft() for _ in range(count)]
            requests = [request for request in popped if not request.cancelled]
            if self._interactive and requests:
                prompt = requests[0].prompt[:-1]
                shared = {slot: sum(takewhile(bool, map(eq, self._held[slot], prompt))) for slot in free}
                start = max([0, *(count for count in shared.values() if count >= _WORTH_KEEPING)])
                free.sort(key=lambda slot: shared[slot] < start)
            admitted = dict(zip(free, requests, strict=False))
            # The last token is the first that decoding reads.
            self._fill({slot: list(request.prompt[:-1]) for slot, request in admitted.items()}, start)
            self.active |= admitted
            free = free[len(admitted) :]

    def _fill(self, prompts: dict[int, list[int]], start: int) -> None:
        """Compute keys and values of prompts, by slot, from a start on."""
        longest = max(map(len, prompts.values()), default=0) - start
        if longest > 0:
            # One or all slots at a time: every other number of rows would be another program.
            count = self.model.row_multiple if len(prompts) <= self.model.row_multiple else self.slots
            tokens = np.full((count, min(_bucket(longest), self.length)), PAD, np.int32)
            slots = np.full(count, self.slots, np.int32)  # a slot that does not exist, for rows without a prompt
            for row, (slot, prompt) in enumerate(prompts.items()):
                tokens[row, : len(prompt) - start], slots[row] = prompt[start:], slot
            starts = np.full(count, start, np.int32) if start else None
            arrays = jax.tree.map(self.model.place, (tokens, slots, starts))
            self._cache = _prefill(self._program, self._params, self._cache, *arrays)
        self._held |= prompts

    def _generate(self, span: int) -> np.ndarray:
        """Return the next tokens of all slots, as many as any request may still get."""
        # A slot without a request computes something after what it holds.
        held = [EngineRequest([*held, PAD], SamplingParams()) for held in self._held.values()]
        requests = [self.active.get(slot, unused) for slot, unused in enumerate(held)]
        steps = min(self._steps, max(request.limit - len(request.tokens) for request in requests))  # of a dispatch
        rows = jax.tree.map(self.model.place, rows_of(requests))
        arguments = self._program, self._params, self._cache, rows, np.int32(steps), self._steps, span
        self._cache, tokens = _decode(*arguments)
        return self.model.on_host(tokens)[:, :steps]

    def _receive(self, slot: int, tokens: Sequence[int]) -> Event:
        """Add tokens to the request of a slot, which becomes free if it has ended."""
        request, tokenizer, text = self.active[slot], self.model.tokenizer, ""
        # One by one, so that a stop string ends the text at the same place for any number of tokens a dispatch.
        for token in tokens[: request.limit - len(request.tokens)]:
            if token in self._stops and not request.params.ignore_eos:
                request.finish_reason = "eos"
            else:
                text += request.push(token, tokenizer)
            if request.finish_reason:
                break
        self._held[slot] = [*request.prompt, *request.tokens][:-1]
        if request.finish_reason or len(request.tokens) >= request.limit:
            del self.active[slot]
            request.finish_reason = request.finish_reason or "length"
            text += request.push(None, tokenizer)
            if (count := request.params.logprobs) is not None:
                request.logprobs = token_logprobs(self.model, [*request.prompt, *request.tokens], count)
        return request, text, request.finish_reason != ""


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    on_done: Callable[[EngineRequest], None] = lambda _: None,
    *,
    max_num_seqs: int = 16,
) -> list[EngineRequest]:
    """Return a request for each prompt (token ids), in their order, with what follows it.

    The index of a prompt also names its random draws. `on_done` is called with each request as it ends. Raises
    ValueError for a prompt that is empty or leaves no room for a token.
    """
    if not prompts:
        return []
    needed = max(map(len, prompts)) + max(1, params.max_new_tokens)
    part = max(_SHORTEST_BUCKET, _bucket(needed) // 8)  # all of the cache is read for every token
    length, slots = -(-needed // part) * part, min(max_num_seqs, 1 << (len(prompts) - 1).bit_length())
    engine = Engine(model, max_num_seqs=slots, max_model_len=length)
    requests = [EngineRequest(prompt, params, index) for index, prompt in enumerate(prompts)]
    for request, _, ended in engine.run(sorted(requests, key=lambda request: len(request.prompt))):
        if ended:
            on_done(request)
    return requests


def _bucket(tokens: int) -> int:
    return max(_SHORTEST_BUCKET, 1 << (tokens - 1).bit_length())


def token_logprobs(model: LoadedModel, tokens: Sequence[int], count: int) -> list[list[tuple[int, float | None]]]:
    """(id, log-probability) of each token, then of the `count` likeliest in its place; (id, None) of the first."""
    padded = np.full((model.row_multiple, min(_bucket(len(tokens)), model.context)), PAD, np.int32)
    padded[:, : len(tokens)] = tokens
    scored = _scores((model.graph, model.compute_dtype, model.layout), model.params, model.place(padded))
    ids, values = (model.on_host(part)[: len(tokens) - 1, : count + 1].tolist() for part in scored)
    return [[(tokens[0], None)], *(list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))]

"""Generation for many who ask at different times: whoever comes joins the batch that is on its way.

One thread runs the device. Between two dispatches the rows that have ended leave the batch and those that wait are
prefilled, together, and join it. What a row says does not depend on who shares its batch: it is what `Generator` says.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from affinage.generation.decode import (
    Generation,
    Request,
    RowProgress,
    State,
    compiled,
    padded,
)
from affinage.generation.model import LoadedModel
from affinage.generation.sampling import GREEDY, Knobs, knobs_of_rows
from affinage.generation.shapes import power_of_two
from affinage.generation.text import TextStream

_STEPS = 4  # tokens per dispatch: how often text is passed on, and newcomers are let in
_ALWAYS = frozenset({"repetition_penalty"})  # so that the state of all rows is of one form; a penalty of 1 is none
# What is compiled: for greedy rows, with draws, and with filters, which sort the vocabulary. Each does what those
# before it do, and rows that ask for less get values that change nothing.
_COMPILED = (_ALWAYS, _ALWAYS | {"temperature"}, _ALWAYS | {"temperature", "top_k", "top_p", "min_p"})


class Full(Exception):
    """So many wait already that nobody else may."""


class Closed(Exception):
    """The engine takes nothing any more, or ended before an answer did."""


class Told(NamedTuple):
    """News of one row: the text that is new, and the whole once it has ended, or why it ended without one."""

    text: str
    generation: Generation | None = None
    error: Exception | None = None


class Ticket:
    """One row to be generated. `index` tells rows of the same prompt and seed apart; `tell` is called by the engine."""

    def __init__(self, prompt: Sequence[int], request: Request, tell: Callable[[Told], None], index: int = 0) -> None:
        self.prompt, self.request, self.tell, self.index = prompt, request, tell, index
        self.cancelled = self.ended = False
        self.began = time.monotonic()

    def cancel(self) -> None:
        """It is no longer wanted; its place is free after the dispatch that is under way."""
        self.cancelled = True


class Engine:
    """Generates with one model for everybody who submits tickets, up to `batch` rows at once."""

    def __init__(self, model: LoadedModel, *, batch: int = 8, queue: int = 64) -> None:
        self._model, self._batch, self._queue = model, batch, queue
        self._prefill, self._decode = compiled(model.graph, model.compute_dtype)
        self._stops = model.tokenizer.stops
        self._stop_ids = np.array(self._stops, np.int32)
        self._waiting: deque[Ticket] = deque()
        self._rows: list[tuple[Ticket, RowProgress] | None] = []  # by their place in the state
        self._state: State | None = None
        self._seconds = 1.0  # that a row takes, a running mean
        self._changed = threading.Condition()
        self.closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets, all or none. Raises Full or Closed."""
        with self._changed:
            if self.closed:
                raise Closed
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled)
            free = self._batch - self.active
            if len(self._waiting) + len(tickets) > self._queue + max(0, free):
                raise Full
            self._waiting.extend(tickets)
            self._changed.notify()

    @property
    def most(self) -> int:
        """Tickets that can be submitted together where nobody else has any; of more it is always full."""
        return self._batch + self._queue

    @property
    def active(self) -> int:
        """Rows that are being generated."""
        return sum(row is not None for row in self._rows)

    @property
    def waiting(self) -> int:
        """Rows that are not yet."""
        return len(self._waiting)

    @property
    def seconds_until_free(self) -> float:
        """How long the last one in the queue will wait, by how long rows took lately."""
        return self._seconds * (1 + len(self._waiting) / self._batch)

    def close(self) -> None:
        """Take nothing any more, tell everybody who is not served yet so, and end the thread."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.active or self.closed)
                if self.closed:
                    break
                newcomers = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._batch - self.active))]
            try:
                self._let_in([ticket for ticket in newcomers if not ticket.cancelled])
            except Exception as error:  # no memory for more rows, say: those that are under way go on
                self._fail(newcomers, error)
            try:
                self._step()
            except Exception as error:  # those concerned are told, and the next ones are served
                self._fail_all(error)
        self._fail_all(Closed())
        self._fail(list(self._waiting), Closed())
        self._waiting.clear()

    def _fail_all(self, error: Exception) -> None:
        """None of the rows can go on: their state was given to the device, which has not given one back."""
        self._fail([row[0] for row in self._rows if row is not None], error)
        self._rows, self._state = [], None

    def _fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """These tickets get no answer."""
        self._rows = [None if row is not None and row[0] in tickets else row for row in self._rows]
        for ticket in tickets:
            if not ticket.ended:
                ticket.ended = True
                ticket.tell(Told("", error=error))

    def _let_in(self, tickets: Sequence[Ticket]) -> None:
        """Prefill tickets, and make one batch of those and the rows that go on."""
        going_on = [place for place, row in enumerate(self._rows) if row is not None]
        batch = self._size(len(going_on) + len(tickets))
        if not tickets and (not going_on or batch == len(self._rows)):
            return
        states = [] if self._state is None else [self._state]
        rows, places = [self._rows[place] for place in going_on], list(going_on)
        if tickets:
            states.append(self._begin(tickets))
            new = [(ticket, RowProgress(self._stream(ticket), self._stops)) for ticket in tickets]
            places += range(len(self._rows), len(self._rows) + len(tickets))
            rows += new
        padding = batch - len(rows)
        state = _take(tuple(states), jnp.array([*places, *([places[0]] * padding)], jnp.int32))
        first = np.asarray(state.token)[:, None]  # waits: what goes wrong is known while there is still the old state
        self._rows, self._state = [*rows, *([None] * padding)], state
        if tickets:
            self._push(first, np.arange(len(going_on), len(rows)))

    def _size(self, rows: int) -> int:
        multiple = self._model.row_multiple
        return -(-power_of_two(max(1, rows)) // multiple) * multiple

    def _stream(self, ticket: Ticket) -> TextStream:
        return TextStream(self._model.tokenizer, ticket.request.stop_strings)

    def _begin(self, tickets: Sequence[Ticket]) -> State:
        """The state of tickets after their first token; every cache has room for the whole context."""
        batch, model = self._size(len(tickets)), self._model
        limits = [ticket.request.max_new_tokens for ticket in tickets]
        tokens, lengths, limit = padded([ticket.prompt for ticket in tickets], limits, batch, model.context)
        names = np.zeros(batch, np.int32)
        names[: len(tickets)] = [ticket.index for ticket in tickets]
        knobs, filters = self._sampling(tickets, batch)
        state, _ = self._prefill(
            model.params, model.place(tokens), model.place(lengths), model.place(limit), model.place(names), knobs,
            self._stop_ids, filters=filters, slots=model.context,
        )  # fmt: skip
        return state

    def _sampling(self, tickets: Sequence[Ticket | None], batch: int) -> tuple[Knobs, frozenset[str]]:
        samplings = [ticket.request.sampling if ticket else GREEDY for ticket in tickets]
        asked = _ALWAYS.union(*(sampling.filters for sampling in samplings))
        filters = next(some for some in _COMPILED if asked <= some)
        return knobs_of_rows([*samplings, *([GREEDY] * (batch - len(samplings)))]), filters

    def _step(self) -> None:
        """Some tokens for every row; rows that have ended, or are no longer wanted, leave."""
        for place, row in enumerate(self._rows):
            if row is not None and row[0].cancelled:
                self._rows[place] = None
        if self._state is None or not self.active:
            return
        gone = np.array([row is None for row in self._rows])
        state = self._state._replace(done=self._state.done | self._model.place(gone))
        tickets = [row[0] if row else None for row in self._rows]
        knobs, filters = self._sampling(tickets, len(tickets))
        self._state, emitted = self._decode(
            self._model.params, state, knobs, self._stop_ids, filters=filters, steps=_STEPS
        )
        self._push(np.asarray(emitted), np.arange(len(self._rows)))

    def _push(self, columns: np.ndarray, places: np.ndarray) -> None:
        """Pass on what was generated, and let those go that have ended."""
        assert self._state is not None
        done = np.asarray(self._state.done)
        for place in places:
            row = self._rows[place]
            if row is None:
                continue
            ticket, progress = row
            text = progress.push(columns[place])
            ended = done[place] or progress.stream.stopped
            if ended:
                self._rows[place], ticket.ended = None, True
                before = len(progress.stream.released)
                generation = progress.result()
                text += generation.text[before:]
                self._seconds += 0.2 * (time.monotonic() - ticket.began - self._seconds)
            if not ticket.cancelled and (ended or text):
                ticket.tell(Told(text, generation if ended else None))


@jax.jit
def _take(states: tuple[State, ...], rows: Int[Array, "B"]) -> State:
    """Rows of several batches, counted through all of them, as one batch. A cache has its layers before its rows."""

    def take(axis: int, *parts: Array) -> Array:
        return jnp.take(jnp.concatenate(parts, axis), rows, axis)

    caches = jax.tree.map(lambda *parts: take(1, *parts), *(state.cache for state in states))
    others: Any = jax.tree.map(lambda *parts: take(0, *parts), *(state._replace(cache=None) for state in states))
    return State(*others._replace(cache=caches))

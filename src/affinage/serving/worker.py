"""The thread that runs the engine for everybody who asks."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from affinage.generation.engine import Engine, EngineRequest, Generation, TokenLogprobs, prompt_logprobs
from affinage.generation.model import LoadedModel
from affinage.generation.sampling import SamplingParams

_STEPS = 4  # tokens per dispatch: how often text is passed on, and newcomers are let in


class Full(Exception):
    """So many requests wait that no more may."""


class Closed(Exception):
    """The worker takes no requests any more, or ended before an answer did."""


class News(NamedTuple):
    """The new text of a request, and the whole once it has ended, or why it ended without one."""

    text: str
    generation: Generation | None = None
    error: Exception | None = None


class EngineWorker:
    """Runs an engine in a thread. Requests queue up to `max_queue` beyond those that have a slot."""

    def __init__(self, model: LoadedModel, *, max_num_seqs: int = 8, max_queue: int = 64) -> None:
        self._model, self._max_queue = model, max_queue
        self._engine = Engine(model, max_num_seqs=max_num_seqs, steps=_STEPS, enable_prefix_caching=True)
        self._new: list[EngineRequest] = []
        self._tell: dict[EngineRequest, Callable[[News], None]] = {}
        self._began: dict[EngineRequest, float] = {}
        self._seconds = 1.0  # that a request takes, a running mean
        self._changed = threading.Condition()
        self._device = threading.Lock()  # held while the device computes for the engine or for an echo
        self.closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def warm_up(self) -> None:
        """Compile what requests can need."""
        with self._device:
            self._engine.warm_up()

    def request(
        self, prompt: Sequence[int], params: SamplingParams, tell: Callable[[News], None], index: int = 0
    ) -> EngineRequest:
        """A request whose news are given to `tell`, which is called by the worker's thread."""
        request = EngineRequest(prompt, params, lambda text, whole: self._news(request, News(text, whole)), index)
        with self._changed:
            self._tell[request] = tell
        return request

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, all or none. Raises Full or Closed."""
        with self._changed:
            if self.closed or self._outstanding() + len(requests) > self.most:
                raise Closed if self.closed else Full
            self._began.update(dict.fromkeys(requests, time.monotonic()))
            self._new += requests
            self._changed.notify()

    @property
    def most(self) -> int:
        """Requests that can be submitted together when there are no others."""
        return self._engine.slots + self._max_queue

    @property
    def waiting(self) -> int:
        """Requests that there are beyond those that have slots."""
        return max(0, self._outstanding() - self._engine.slots)

    def _outstanding(self) -> int:
        return sum(not request.cancelled for request in list(self._began))

    @property
    def seconds_until_free(self) -> float:
        """How long the last one in the queue will wait, by how long requests took lately."""
        return self._seconds * (1 + self.waiting / self._engine.slots)

    def prompt_logprobs(self, prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
        """See `engine.prompt_logprobs`; between two steps of the engine."""
        with self._device:
            return prompt_logprobs(self._model, prompt, count)

    def close(self) -> None:
        """Take no requests any more, end those that are not answered yet, and end the thread."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join()

    def _busy(self) -> bool:
        return bool(self._new or self._engine.waiting or self._engine.active)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._busy() or self.closed)
                if self.closed:
                    break
                requests, self._new = self._new, []
                for cancelled in [request for request in self._tell if request.cancelled]:
                    self._tell.pop(cancelled)
                    self._began.pop(cancelled, None)
                for request in requests:
                    try:
                        self._engine.add(request)
                    except ValueError as error:
                        self._news(request, News("", error=error))
            try:
                with self._device:
                    self._engine.step()
            except Exception as error:  # the state was given to the device, which has not given one back
                self._fail(error)
        self._fail(Closed())

    def _fail(self, error: Exception) -> None:
        """No request that is known can go on."""
        for request in list(self._tell):
            if request not in self._new or isinstance(error, Closed):
                self._news(request, News("", error=error))
        self._engine.reset()

    def _news(self, request: EngineRequest, news: News) -> None:
        tell = self._tell.get(request)
        if news.generation is not None or news.error is not None:
            self._tell.pop(request, None)
            began = self._began.pop(request, None)
            if began is not None and news.generation is not None:
                self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
        if tell is not None and not request.cancelled:
            tell(news)

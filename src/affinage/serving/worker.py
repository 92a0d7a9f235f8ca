"""The thread that runs one engine for all clients."""

import threading
from collections.abc import Sequence

from affinage.generation.engine import Engine, EngineRequest, TokenLogprobs, prompt_logprobs
from affinage.generation.model import LoadedModel

_STEPS = 4  # tokens per dispatch: how often text is passed on and newcomers are admitted


class Full(Exception):
    """The queue has no room for these requests."""


class Closed(Exception):
    """The worker takes no requests any more, or closed before a request ended."""


class EngineWorker:
    """Runs an engine in a thread. Requests queue up to `max_queue` beyond those that have a slot."""

    def __init__(self, model: LoadedModel, *, max_num_seqs: int = 8, max_queue: int = 64) -> None:
        self._model = model
        self._engine = Engine(model, max_num_seqs=max_num_seqs, steps=_STEPS, enable_prefix_caching=True)
        self.capacity = self._engine.slots + max_queue
        self._new: list[EngineRequest] = []
        self._open: set[EngineRequest] = set()  # new, waiting or active
        self._changed = threading.Condition()
        self._device = threading.Lock()  # held while the device computes for the engine or for an echo
        self.closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def warm_up(self) -> None:
        """Compile every program that requests can need."""
        with self._device:
            self._engine.warm_up()

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, all or none; their `on_text` is called by the worker's thread.

        Raises Full, Closed, or ValueError for a request that the engine cannot take.
        """
        for request in requests:
            self._engine.prepare(request)
        with self._changed:
            if self.closed:
                raise Closed
            if self._wanted() + len(requests) > self.capacity:
                raise Full
            self._new += requests
            self._open.update(requests)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        with self._changed:
            return max(0, self._wanted() - self._engine.slots)

    def _wanted(self) -> int:
        return sum(not request.cancelled for request in self._open)

    def prompt_logprobs(self, prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Return `engine.prompt_logprobs`, computed between two steps of the engine."""
        with self._device:
            return prompt_logprobs(self._model, prompt, count)

    def close(self) -> None:
        """Take no requests any more, end those that are open with Closed, and end the thread."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        engine = self._engine
        while True:
            with self._changed:
                self._open.intersection_update([*self._new, *engine.waiting, *engine.active.values()])
                self._changed.wait_for(lambda: self._open or self.closed)
                if self.closed:
                    break
                engine.waiting.extend(self._new)
                self._new = []
            try:
                with self._device:
                    engine.step()
            except Exception as error:  # the state was donated to a program that returned none
                self._fail(error)
        self._fail(Closed())

    def _fail(self, error: Exception) -> None:
        """End every open request that the engine has; when closed, there are no others to come."""
        with self._changed:
            failed = [request for request in self._open if self.closed or request not in self._new]
        for request in failed:
            if not request.cancelled:
                request.on_text("", error)
        self._engine.reset()

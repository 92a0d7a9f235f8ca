"""Rows that join and leave a batch on its way say what they say alone."""

import queue
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from affinage.generation.engine import Engine, EngineRequest, Generation, generate
from affinage.generation.sampling import SamplingParams
from affinage.serving.worker import Closed, EngineWorker, Full
from tiny_models import CONTEXT, tiny_llama
from waiting import until

SAMPLED = SamplingParams(25, 0.9, 20, 0.9, 0.01, repetition_penalty=1.5, seed=1)
ASKED = [
    ([2, 50, 60, 70], SamplingParams(30)),
    ([2, *range(300, 310)], replace(SAMPLED, stop=("o",))),
    ([2, *range(270, 270 + CONTEXT - 20)], SamplingParams(500)),
    ([2, 270], replace(SAMPLED, max_new_tokens=5, seed=9)),
    ([2, *range(300, 330)], SamplingParams(9)),
    ([2, *range(300, 325), 20], SamplingParams(9)),  # begins as the one before
]


class Listener:
    """A request and what became of it."""

    def __init__(self, prompt: list[int], params: SamplingParams, index: int = 0) -> None:
        self.news: queue.Queue[tuple[str, Generation | Exception | None]] = queue.Queue()
        self.hold: Callable[[], object] = lambda: None
        self.request = EngineRequest(prompt, params, self._take, index)

    def _take(self, text: str, end: Generation | Exception | None) -> None:
        self.news.put((text, end))
        self.hold()

    def wait_until_it_is_under_way(self) -> None:
        self.news.put(self.news.get(timeout=120))

    def answer(self) -> tuple[str, Generation]:
        text = ""
        while True:
            piece, end = self.news.get(timeout=120)
            text += piece
            if isinstance(end, Exception):
                raise end
            if end is not None:
                return text, end


def alone(prompt: list[int], params: SamplingParams) -> Generation:
    return generate(tiny_llama(), [prompt], params)[0]


@pytest.fixture
def worker():
    one = EngineWorker(tiny_llama(), max_num_seqs=2, max_queue=8)
    yield one
    one.close()


def test_answers_do_not_depend_on_who_shares_the_batch_and_when_they_came(worker: EngineWorker):
    listeners = [Listener(*asked) for asked in ASKED]
    worker.submit([listeners[0].request])
    listeners[0].wait_until_it_is_under_way()
    for listener in listeners[1:]:
        worker.submit([listener.request])
    for listener, asked in zip(listeners, ASKED, strict=True):
        whole = alone(*asked)
        assert listener.answer() == (whole.text, whole)


def test_rows_of_one_prompt_are_drawn_apart(worker: EngineWorker):
    params = replace(SAMPLED, max_new_tokens=12, temperature=1.5, seed=3)
    listeners = [Listener([2, 50], params, index) for index in range(3)]
    worker.submit([listener.request for listener in listeners])
    said = [listener.answer()[1] for listener in listeners]
    assert said == generate(tiny_llama(), [[2, 50]] * 3, params)
    assert len({one.text for one in said}) == 3


def test_who_goes_away_makes_room(worker: EngineWorker):
    leaving, gone = [Listener([2, 50 + n], SamplingParams(80)) for n in range(2)], threading.Event()
    leaving[0].hold = lambda: gone.wait(120)  # it does not run ahead of us
    worker.submit([listener.request for listener in leaving])
    leaving[0].news.get(timeout=120)
    for listener in leaving:
        listener.request.cancelled = True
    gone.set()
    came = Listener(*ASKED[3])
    worker.submit([came.request])
    assert came.answer()[1] == alone(*ASKED[3])
    assert worker.waiting == 0
    assert all(end is None for listener in leaving for _, end in list(listener.news.queue))


def test_a_full_queue_and_a_closed_engine_refuse():
    worker = EngineWorker(tiny_llama(), max_num_seqs=1, max_queue=2)
    gate, begun = threading.Event(), threading.Event()
    worker.submit([EngineRequest([2, 50], SamplingParams(80), lambda *_: (begun.set(), gate.wait(120)))])
    assert begun.wait(120)
    waiting = [Listener([2], SamplingParams(80)) for _ in range(3)]
    with pytest.raises(Full):
        worker.submit([listener.request for listener in waiting])
    worker.submit([listener.request for listener in waiting[:2]])
    with pytest.raises(Full):
        worker.submit([waiting[2].request])
    assert worker.waiting == 2
    closing = threading.Thread(target=worker.close)
    closing.start()
    until(lambda: worker.closed)
    gate.set()
    closing.join(120)
    for listener in waiting[:2]:
        with pytest.raises(Closed):
            listener.answer()
    with pytest.raises(Closed):
        worker.submit([waiting[2].request])


def test_a_request_that_cannot_be_is_refused_and_the_others_go_on(worker: EngineWorker):
    under_way, wrong, next_one = (
        Listener([2, 50], SamplingParams(80)),
        Listener([], SamplingParams(5)),
        Listener(*ASKED[3]),
    )
    worker.submit([under_way.request])
    under_way.wait_until_it_is_under_way()
    with pytest.raises(ValueError, match="tokens"):
        worker.submit([wrong.request])
    assert under_way.answer()[1] == alone([2, 50], SamplingParams(80))
    worker.submit([next_one.request])
    assert next_one.answer()[1] == alone(*ASKED[3])


def test_an_error_of_the_device_ends_what_is_open_and_the_next_request_is_answered(worker: EngineWorker, monkeypatch):
    failing = Listener([2, 50], SamplingParams(80))

    def fail(*_args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Engine, "step", fail)
    worker.submit([failing.request])
    with pytest.raises(RuntimeError, match="memory"):
        failing.answer()
    came = Listener(*ASKED[3])
    worker.submit([came.request])
    assert came.answer()[1] == alone(*ASKED[3])

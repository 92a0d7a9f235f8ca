"""Rows that join and leave a batch on its way say what they say alone."""

import queue
import threading
from dataclasses import replace

import pytest

from affinage.generation.decode import Generation, Generator, Request
from affinage.generation.engine import Closed, Engine, Full, Ticket, Told
from affinage.generation.sampling import Sampling
from tiny_models import CONTEXT, tiny_llama
from waiting import until

SAMPLED = Sampling(0.9, 20, 0.9, 0.01, repetition_penalty=1.5, seed=1)
ASKED = [
    ([2, 50, 60, 70], Request(30)),
    ([2, *range(300, 310)], Request(25, SAMPLED, stop_strings=("o",))),
    ([2, *range(270, 270 + CONTEXT - 20)], Request(500)),
    ([2, 270], Request(5, replace(SAMPLED, seed=9))),
]


class Listener:
    """What an engine tells of a ticket."""

    def __init__(self, prompt: list[int], request: Request, index: int = 0) -> None:
        self.news: queue.Queue[Told] = queue.Queue()
        self.ticket = Ticket(prompt, request, self.news.put, index)

    def wait_until_it_is_under_way(self) -> None:
        self.news.put(self.news.get(timeout=120))

    def answer(self) -> tuple[str, Generation]:
        text = ""
        while True:
            told = self.news.get(timeout=120)
            text += told.text
            if told.error is not None:
                raise told.error
            if told.generation is not None:
                return text, told.generation


def alone(prompt: list[int], request: Request) -> Generation:
    return Generator(tiny_llama(), batch=1).generate([prompt], request)[0]


@pytest.fixture
def engine():
    one = Engine(tiny_llama(), batch=2, queue=8)
    yield one
    one.close()


def test_answers_do_not_depend_on_who_shares_the_batch_and_when_they_came(engine: Engine):
    listeners = [Listener(*asked) for asked in ASKED]
    engine.submit([listeners[0].ticket])
    listeners[0].wait_until_it_is_under_way()
    for listener in listeners[1:]:
        engine.submit([listener.ticket])
    for listener, asked in zip(listeners, ASKED, strict=True):
        whole = alone(*asked)
        assert listener.answer() == (whole.text, whole)


def test_rows_of_one_prompt_are_drawn_apart(engine: Engine):
    request = Request(12, replace(SAMPLED, temperature=1.5, seed=3))
    listeners = [Listener([2, 50], request, index) for index in range(3)]
    engine.submit([listener.ticket for listener in listeners])
    said = [listener.answer()[1] for listener in listeners]
    assert said == Generator(tiny_llama(), batch=1).generate([[2, 50]] * 3, request)
    assert len({one.text for one in said}) == 3


def test_who_goes_away_makes_room(engine: Engine):
    leaving, gone = [Listener([2, 50 + n], Request(80)) for n in range(2)], threading.Event()
    leaving[0].ticket.tell = lambda told: (leaving[0].news.put(told), gone.wait(120))  # it does not run ahead of us
    engine.submit([listener.ticket for listener in leaving])
    leaving[0].news.get(timeout=120)
    for listener in leaving:
        listener.ticket.cancel()
    gone.set()
    came = Listener(*ASKED[3])
    engine.submit([came.ticket])
    assert came.answer()[1] == alone(*ASKED[3])
    assert engine.active == engine.waiting == 0
    assert all(told.generation is None for listener in leaving for told in list(listener.news.queue))


def test_a_full_queue_and_a_closed_engine_refuse():
    engine, gate, begun = Engine(tiny_llama(), batch=1, queue=2), threading.Event(), threading.Event()
    engine.submit([Ticket([2, 50], Request(80), lambda told: (begun.set(), gate.wait(120)))])  # holds the engine up
    assert begun.wait(120)
    waiting = [Listener([2], Request(80)) for _ in range(3)]
    with pytest.raises(Full):
        engine.submit([listener.ticket for listener in waiting])
    engine.submit([listener.ticket for listener in waiting[:2]])
    with pytest.raises(Full):
        engine.submit([waiting[2].ticket])
    assert engine.waiting == 2 and engine.seconds_until_free > 0
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine.closed)
    gate.set()
    closing.join(120)
    for listener in waiting[:2]:
        with pytest.raises(Closed):
            listener.answer()
    with pytest.raises(Closed):
        engine.submit([waiting[2].ticket])


def test_what_goes_wrong_is_told_to_those_concerned_and_the_others_go_on(engine: Engine):
    under_way, wrong, next_one = Listener([2, 50], Request(80)), Listener([], Request(5)), Listener(*ASKED[3])
    engine.submit([under_way.ticket])
    under_way.wait_until_it_is_under_way()
    engine.submit([wrong.ticket])
    with pytest.raises(ValueError, match="tokens"):
        wrong.answer()
    assert under_way.answer()[1] == alone([2, 50], Request(80))
    engine.submit([next_one.ticket])
    assert next_one.answer()[1] == alone(*ASKED[3])

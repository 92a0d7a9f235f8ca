"""The chat page as somebody uses it, in a browser."""

import threading

import pytest
from running_server import TOKEN, Running, running

from affinage.data.chat import encode_prompt
from affinage.generation.engine import Engine, generate
from affinage.generation.sampling import SamplingParams
from browser import EXECUTABLE, Browser
from tiny_models import tiny_llama

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]

SAID = "[...document.querySelectorAll('.said')].map(e => [e.className, e.textContent])"
IDLE = "!document.getElementById('send').hidden"


@pytest.fixture(scope="module")
def served():
    with running(TOKEN) as one:
        yield one


def opened(chromium: Browser, served: Running, width: int = 1280, *, dark: bool = False, token: str = TOKEN) -> None:
    chromium.open("about:blank", width)  # else only what stands after # would change
    chromium.troubles.clear()
    chromium.open(f"{served.url}/#token={token}", width, dark=dark, touch=width < 500)


def hold_after_the_first_text(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine goes no further than to the first text that it passes on, until the event is set."""
    step, go_on = Engine.step, threading.Event()

    def held(engine: Engine):
        if any(request.text for request in engine.active.values()):
            go_on.wait(240)
        return step(engine)

    monkeypatch.setattr(Engine, "step", held)
    return go_on


def test_a_message_is_answered_as_it_is_written_and_the_history_goes_with_the_next(chromium, served, monkeypatch):
    go_on = hold_after_the_first_text(monkeypatch)
    opened(chromium, served)
    chromium.wait_for("document.title === 'tiny · affinage'")
    assert TOKEN not in chromium.evaluate("location.href")
    for setting, value in (("temperature", "0"), ("length", "10"), ("system", "a")):
        chromium.evaluate(f"document.getElementById('{setting}').value = '{value}'")
    chromium.evaluate("document.getElementById('message').focus()")
    hostile = "<img src=x>"
    chromium.type(hostile)
    chromium.wait_for("document.querySelector('.assistant')?.textContent")
    begun = chromium.evaluate("document.querySelector('.assistant').textContent")
    go_on.set()
    chromium.wait_for(f"document.querySelector('.assistant') && {IDLE}")
    first = answer(served, [("system", "a"), ("user", hostile)])
    assert chromium.evaluate(SAID) == [["said user", hostile], ["said assistant", first]]
    assert first.startswith(begun) and begun != first, "it is shown as it comes"
    assert chromium.evaluate("getComputedStyle(document.querySelector('.assistant'), '::after').content") != "none"
    assert chromium.evaluate("document.querySelectorAll('main img').length") == 0
    chromium.type("ok")
    chromium.wait_for(f"document.querySelectorAll('.assistant').length === 2 && {IDLE}")
    second = answer(served, [("system", "a"), ("user", hostile), ("assistant", first), ("user", "ok")])
    assert chromium.evaluate(SAID)[2:] == [["said user", "ok"], ["said assistant", second]]
    for number in (3, 4, 5):  # the context is full, and the oldest exchanges are forgotten
        chromium.type("more of this")
        chromium.wait_for(f"document.querySelectorAll('.assistant').length === {number} && {IDLE}")
    assert chromium.evaluate("document.querySelector('.error')?.textContent") is None
    chromium.evaluate("document.getElementById('reset').click()")
    assert chromium.evaluate(SAID) == []
    assert all("400" in trouble for trouble in chromium.troubles), "only refusals for length"
    assert all(url.startswith((served.url, "data:,", "about:")) for url in chromium.requests)


def answer(served: Running, said: list[tuple[str, str]]) -> str:
    prompt = encode_prompt([{"role": role, "content": text} for role, text in said], tiny_llama().tokenizer, "")
    return generate(tiny_llama(), [prompt], SamplingParams(10))[0].text


def test_what_goes_wrong_is_shown_and_the_message_is_kept(chromium: Browser, served: Running):
    opened(chromium, served, token="wrong")
    chromium.wait_for("document.getElementById('settings').open")
    chromium.evaluate("document.getElementById('message').focus()")
    chromium.type("hello")
    chromium.wait_for("!!document.querySelector('.error')")
    assert "key" in chromium.evaluate("document.querySelector('.error').textContent")
    chromium.wait_for("document.getElementById('message').value === 'hello'")

"""`affinage serve`: where it listens, whom it lets in, and how it ends."""

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from affinage.hub.folder import CardFacts, export
from affinage.serving import server
from tiny_models import tiny_llama

MESSAGES = [{"role": "user", "content": "Where is Paris?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(replace(tiny_llama(), chat=True), folder, facts=CardFacts("mit"), dtype="float32")
    return folder


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)


def test_it_makes_up_a_token_where_others_can_ask_and_answers_to_the_end_what_is_under_way_when_told_to_stop():
    reasons: list[str | None] = []

    def talk(url: str, token: str) -> None:
        try:
            client = client_of(url, token)
            with pytest.raises(openai.AuthenticationError):
                client_of(url, "guessed").models.list()
            events = iter(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, max_tokens=60))
            next(events)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        reasons.extend(event.choices[0].finish_reason for event in events)

    def ready(url: str, key: str | None) -> None:
        assert key is not None and len(key) == 32
        talks.append(pool.submit(talk, url, key))

    talks: list[Future[None]] = []
    limits = {"max_num_seqs": 2, "max_queue": 2, "max_tokens": 60}
    with ThreadPoolExecutor() as pool:
        server.run(tiny_llama(), ready, host="0.0.0.0", port=0, key=None, grace=300, **limits)
        talks[0].result(300)
    assert reasons[-1] in ("length", "stop")


def test_a_token_that_is_given_is_asked_for_and_not_printed(model: Path, tmp_path: Path, monkeypatch, affinage):
    keys = []

    def run(loaded: object, ready: Callable[..., None], *, key: str | None, **more: object) -> None:
        keys.append(key)
        ready("http://127.0.0.1:8000", key)

    monkeypatch.setattr(server, "run", run)
    monkeypatch.setenv("AFFINAGE_API_KEY", "s3cret-Word!")
    (tmp_path / "token").write_text("s3cret-File!\n")
    for words in ([], ["--api-key-file", str(tmp_path / "token")]):
        status, out, _ = affinage("serve", str(model), *words)
        assert status == 0 and "s3cret" not in out
    assert keys == ["s3cret-Word!", "s3cret-File!"]


def test_a_token_that_is_none_and_a_port_that_is_taken_are_one_message(model: Path, tmp_path: Path, affinage):
    for text in (None, "two words", ""):  # None: there is no such file
        if text is not None:
            (tmp_path / "token").write_text(text)
        status, _, said = affinage("serve", str(model), "--api-key-file", str(tmp_path / "token"))
        assert status == 2 and "token" in said and "Traceback" not in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, said = affinage("serve", str(model), "--port", str(taken.getsockname()[1]))
    assert status == 2 and "--port" in said

"""`affinage serve` as a process: where it listens, whom it lets in, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from affinage.cli.program import main
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from affinage.serving import running
from tiny_models import tiny_llama

MESSAGES = [{"role": "user", "content": "Where is Paris?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(tiny_llama(), folder, facts=CardFacts("mit"), dtype="float32", chat=True)
    return folder


@pytest.fixture
def process(model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from affinage.cli import main; main()", "serve", str(model), "--port", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "AFFINAGE_TOKEN": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command += ["--host", "0.0.0.0", "--mesh", "tensor=2", "--context", "80", "--grace", "300"]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as one:  # type: ignore[call-overload]
        try:
            yield one
        finally:
            one.kill()


def test_it_makes_up_a_token_where_others_can_ask_and_ends_cleanly_when_told(process: subprocess.Popen[str]):
    assert process.stdout is not None and process.stderr is not None
    told = process.stdout.readline()
    found = re.search(r"(http://127\.0\.0\.1:\d+)/v1 .* \(API key: ([\w-]{32})\)", told)
    assert found, told + process.stderr.read()
    client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key=found[2], max_retries=0, timeout=300)
    stranger = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="guessed", max_retries=0, timeout=300)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    name = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="79"):
        client.completions.create(model=name, prompt=[5] * 80)
    reasons: list[str | None] = []

    def read() -> None:
        try:
            events = client.chat.completions.create(model=name, messages=MESSAGES, stream=True, max_tokens=60)
        except openai.InternalServerError:  # it came too late
            return
        begun.set()
        reasons.append([event.choices[0].finish_reason for event in events][-1])

    begun = threading.Event()
    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(300)
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(300)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    # One had begun and is answered to its end; the others were let in, or came too late.
    assert reasons and set(reasons) <= {"length", "stop"}


def test_a_port_that_is_taken_is_one_message(model: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["serve", str(model), "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["file", "environment"])
def test_a_token_that_is_given_is_asked_for_and_not_printed(
    by: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    places = []

    def run(loaded: object, place: running.Place, *_: object, ready: Callable[..., None], **more: object) -> None:
        places.append(place.guarded())
        ready("http://127.0.0.1:8000", places[0])

    monkeypatch.setattr(running, "run", run)
    monkeypatch.setenv("AFFINAGE_TOKEN", "s3cret-Word!" if by == "environment" else "")
    (tmp_path / "token").write_text("s3cret-Word!\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(model), *(["--token-file", str(tmp_path / "token")] if by == "file" else [])])
    assert not ended.value.code and places[0].token == "s3cret-Word!"
    assert "s3cret" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["two words", "", None])
def test_a_token_that_is_none_is_one_message(
    text: str | None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if text is not None:
        (tmp_path / "token").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(model), "--token-file", str(tmp_path / "token")])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "token" in told and "Traceback" not in told

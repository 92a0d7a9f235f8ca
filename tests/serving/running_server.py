"""A server of a tiny model in a thread of the test's process."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from unittest.mock import patch

import uvicorn

from affinage.generation.engine import Engine
from affinage.serving.server import Server
from tiny_models import tiny_llama
from waiting import until

TOKEN = "a-token-for-tests"


class Running:
    """A server and its address."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.url = server, url

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """The engine makes no step as long as the block lasts."""
        gate, step = threading.Event(), Engine.step
        with patch.object(Engine, "step", lambda engine: (gate.wait(120), step(engine))[1]):
            try:
                yield
            finally:
                gate.set()


@contextlib.contextmanager
def running(token: str | None = None) -> Iterator[Running]:
    """Two rows at once, and two that may wait."""
    served = Server(tiny_llama(), token, max_num_seqs=2, max_queue=2, max_tokens=60)
    config = uvicorn.Config(served.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started)
    try:
        yield Running(served, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(60)

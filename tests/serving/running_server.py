"""A server of a tiny model in a thread of the test's process."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from affinage.generation.engine import EngineRequest
from affinage.generation.sampling import SamplingParams
from affinage.serving.server import Limits, Server
from affinage.serving.worker import EngineWorker
from tiny_models import tiny_llama
from waiting import until

TOKEN = "a-token-for-tests"


class Running:
    """A server, its worker, and its address."""

    def __init__(self, worker: EngineWorker, url: str) -> None:
        self.worker, self.url = worker, url

    @contextlib.contextmanager
    def held_up(self) -> Iterator[threading.Event]:
        """The engine is in the middle of a batch of its own, as long as the block or until the event is set."""
        gate, begun = threading.Event(), threading.Event()
        wait = lambda *_: (begun.set(), gate.wait(120))  # noqa: E731
        params = SamplingParams(60)
        self.worker.submit([EngineRequest([2, 50 + n], params, wait) for n in range(2)])
        assert begun.wait(120)
        try:
            yield gate
        finally:
            gate.set()


@contextlib.contextmanager
def running(token: str | None = None) -> Iterator[Running]:
    """Two rows at once, and two that may wait."""
    worker = EngineWorker(tiny_llama(), max_num_seqs=2, max_queue=2)
    app = Server(tiny_llama(), worker, key=token, limits=Limits(max_tokens=60, body_bytes=20_000)).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started)
    try:
        yield Running(worker, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        worker.close()
        server.should_exit = True
        thread.join(60)

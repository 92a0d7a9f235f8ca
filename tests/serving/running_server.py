"""A server of a tiny model in a thread of the test's process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from affinage.generation.decode import Request
from affinage.generation.engine import Engine, Ticket
from affinage.serving.server import Limits, Server
from tiny_models import tiny_llama

TOKEN = "a-token-for-tests"


class Running:
    """A server, its engine, and its address."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine, self.url = engine, url

    @contextlib.contextmanager
    def held_up(self) -> Iterator[threading.Event]:
        """The engine is in the middle of a batch of its own, as long as the block or until the event is set."""
        gate, begun = threading.Event(), threading.Event()
        wait = lambda _: (begun.set(), gate.wait(120))  # noqa: E731
        self.engine.submit([Ticket([2, 50 + n], Request(60), wait) for n in range(2)])
        assert begun.wait(120)
        try:
            yield gate
        finally:
            gate.set()


@contextlib.contextmanager
def running(token: str | None = None) -> Iterator[Running]:
    """Two rows at once, and two that may wait."""
    engine = Engine(tiny_llama(), batch=2, queue=2)
    server = Server(tiny_llama(), engine, token=token, limits=Limits(max_tokens=60, body_bytes=20_000))
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop = asyncio.new_event_loop()
    url = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Running(engine, url)
    finally:
        engine.close()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

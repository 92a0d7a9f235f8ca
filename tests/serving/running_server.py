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
    """The server, its engine, and its address."""

    def __init__(self, token: str | None, limits: Limits) -> None:
        self.engine, self._token, self._limits = Engine(tiny_llama(), batch=2, queue=2), token, limits
        self.loop = asyncio.new_event_loop()
        self.url = self.loop.run_until_complete(self._start())
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    async def _start(self) -> str:
        self.server = Server(tiny_llama(), self.engine, token=self._token, limits=self._limits)
        self._runner = web.AppRunner(self.server.app(), handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def stop(self) -> None:
        self.engine.close()
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[threading.Event]:
        """The engine is in the middle of a batch of its own, as long as the block or until the event is set."""
        gate, begun = threading.Event(), threading.Event()

        def wait(_: object) -> None:
            begun.set()
            gate.wait(120)

        self.engine.submit([Ticket([2, 50 + n], Request(60), wait) for n in range(2)])
        assert begun.wait(120)
        try:
            yield gate
        finally:
            gate.set()


@contextlib.contextmanager
def running(token: str | None = None, limits: Limits | None = None) -> Iterator[Running]:
    one = Running(token, limits or Limits(max_tokens=60, body_bytes=20_000))
    try:
        yield one
    finally:
        one.stop()

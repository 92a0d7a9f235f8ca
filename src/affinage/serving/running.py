"""A server from its first request to its last: where it listens, and how it ends."""

import asyncio
import contextlib
import ipaddress
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from affinage.errors import UserError
from affinage.generation.engine import Engine
from affinage.generation.model import LoadedModel
from affinage.serving.server import Limits, Server


@dataclass(frozen=True)
class Place:
    """Where a server listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    token: str | None = None  # what clients must send; made up where others than this machine could ask
    grace: float = 30.0  # seconds that answers under way may still take when the server is told to stop

    def guarded(self) -> "Place":
        """With a token, unless only this machine can ask."""
        if self.token or is_loopback(self.host):
            return self
        return Place(self.host, self.port, secrets.token_urlsafe(24), self.grace)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def run(
    model: LoadedModel, place: Place, limits: Limits, *, batch: int, queue: int, ready: Callable[[str, Place], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is told the URL and the place, once requests are taken.

    Raises UserError where it cannot listen.
    """
    engine = Engine(model, batch=batch, queue=queue)
    try:
        asyncio.run(_serve(model, engine, place.guarded(), limits, ready))
    finally:
        engine.close()


async def _serve(
    model: LoadedModel, engine: Engine, place: Place, limits: Limits, ready: Callable[[str, Place], None]
) -> None:
    server = Server(model, engine, token=place.token, limits=limits)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=5.0)
    await runner.setup()
    site = web.TCPSite(runner, place.host.strip("[]"), place.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        what = f"cannot listen on {place.host}:{place.port}: {error.strerror or error}"
        raise UserError(what, fix="Choose another with --port, or 0 for any that is free.") from error
    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: at_once.set() if stop.is_set() else stop.set())
    ready(_url(runner, place), place)
    await stop.wait()
    server.stopping = True
    await site.stop()
    waiting = [asyncio.ensure_future(each) for each in (server.idle(), at_once.wait())]
    await asyncio.wait(waiting, timeout=place.grace, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
    await asyncio.to_thread(engine.close)  # whoever is not answered yet is told so
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.idle(), 5.0)
    await runner.cleanup()


def _url(runner: web.AppRunner, place: Place) -> str:
    host, port = runner.addresses[0][:2]
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = everywhere.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""OpenAI's interface to one model, over HTTP, and a page to talk with it."""

import asyncio
import contextlib
import hmac
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from affinage.data.chat import encode_prompt
from affinage.errors import UserError
from affinage.generation.decode import Generation
from affinage.generation.engine import Closed, Engine, Full, Ticket, Told
from affinage.generation.model import LoadedModel
from affinage.serving.asked import Asked, AskedChat, AskedText, Refused, read, refusal
from affinage.serving.said import DONE, Reply, event

_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_STOPPING = Refused(503, "the server is stopping")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Limits:
    """What one client may ask for."""

    max_tokens: int = 1024  # of an answer
    choices: int = 16  # texts that one request may ask for
    body_bytes: int = 2**20


class Server:
    """One model behind OpenAI's interface. With a `token`, /v1 is for those who send it."""

    def __init__(
        self, model: LoadedModel, engine: Engine, *, token: str | None = None, limits: Limits | None = None
    ) -> None:
        self._model, self._engine, self._limits = model, engine, limits or Limits()
        self._most_choices = min(self._limits.choices, engine.most)  # of more, to try again would never help
        self._token = None if token is None else token.encode()
        self._created = int(time.time())
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(
            client_max_size=self._limits.body_bytes, middlewares=[self._errors_as_json, self._let_in, self._counted]
        )
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_get("/health", self._health)
        for path in _FILES:
            app.router.add_get(path, self._page)
        return app

    async def idle(self) -> None:
        """Wait until nobody is being answered."""
        await self._idle.wait()

    # ---- who may ask ----

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except UserError as error:
            refused = refusal(error)
        except web.HTTPRequestEntityTooLarge:
            refused = Refused(413, f"the body is longer than {self._limits.body_bytes:,} bytes")
        except web.HTTPException as error:
            refused = Refused(error.status, error.reason)
        headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
        headers |= {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
        return web.json_response(refused.body, status=refused.status, headers=headers)

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is None:
            # A name that somebody else has pointed to this machine, so that a page of theirs may read what it says.
            if _host_in(request.host) not in _LOOPBACK:
                raise Refused(403, f"without a token this server is for {', '.join(_LOOPBACK)} only")
        elif request.path.startswith("/v1/"):
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode(errors="surrogateescape"), self._token
            ):
                raise Refused(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        return await handler(request)

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST" and self.stopping:
            raise _STOPPING
        self._open += 1
        self._idle.clear()
        try:
            return await handler(request)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    # ---- what may be asked ----

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, AskedChat)
        messages = [message.as_text() for message in asked.messages]
        prompt = await asyncio.to_thread(encode_prompt, messages, self._model.tokenizer, self._model.system_prompt)
        return await self._answer(request, asked, [prompt], chat=True)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, AskedText)
        if len(asked.prompts) > self._most_choices:
            raise Refused(400, f"at most {self._most_choices} prompts at once", param="prompt")
        prompts = await asyncio.to_thread(lambda: [self._tokens(prompt) for prompt in asked.prompts])
        return await self._answer(request, asked, prompts, chat=False)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            return [*tokenizer.opening, *tokenizer.encode(prompt)] or [tokenizer.bos]
        if any(token >= self._model.graph.vocabulary for token in prompt):
            raise Refused(400, f"there is no token {max(prompt)}", param="prompt")
        return prompt or [tokenizer.bos]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._facts()]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        self._check_name(request.match_info["name"])
        return web.json_response(self._facts())

    def _facts(self) -> dict[str, str | int]:
        name = self._model.name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "affinage"}

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            what = f"there is no model `{name}` here, but `{self._model.name}`"
            raise Refused(404, what, code="model_not_found", param="model")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._engine.closed or self.stopping:
            raise _STOPPING
        return web.json_response({"status": "ok"})

    async def _page(self, request: web.Request) -> web.StreamResponse:
        name, kind = _FILES[request.path]
        text = (_PAGE / name).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=kind, headers=_HEADERS)

    # ---- answers ----

    async def _answer(
        self, request: web.Request, asked: Asked, prompts: Sequence[list[int]], *, chat: bool
    ) -> web.StreamResponse:
        self._check_name(asked.model)
        room = self._model.context - 1
        longest = max(map(len, prompts), default=0)
        if longest > room:
            what = f"the prompt has {longest:,} tokens; this model takes at most {room:,}"
            raise Refused(400, what, code="context_length_exceeded", param="messages" if chat else "prompt")
        if len(prompts) * asked.n > self._most_choices:
            raise Refused(400, f"at most {self._most_choices} choices in all", param="n")
        reply = Reply(self._model.name, chat, sum(map(len, prompts)))
        rows = [(prompt, index) for prompt in prompts for index in range(asked.n)]
        async with self._tickets(rows, asked) as news:
            if asked.stream:
                return await _streamed(request, reply, news, len(rows), usage=asked.include_usage)
            generations: dict[int, Generation] = {}
            while len(generations) < len(rows):
                place, told = await news.get()
                if told.error is not None:
                    raise _told(told.error)
                if told.generation is not None:
                    generations[place] = told.generation
            return web.json_response(reply.whole([generations[place] for place in range(len(rows))]))

    @contextlib.asynccontextmanager
    async def _tickets(
        self, rows: Sequence[tuple[list[int], int]], asked: Asked
    ) -> AsyncIterator["asyncio.Queue[tuple[int, Told]]"]:
        """News of rows (prompt, index), by their place; whatever is left of them when it ends is given up."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Told]]()
        wanted = asked.request(self._limits.max_tokens)

        def listener(place: int) -> Callable[[Told], None]:
            def listen(told: Told) -> None:
                loop.call_soon_threadsafe(news.put_nowait, (place, told))

            return listen

        tickets = [Ticket(prompt, wanted, listener(place), index) for place, (prompt, index) in enumerate(rows)]
        try:
            self._engine.submit(tickets)
        except Full as error:
            wait = math.ceil(self._engine.seconds_until_free)
            raise Refused(429, f"the queue is full; try again in {wait} s", retry_after=wait) from error
        except Closed as error:
            raise _STOPPING from error
        try:
            yield news
        finally:
            for ticket in tickets:
                ticket.cancel()


async def _streamed(
    request: web.Request, reply: Reply, news: "asyncio.Queue[tuple[int, Told]]", rows: int, *, usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for place in range(rows):
        await _write(response, reply.begun(place))
    generations: list[Generation] = []
    while len(generations) < rows:
        place, told = await news.get()
        if told.error is not None:
            await _write(response, event(_told(told.error).body))
            return response
        await _write(response, reply.piece(place, told.text))
        if told.generation is not None:
            generations.append(told.generation)
            await _write(response, reply.ended(place, told.generation))
    await _write(response, (reply.counted(generations) if usage else b"") + DONE)
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Send some bytes; who has gone away needs none, and is known to be gone."""
    if data:
        try:
            await response.write(data)
        except ConnectionError as error:
            raise asyncio.CancelledError from error


def _told(error: Exception) -> Refused:
    """What a client is told of what went wrong here."""
    return _STOPPING if isinstance(error, Closed) else Refused(500, f"{type(error).__name__}: {error}")


def _host_in(host: str) -> str:
    """The name or address in a Host header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]

"""OpenAI's interface to one model, over HTTP, and a page to talk with it: Starlette under uvicorn."""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from affinage.data.chat import encode_prompt
from affinage.errors import UserError
from affinage.generation.engine import EngineRequest, Generation
from affinage.generation.model import LoadedModel
from affinage.serving.protocol import DONE, ChatRequest, CompletionRequest, Echo, Refused, Reply, event, parse
from affinage.serving.worker import Closed, EngineWorker, Full

_LOG = logging.getLogger(__name__)
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
_FAILED = Refused(500, "the server could not answer; its log has the reason")
_RETRY_AFTER = 2  # seconds
_POLL = 1.0  # seconds between two checks that the client is still connected

_News = asyncio.Queue[tuple[int, str, Generation | Exception | None]]  # (choice, new text, end)


@dataclass(frozen=True)
class Place:
    """Where a server listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    key: str | None = None  # that clients must send
    grace: float = 30.0  # seconds that running answers may still take after a signal to stop

    def guarded(self) -> "Place":
        """Return it with a key, unless only this machine can connect."""
        try:
            loopback = ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            loopback = self.host == "localhost"
        return self if self.key or loopback else replace(self, key=secrets.token_urlsafe(24))


@dataclass(frozen=True)
class Limits:
    """What one client may request."""

    max_tokens: int = 1024  # of an answer
    choices: int = 16  # of one request
    body_bytes: int = 2**20


class Server:
    """One model behind OpenAI's interface. With a `key`, /v1 is for clients that send it."""

    def __init__(
        self, model: LoadedModel, worker: EngineWorker, *, key: str | None = None, limits: Limits | None = None
    ) -> None:
        self._model, self._worker, self._limits = model, worker, limits or Limits()
        self._max_choices = min(self._limits.choices, worker.capacity)
        self._key = None if key is None else key.encode()
        self._facts = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "affinage"}

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._models)),
            *(Route(path, self._guarded(self._page)) for path in _FILES),
            Route("/health", self._guarded(self._health)),
        ]
        handlers = {Refused: _refused, UserError: _mistake, HTTPException: _http_error, Exception: _failed}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            self._check_access(request)
            return await handler(request)

        return guarded

    def _check_access(self, request: Request) -> None:
        if self._key is None:
            # Another name may have been pointed to this machine, so that a foreign page could read the answers.
            host = request.headers.get("Host", "")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if name not in _LOOPBACK:
                raise Refused(403, f"without a key this server is for {', '.join(_LOOPBACK)} only")
        elif request.url.path.startswith("/v1"):
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode("latin-1"), self._key):
                raise Refused(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    # ---- endpoints ----

    async def _chat(self, request: Request) -> Response:
        body = parse(await self._body(request), ChatRequest)
        messages = [message.as_text() for message in body.messages]
        prompt = await asyncio.to_thread(encode_prompt, messages, self._model.tokenizer, self._model.system_prompt)
        return await self._answer(request, body, [prompt])

    async def _completion(self, request: Request) -> Response:
        body = parse(await self._body(request), CompletionRequest)
        if len(body.prompts) > self._max_choices:
            raise Refused(400, f"at most {self._max_choices} prompts at once", param="prompt")
        prompts = await asyncio.to_thread(lambda: [self._tokens(prompt) for prompt in body.prompts])
        return await self._answer(request, body, prompts)

    async def _body(self, request: Request) -> bytes:
        # A page of another origin may not send JSON without a preflight request, which is not answered.
        if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the body must be JSON, with the header Content-Type: application/json")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(400, "a compressed body is not read")
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > self._limits.body_bytes:
                raise Refused(413, f"the body is longer than {self._limits.body_bytes:,} bytes")
        return bytes(content)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            prompt = [*tokenizer.opening, *tokenizer.encode(prompt)]
        elif any(token >= self._model.graph.vocabulary for token in prompt):
            raise Refused(400, f"there is no token {max(prompt)}", param="prompt")
        return prompt or [tokenizer.bos]

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        self._check_name(name)
        return JSONResponse(self._facts if name else {"object": "list", "data": [self._facts]})

    def _check_name(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            what = f"there is no model `{name}` here, but `{self._model.name}`"
            raise Refused(404, what, code="model_not_found", param="model")

    async def _health(self, request: Request) -> Response:
        if self._worker.closed:
            raise _STOPPING
        return JSONResponse({"status": "ok"})

    async def _page(self, request: Request) -> Response:
        name, kind = _FILES[request.url.path]
        return Response((_PAGE / name).read_bytes(), media_type=kind, headers=_HEADERS)

    # ---- answers ----

    async def _answer(
        self, request: Request, body: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]
    ) -> Response:
        chat, tokenizer = isinstance(body, ChatRequest), self._model.tokenizer
        self._check_name(body.model)
        longest = max(map(len, prompts), default=0)
        if longest >= self._model.context:
            what = f"the prompt has {longest:,} tokens; this model takes at most {self._model.context - 1:,}"
            raise Refused(400, what, code="context_length_exceeded", param="messages" if chat else "prompt")
        if len(prompts) * body.n > self._max_choices:
            raise Refused(400, f"at most {self._max_choices} choices in all", param="n")
        params = body.params(self._limits.max_tokens, tokenizer.stops)
        echoes = [Echo()] * len(prompts)
        if isinstance(body, CompletionRequest) and body.echo:
            echoes = [await self._echo(*one, body.logprobs) for one in zip(body.prompts, prompts, strict=True)]
        rows = [(prompt, echo, index) for prompt, echo in zip(prompts, echoes, strict=True) for index in range(body.n)]
        news, loop = _News(), asyncio.get_running_loop()

        def pass_on(place: int, text: str, end: Generation | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(news.put_nowait, (place, text, end))

        requests = [
            EngineRequest(prompt, params, partial(pass_on, place), index)
            for place, (prompt, _, index) in enumerate(rows)
        ]
        try:
            self._worker.submit(requests)
        except Full as error:
            raise Refused(429, f"the queue is full; try again in {_RETRY_AFTER} s", retry_after=_RETRY_AFTER) from error
        except Closed as error:
            raise _STOPPING from error
        except ValueError as error:
            raise Refused(400, str(error)) from error
        spell = partial(tokenizer.decode, keep_special=True)
        reply = Reply(self._model.name, chat, sum(map(len, prompts)), lambda token: spell([token]))
        echoes = [echo for _, echo, _ in rows]
        if body.stream:
            events = _events(request, reply, news, requests, echoes, usage=body.stream_options.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        ends = {place: end async for place, _, end in _received(request, news, requests) if end is not None}
        return JSONResponse(reply.whole([ends[place] for place in range(len(rows))], echoes))

    async def _echo(self, sent: str | list[int], prompt: list[int], logprobs: int | None) -> Echo:
        """The prompt as the client sent it: without the tokens that the server put before a text."""
        added = len(self._model.tokenizer.opening) if isinstance(sent, str) else 0
        text = self._model.tokenizer.decode(prompt[added:])
        if logprobs is None:
            return Echo(text)
        found = await asyncio.to_thread(self._worker.prompt_logprobs, prompt, logprobs)
        return Echo(text, prompt[added:], found[max(0, added - 1) :])


async def _received(
    request: Request, news: _News, requests: Sequence[EngineRequest]
) -> AsyncGenerator[tuple[int, str, Generation | None]]:
    """Yield (choice, new text, its end) until all have ended; cancel the requests if the client leaves.

    Raises Refused if the engine fails, without its reason.
    """
    left = len(requests)
    try:
        while left:
            try:
                place, text, end = await asyncio.wait_for(news.get(), _POLL)
            except TimeoutError:
                if await request.is_disconnected():
                    raise ClientDisconnect from None
                continue
            if isinstance(end, Closed):
                raise _STOPPING
            if isinstance(end, Exception):
                _LOG.error("an answer failed", exc_info=end)
                raise _FAILED
            left -= end is not None
            yield place, text, end
    finally:
        for one in requests:
            one.cancelled = True


async def _events(
    request: Request,
    reply: Reply,
    news: _News,
    requests: Sequence[EngineRequest],
    echoes: Sequence[Echo],
    *,
    usage: bool,
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a reply."""
    generations = []
    async with contextlib.aclosing(_received(request, news, requests)) as received:
        for place, echo in enumerate(echoes):
            yield reply.chunk(place, echo.text, begins=True)
        try:
            async for place, text, end in received:
                yield reply.chunk(place, text, end)
                generations += [] if end is None else [end]
        except Refused as refused:
            yield event(refused.body)
            return
    yield (reply.usage(generations) if usage else b"") + DONE


async def _refused(request: Request, refused: Refused) -> Response:
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
    headers |= {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    return JSONResponse(refused.body, status_code=refused.status, headers=headers)


async def _mistake(request: Request, error: UserError) -> Response:
    """A mistake of the client that the chat template finds, such as two users in a row."""
    return await _refused(request, Refused(400, f"{error.what}. {error.fix}" if error.fix else error.what))


async def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse(Refused(error.status_code, str(error.detail)).body, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, _FAILED)


# ---- from its first request to its last ----


def run(
    model: LoadedModel,
    place: Place,
    limits: Limits,
    *,
    max_num_seqs: int,
    max_queue: int,
    ready: Callable[[str, Place], None],
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the URL and the place, once everything is compiled.

    Raises UserError if it cannot listen.
    """
    place = place.guarded()
    listening = _listen(place)
    worker = EngineWorker(model, max_num_seqs=max_num_seqs, max_queue=max_queue)
    try:
        worker.warm_up()
        app = Server(model, worker, key=place.key, limits=limits).app()
        grace = math.ceil(place.grace)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace, lifespan="off"
        )
        host, port = listening.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", place)
        _Uvicorn(config).run(sockets=[listening])
    finally:
        worker.close()
        listening.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn that returns after a signal; by itself, it would send itself the signal again and die of it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While entered, the first signal ends the server, and a second one does not wait for answers."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listen(place: Place) -> socket.socket:
    host = place.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, place.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, place.port), family=family)
    except OSError as error:
        what = f"cannot listen on {place.host}:{place.port}: {error.strerror or error}"
        raise UserError(what, fix="Choose another with --port, or 0 for any that is free.") from error

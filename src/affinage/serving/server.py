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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
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
from affinage.serving.protocol import (
    DONE,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Echo,
    Refused,
    Reply,
    event,
    parse,
)
from affinage.serving.worker import Closed, EngineWorker, Full, News

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
_LOOK = 1.0  # seconds between two looks whether the client is still there


@dataclass(frozen=True)
class Place:
    """Where a server listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    key: str | None = None  # what clients must send; made up where others than this machine can connect
    grace: float = 30.0  # seconds that running answers may still take after a signal to stop

    def guarded(self) -> "Place":
        """With a key, unless only this machine can connect."""
        if self.key or is_loopback(self.host):
            return self
        return Place(self.host, self.port, secrets.token_urlsafe(24), self.grace)


@dataclass(frozen=True)
class Limits:
    """What one client may request."""

    max_tokens: int = 1024  # of an answer
    choices: int = 16  # texts of one request
    body_bytes: int = 2**20


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """One model behind OpenAI's interface. With a `key`, /v1 is for those who send it."""

    def __init__(
        self, model: LoadedModel, worker: EngineWorker, *, key: str | None = None, limits: Limits | None = None
    ) -> None:
        self._model, self._worker, self._limits = model, worker, limits or Limits()
        self._most_choices = min(self._limits.choices, worker.most)  # to try again with more would never help
        self._key = None if key is None else key.encode()
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The routes."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._one_model)),
            Route("/health", self._guarded(self._health, with_key=False)),
            *(Route(path, self._guarded(self._page, with_key=False)) for path in _FILES),
        ]
        handlers = {HTTPException: _http_error, Exception: _failed}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]], *, with_key: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler for those who may ask, with its refusals in OpenAI's form."""

        async def guarded(request: Request) -> Response:
            try:
                self._let_in(request, with_key)
                return await handler(request)
            except Refused as refused:
                return _error(refused)
            except UserError as error:  # a mistake of the client, such as two users in a row
                return _error(Refused(400, f"{error.what}. {error.fix}".strip() if error.fix else error.what))

        return guarded

    def _let_in(self, request: Request, with_key: bool) -> None:
        if self._key is None:
            # A name that somebody else has pointed to this machine, so that a page of theirs may read the answers.
            if _host_in(request.headers.get("Host", "")) not in _LOOPBACK:
                raise Refused(403, f"without a key this server is for {', '.join(_LOOPBACK)} only")
        elif with_key:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
                raise Refused(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    # ---- endpoints ----

    async def _chat(self, request: Request) -> Response:
        wanted = parse(await self._body(request), ChatRequest)
        messages = [message.as_text() for message in wanted.messages]
        prompt = await asyncio.to_thread(encode_prompt, messages, self._model.tokenizer, self._model.system_prompt)
        return await self._answer(request, wanted, [prompt])

    async def _completion(self, request: Request) -> Response:
        wanted = parse(await self._body(request), CompletionRequest)
        if len(wanted.prompts) > self._most_choices:
            raise Refused(400, f"at most {self._most_choices} prompts at once", param="prompt")
        prompts = await asyncio.to_thread(lambda: [self._tokens(prompt) for prompt in wanted.prompts])
        return await self._answer(request, wanted, prompts)

    async def _body(self, request: Request) -> bytes:
        # A page of another origin may not send JSON without asking first.
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
            return [*tokenizer.opening, *tokenizer.encode(prompt)] or [tokenizer.bos]
        if any(token >= self._model.graph.vocabulary for token in prompt):
            raise Refused(400, f"there is no token {max(prompt)}", param="prompt")
        return prompt or [tokenizer.bos]

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._facts()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._facts())

    def _facts(self) -> dict[str, str | int]:
        name = self._model.name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "affinage"}

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
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

    async def _answer(self, request: Request, wanted: CommonRequest, prompts: Sequence[list[int]]) -> Response:
        chat = isinstance(wanted, ChatRequest)
        self._check_name(wanted.model)
        room = self._model.context - 1
        longest = max(map(len, prompts), default=0)
        if longest > room:
            what = f"the prompt has {longest:,} tokens; this model takes at most {room:,}"
            raise Refused(400, what, code="context_length_exceeded", param="messages" if chat else "prompt")
        if len(prompts) * wanted.n > self._most_choices:
            raise Refused(400, f"at most {self._most_choices} choices in all", param="n")
        params = wanted.params(self._limits.max_tokens, self._model.tokenizer.stops)
        echoes: list[Echo] = []
        if isinstance(wanted, CompletionRequest) and wanted.echo:
            for given, prompt in zip(wanted.prompts, prompts, strict=True):
                added = len(self._model.tokenizer.opening) if isinstance(given, str) else 0
                echoes += [await self._echo(prompt, added, wanted.logprobs)] * wanted.n
        reply = Reply(self._model.name, chat, sum(map(len, prompts)), self._spell)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, News]]()

        def listener(place: int) -> Callable[[News], None]:
            def listen(one: News) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(news.put_nowait, (place, one))

            return listen

        rows = [(prompt, index) for prompt in prompts for index in range(wanted.n)]
        requests = [
            self._worker.request(prompt, params, listener(place), index) for place, (prompt, index) in enumerate(rows)
        ]
        try:
            self._worker.submit(requests)
        except Full as error:
            _give_up(requests)
            wait = math.ceil(self._worker.seconds_until_free)
            raise Refused(429, f"the queue is full; try again in {wait} s", retry_after=wait) from error
        except Closed as error:
            _give_up(requests)
            raise _STOPPING from error
        if wanted.stream:
            usage = wanted.stream_options is not None and wanted.stream_options.include_usage
            events = _events(reply, news, requests, echoes, usage=usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            generations = await _generations(request, news, len(rows))
            return JSONResponse(reply.whole(generations, echoes))
        finally:
            _give_up(requests)

    async def _echo(self, prompt: list[int], added: int, logprobs: int | None) -> Echo:
        """The prompt as the client gave it: without the `added` tokens that the server put before its text."""
        text = self._model.tokenizer.decode(prompt[added:])
        if logprobs is None:
            return Echo(text)
        found = await asyncio.to_thread(self._worker.prompt_logprobs, prompt, logprobs)
        return Echo(text, prompt[added:], found[max(0, added - 1) :])

    def _spell(self, token: int) -> str:
        return self._model.tokenizer.decode([token], keep_special=True)


async def _generations(request: Request, news: "asyncio.Queue[tuple[int, News]]", count: int) -> list[Generation]:
    found: dict[int, Generation] = {}
    while len(found) < count:
        try:
            place, one = await asyncio.wait_for(news.get(), _LOOK)
        except TimeoutError:
            if await request.is_disconnected():
                raise ClientDisconnect from None
            continue
        if one.error is not None:
            raise _refusal(one.error)
        if one.generation is not None:
            found[place] = one.generation
    return [found[place] for place in range(count)]


async def _events(
    reply: Reply,
    news: "asyncio.Queue[tuple[int, News]]",
    requests: Sequence[EngineRequest],
    echoes: Sequence[Echo],
    *,
    usage: bool,
) -> AsyncIterator[bytes]:
    try:
        for place in range(len(requests)):
            yield reply.begin(place, echoes[place] if echoes else None)
        generations: list[Generation] = []
        while len(generations) < len(requests):
            place, one = await news.get()
            if one.error is not None:
                yield event(_refusal(one.error).body)
                return
            yield reply.piece(place, one.text)
            if one.generation is not None:
                generations.append(one.generation)
                yield reply.end(place, one.generation)
        yield (reply.count(generations) if usage else b"") + DONE
    finally:
        _give_up(requests)


def _give_up(requests: Sequence[EngineRequest]) -> None:
    """Whatever is left of these is no longer wanted."""
    for request in requests:
        request.cancelled = True


def _refusal(error: Exception) -> Refused:
    """What a client is answered when the engine fails: nothing of what went wrong inside."""
    if isinstance(error, Closed):
        return _STOPPING
    _LOG.error("an answer failed", exc_info=error)
    return _FAILED


def _error(refused: Refused) -> Response:
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
    headers |= {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    return JSONResponse(refused.body, status_code=refused.status, headers=headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    response = _error(Refused(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return _error(_FAILED)


def _host_in(host: str) -> str:
    """The name or address in a Host header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


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

    Raises UserError where it cannot listen.
    """
    place = place.guarded()
    listening = _listen(place)
    worker = EngineWorker(model, max_num_seqs=max_num_seqs, max_queue=max_queue)
    try:
        worker.warm_up()
        app = Server(model, worker, key=place.key, limits=limits).app()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=math.ceil(place.grace), lifespan="off"
        )
        server = _Uvicorn(config)
        ready(_url(listening), place)
        server.run(sockets=[listening])
    finally:
        worker.close()
        listening.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn that ends in good order at a signal: it would send itself the signal once more, and die of it."""

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


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

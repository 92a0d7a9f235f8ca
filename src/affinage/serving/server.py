"""OpenAI's interface to one model, over HTTP, and a page to talk with it: Starlette under uvicorn."""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import uvicorn
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from affinage.data.chat import encode_prompt
from affinage.errors import UserError
from affinage.generation.engine import TOP_LOGPROBS, Engine, EngineRequest, Event, LoadedModel, token_logprobs
from affinage.generation.sampling import SamplingParams
from affinage.stopping import handled_by

_LOG = logging.getLogger(__name__)
_PAGE = Path(__file__).parent / "page"
_STEPS = 4  # tokens per dispatch: how often text is passed on and newcomers are admitted
_MAX_CHOICES = 16  # of one request
# Another name may have been pointed to this machine, so that a foreign page could read the answers.
_LOOPBACK = ["localhost", "127.0.0.1"]
_MAX_BODY = 2**20  # bytes
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "2"}}  # of refusals, by their status
_POLL = 1.0  # seconds between two checks that the client is still connected
# Fields that clients send and that do not change the answer.
_INERT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice"}
_INERT |= {"parallel_tool_calls"}
_DEFAULTS: tuple[Any, ...] = (None, 0, "", [], {}, {"type": "text"}, ["text"])  # by which a client requests nothing

_News = asyncio.Queue[Event | None]  # None: the engine has failed


class Refused(HTTPException):
    """An error that a client receives, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


_FAILED = Refused(500, "the server could not answer; its log has the reason")


async def _error(request: Request, error: Exception) -> Response:
    """The reply to a request that failed; a UserError is a mistake that the chat template or the sampling finds."""
    refused = _FAILED
    if isinstance(error, HTTPException):
        refused = error if isinstance(error, Refused) else Refused(error.status_code, error.detail)
    elif isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "the body"
        refused = Refused(400, f"{name}: {first['msg']}", param=name)
    elif isinstance(error, UserError):
        refused = Refused(400, f"{error.what}. {error.fix}".rstrip())
    return JSONResponse(refused.body, refused.status_code, getattr(error, "headers", None))


class CommonRequest(BaseModel):
    """The body of both endpoints. top_k, min_p and ignore_eos are vLLM's; `SamplingParams` has the ranges."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # -1, as 0, stands for all
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
    ] = Field([], max_length=16)
    ignore_eos: bool = False
    seed: int | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: dict[str, bool] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, body: Any) -> Any:
        """Leave out nulls, and fields that are unknown here but change nothing, such as `frequency_penalty: 0`."""
        if not isinstance(body, dict):
            return body
        inert = {name for name, value in body.items() if name not in cls.model_fields and value in _DEFAULTS}
        return {name: value for name, value in body.items() if name not in {*inert, *_INERT} and value is not None}

    def params(self, most: int) -> SamplingParams:
        """Return the parameters of the engine, for at most `most` tokens. Raises UserError for one out of its range."""
        limit = most if self.max_tokens is None else min(self.max_tokens, most)
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        same = self.model_dump(include={"temperature", "top_p", "min_p", "ignore_eos"})
        return SamplingParams(limit, top_k=max(0, self.top_k), seed=seed, stop=tuple(self.stop), **same)


class TextPart(BaseModel, extra="forbid"):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_text(self) -> dict[str, str]:
        """Return it with a role that models are trained with."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOP_LOGPROBS)


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = ""
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each text to be continued, or its tokens."""
        is_single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast("Sequence[str | list[int]]", [self.prompt] if is_single else self.prompt)


_Body = TypeVar("_Body", ChatRequest, CompletionRequest)
_Prompt = tuple[list[int], int]  # token ids, and the first of them or after them that the answer shows


class Reply:
    """The form of one reply, which may have several choices. `chat`: of /v1/chat/completions."""

    def __init__(self, model: str, chat: bool, spell: Callable[[int], str]) -> None:
        self.chat, self.spell = chat, spell  # the text of a token
        id_ = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._facts = {"id": id_, "created": int(time.time()), "model": model}

    def body(self, choices: Sequence[Mapping[str, Any]], *, chunk: bool = False, **more: Any) -> dict[str, Any]:
        """Return a whole reply, or a chunk of a streamed one."""
        kind = "chat.completion" + ".chunk" * chunk if self.chat else "text_completion"
        return {**self._facts, "object": kind, "choices": choices, **more}

    def choice(self, index: int, text: str, reason: str, logprobs: Any, *, chunk: bool = False) -> dict[str, Any]:
        """Return a choice, or new text of one as part of a chunk; `reason` is why it has ended, "" if it has not."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"delta" if chunk else "message": {"role": "assistant", "content": text}}
        finish_reason = {"": None, "eos": "stop"}.get(reason, reason)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, first: Sequence[int], scored: Sequence[Any]) -> dict[str, Any]:
        """Return `token_logprobs` in this form; of the tokens `first`, before which nothing stands, there are none."""

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self.spell(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        if self.chat:
            return {"content": [entry(*own) | {"top_logprobs": [entry(*each) for each in top]} for own, *top in scored]}
        tokens = [self.spell(token) for token in (*first, *(own[0] for own, *_ in scored))]
        nothing = [None] * len(first)
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(own[1] for own, *_ in scored)],
            # Of tokens that are spelled alike the likeliest stays.
            "top_logprobs": [*nothing, *({self.spell(t): v for t, v in reversed(top)} for _, *top in scored)],
            "text_offset": [*accumulate(map(len, tokens), initial=0)][:-1],
        }


class Server:
    """One model behind OpenAI's interface. With a `key`, /v1 is for clients that send it.

    One engine answers all clients; its steps run in a thread, while the event loop serves them.
    """

    def __init__(
        self, model: LoadedModel, *, key: str | None, max_num_seqs: int, max_queue: int, max_tokens: int
    ) -> None:
        self._model, self._max_tokens = model, max_tokens
        self._key = None if key is None else key.encode()
        self._facts = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "affinage"}
        self.engine = Engine(model, max_num_seqs=max_num_seqs, steps=_STEPS, enable_prefix_caching=True)
        self.requests: dict[EngineRequest, _News] = {}  # those that have not ended
        self._capacity = self.engine.slots + max_queue
        self._device = asyncio.Lock()  # held by a step of the engine, or by what is computed between two
        self._running: asyncio.Task[None] | None = None

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/", lambda _: FileResponse(_PAGE / "index.html")),
            Mount("/static", StaticFiles(directory=_PAGE)),
        ]
        guards = [Middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK)] if self._key is None else []
        handlers = dict.fromkeys((HTTPException, ValidationError, UserError, Exception), _error)
        return Starlette(routes=routes, exception_handlers=handlers, middleware=guards)

    def _check_key(self, request: Request) -> None:
        if self._key is not None:
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode("latin-1"), self._key):
                what = "a key is needed: Authorization: Bearer KEY"
                raise Refused(401, what, code="invalid_api_key")

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._facts]})

    async def _parsed(self, request: Request, kind: type[_Body]) -> _Body:
        self._check_key(request)
        # A page of another origin may not send JSON without a preflight request, which is not answered.
        if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the body must be JSON, with the header Content-Type: application/json")
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > _MAX_BODY:
                raise Refused(413, f"the body is longer than {_MAX_BODY:,} bytes")
        body = kind.model_validate_json(content)
        if body.model not in (None, self._model.name):
            what = f"there is no model `{body.model}` here, but `{self._model.name}`"
            raise Refused(404, what, code="model_not_found", param="model")
        return body

    async def _chat(self, request: Request) -> Response:
        body = await self._parsed(request, ChatRequest)
        messages = [message.as_text() for message in body.messages]
        prompt = await asyncio.to_thread(encode_prompt, messages, self._model.tokenizer, self._model.system_prompt)
        alternatives = body.top_logprobs if body.logprobs else None
        return await self._answer(request, body, [(prompt, len(prompt))], alternatives)

    async def _completion(self, request: Request) -> Response:
        body = await self._parsed(request, CompletionRequest)
        return await self._answer(request, body, await asyncio.to_thread(self._encoded, body), body.logprobs)

    def _encoded(self, body: CompletionRequest) -> list[_Prompt]:
        tokenizer, prompts = self._model.tokenizer, list[_Prompt]()
        for prompt in body.prompts:
            opening = list(tokenizer.opening) if isinstance(prompt, str) else []
            ids = [*opening, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
            for token in ids:
                if not 0 <= token < self._model.graph.vocabulary:
                    raise Refused(400, f"there is no token {token}", param="prompt")
            ids = ids or [tokenizer.bos]
            prompts.append((ids, len(opening) if body.echo else len(ids)))
        return prompts

    async def _answer(
        self, http: Request, body: ChatRequest | CompletionRequest, prompts: Sequence[_Prompt], alternatives: int | None
    ) -> Response:
        """Answer prompts; with `alternatives`, each token has a log-probability, as have that many likely ones."""
        longest, most = max((len(ids) for ids, _ in prompts), default=0), self._model.context - 1
        if longest > most:
            what = f"the prompt has {longest:,} tokens; this model takes at most {most:,}"
            raise Refused(400, what, code="context_length_exceeded")
        if len(prompts) * body.n > (most := min(_MAX_CHOICES, self._capacity)):
            raise Refused(400, f"at most {most} choices in all", param="n")
        params, decode = body.params(self._max_tokens), self._model.tokenizer.decode
        requests = [EngineRequest(ids, params, index) for ids, _ in prompts for index in range(body.n)]
        begins = [begin for _, begin in prompts for _ in range(body.n)]
        echoes = [decode(request.prompt[begin:]) for request, begin in zip(requests, begins, strict=True)]
        reply = Reply(self._model.name, isinstance(body, ChatRequest), lambda token: decode([token], keep_special=True))
        news = self._submit(requests)

        async def parts() -> AsyncGenerator[tuple[int, str, str, Any]]:
            """Yield (choice, new text, why it has ended, its log-probabilities) until all choices have ended."""
            left = len(requests)
            try:
                for place, echoed in enumerate(echoes):
                    if echoed:
                        yield place, echoed, "", None
                while left:
                    try:
                        new = await asyncio.wait_for(news.get(), _POLL)
                    except TimeoutError:
                        if await http.is_disconnected():
                            raise ClientDisconnect from None
                        continue
                    if new is None:
                        raise _FAILED
                    request, text, ended = new
                    place, logprobs = requests.index(request), None
                    left -= ended
                    if ended and alternatives is not None:
                        tokens, begin = [*request.prompt, *request.tokens], begins[place]
                        async with self._device:
                            scored = await asyncio.to_thread(token_logprobs, self._model, tokens, alternatives)
                        logprobs = reply.logprobs(tokens[begin:1], scored[max(begin - 1, 0) :])
                    yield place, text, request.finish_reason if ended else "", logprobs
            finally:
                for request in requests:
                    request.cancelled = True
                    self.requests.pop(request, None)

        def usage() -> dict[str, int]:
            read, written = sum(len(ids) for ids, _ in prompts), sum(len(request.tokens) for request in requests)
            return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

        async def events() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(parts()) as streamed:
                try:
                    async for part in streamed:
                        yield _event(reply.body([reply.choice(*part, chunk=True)], chunk=True))
                except Refused as refused:
                    yield _event(refused.body)
                    return
            if body.stream_options.get("include_usage"):
                yield _event(reply.body([], chunk=True, usage=usage()))
            yield b"data: [DONE]\n\n"

        if body.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        ends = {place: (reason, logprobs) async for place, _, reason, logprobs in parts() if reason}
        texts = [echoed + request.text for echoed, request in zip(echoes, requests, strict=True)]
        choices = [reply.choice(place, text, *ends[place]) for place, text in enumerate(texts)]
        return JSONResponse(reply.body(choices, usage=usage()))

    def _submit(self, requests: Sequence[EngineRequest]) -> _News:
        """Queue requests, all or none, and return the queue of their events. Raises Refused if there is no room."""
        if len(self.requests) + len(requests) > self._capacity:
            raise Refused(429, "the queue is full; try again in 2 s")
        news = _News()
        for request in requests:
            self.requests[request] = news
            self.engine.submit(request)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return news

    async def _run(self) -> None:
        """Let the engine go on as long as there are requests, and pass on what it generates."""
        while self.requests:
            try:
                async with self._device:
                    events = await asyncio.to_thread(self.engine.step)
            except Exception:  # the state was donated to a program that returned none
                _LOG.exception("the engine failed")
                for news in set(self.requests.values()):
                    news.put_nowait(None)
                self.requests.clear()
                self.engine.reset()
                return
            for event in events:
                request, _, ended = event
                if request in self.requests:  # else its client has gone
                    self.requests[request].put_nowait(event)
                    if ended:
                        del self.requests[request]


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def run(
    model: LoadedModel,
    ready: Callable[[str, str | None], None],
    *,
    host: str,
    port: int,
    key: str | None,
    grace: float,
    **limits: int,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; answers under way then have `grace` seconds to end.

    `ready` is called with the URL and the key, once everything is compiled. An address that other machines reach has a
    key, which is made up if there is none. `limits` are `max_num_seqs`, `max_queue` and `max_tokens` of `Server`.
    Raises UserError if it cannot listen.
    """
    if host not in _LOOPBACK:
        key = key or secrets.token_urlsafe(24)
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise UserError(what, fix="Choose another with --port, or 0 for any that is free.") from error
    with listening:
        server = Server(model, key=key, **limits)
        server.engine.warm_up()
        settings: Any = {"log_level": "warning", "access_log": False, "lifespan": "off"}
        serving = uvicorn.Server(uvicorn.Config(server.app(), timeout_graceful_shutdown=math.ceil(grace), **settings))
        address, port = listening.getsockname()
        ready(f"http://{'127.0.0.1' if address == '0.0.0.0' else address}:{port}", key)
        # uvicorn ends at the first signal, and sends itself the signal when it has ended: it must not kill the process.
        with handled_by(serving.handle_exit):
            serving.run(sockets=[listening])

"""OpenAI's interface to one model, over HTTP, and a page to talk with it: Starlette under uvicorn."""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

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
from affinage.generation.engine import (
    TOP_LOGPROBS,
    Engine,
    EngineRequest,
    Event,
    Generation,
    LoadedModel,
    token_logprobs,
)
from affinage.generation.sampling import SamplingParams

_LOG = logging.getLogger(__name__)
_PAGE = Path(__file__).parent / "page"
_STEPS = 4  # tokens per dispatch: how often text is passed on and newcomers are admitted
_MAX_CHOICES = 16  # of one request
# Another name may have been pointed to this machine, so that a foreign page could read the answers.
_LOOPBACK = ["localhost", "127.0.0.1"]
_RETRY_AFTER = 2  # seconds
_POLL = 1.0  # seconds between two checks that the client is still connected
# Fields that clients send and that do not change the answer.
_INERT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice"}
_INERT |= {"parallel_tool_calls"}
_DEFAULTS: tuple[Any, ...] = (None, 0, "", [], {}, {"type": "text"}, ["text"])  # by which a client requests nothing

_News = asyncio.Queue[Event | None]  # None: the engine has failed


class Refused(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


_FAILED = Refused(500, "the server could not answer; its log has the reason")


class CommonRequest(BaseModel):
    """The fields of both endpoints. top_k, min_p and ignore_eos are vLLM's; `SamplingParams` has the ranges."""

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

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Return the body of a request. Raises Refused with the field that is wrong."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "the body"
            raise Refused(400, f"{name}: {first['msg']}", param=name) from error

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

    def choice(
        self, index: int, text: str, end: Generation | None = None, logprobs: Any = None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """Return a choice, or new text of one as part of a chunk."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"delta" if chunk else "message": {"role": "assistant", "content": text}}
        reason = None if end is None else "length" if end.finish_reason == "length" else "stop"
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, first: Sequence[int], scored: Sequence[Any]) -> dict[str, Any]:
        """Return `token_logprobs` in this form; of the tokens `first`, before which nothing stands, there are none."""

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self.spell(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        if self.chat:
            tops = [[entry(*alternative) for alternative in each.top] for each in scored]
            return {"content": [entry(*each[:2]) | {"top_logprobs": top} for each, top in zip(scored, tops)]}
        tokens = [self.spell(token) for token in (*first, *(each.token for each in scored))]
        nothing = [None] * len(first)
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(each.logprob for each in scored)],
            # Of tokens that are spelled alike the likeliest stays.
            "top_logprobs": [*nothing, *({self.spell(t): v for t, v in reversed(each.top)} for each in scored)],
            "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))],
        }


class EngineLoop:
    """One engine for all clients; its steps run in a thread, while the event loop serves them."""

    def __init__(self, model: LoadedModel, max_num_seqs: int, max_queue: int) -> None:
        self.engine = Engine(model, max_num_seqs=max_num_seqs, steps=_STEPS, enable_prefix_caching=True)
        self.capacity = self.engine.slots + max_queue
        self.requests: dict[EngineRequest, _News] = {}
        self.device = asyncio.Lock()  # held by a step of the engine, or by what is computed between two
        self._task: asyncio.Task[None] | None = None

    def submit(self, requests: Sequence[EngineRequest]) -> _News:
        """Queue requests, all or none, and return the queue of their events. Raises Refused if there is no room."""
        if sum(not request.cancelled for request in self.requests) + len(requests) > self.capacity:
            raise Refused(429, f"the queue is full; try again in {_RETRY_AFTER} s")
        news = _News()
        self.requests |= dict.fromkeys(requests, news)
        for request in requests:
            self.engine.submit(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return news

    async def _run(self) -> None:
        while any(not request.cancelled for request in self.requests):
            try:
                async with self.device:
                    events = await asyncio.to_thread(self.engine.step)
            except Exception:  # the state was donated to a program that returned none
                _LOG.exception("the engine failed")
                for news in set(self.requests.values()):
                    news.put_nowait(None)
                self.requests.clear()
                self.engine.reset()
                return
            for new in events:
                self.requests[new[0]].put_nowait(new)
            ended = {request for request, _, generation in events if generation is not None}
            self.requests = {r: news for r, news in self.requests.items() if not (r.cancelled or r in ended)}


class Server:
    """One model behind OpenAI's interface. With a `key`, /v1 is for clients that send it."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        key: str | None = None,
        max_num_seqs: int = 8,
        max_queue: int = 64,
        max_tokens: int = 1024,
        max_body: int = 2**20,
    ) -> None:
        self._model, self._max_tokens, self._max_body = model, max_tokens, max_body
        self.loop = EngineLoop(model, max_num_seqs, max_queue)
        self._max_choices = min(_MAX_CHOICES, self.loop.capacity)
        self._key = None if key is None else key.encode()
        self._facts = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "affinage"}

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
        handlers = dict.fromkeys((Refused, UserError, HTTPException, Exception), _error)
        return Starlette(routes=routes, exception_handlers=handlers, middleware=guards)

    def _check_key(self, request: Request) -> None:
        if self._key is not None:
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode("latin-1"), self._key):
                raise Refused(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._facts]})

    async def _chat(self, request: Request) -> Response:
        body = ChatRequest.parse(await self._body(request))
        messages = [message.as_text() for message in body.messages]
        prompt = await asyncio.to_thread(encode_prompt, messages, self._model.tokenizer, self._model.system_prompt)
        return await self._answer(request, body, [prompt], [len(prompt)], body.top_logprobs if body.logprobs else None)

    async def _completion(self, request: Request) -> Response:
        body, tokenizer = CompletionRequest.parse(await self._body(request)), self._model.tokenizer
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        encoded = iter(await asyncio.to_thread(tokenizer.encode_batch, texts))
        opening = list(tokenizer.opening)
        prompts = [[*opening, *next(encoded).tolist()] if isinstance(each, str) else each for each in body.prompts]
        for token in {token for prompt in prompts for token in prompt}:
            if not 0 <= token < self._model.graph.vocabulary:
                raise Refused(400, f"there is no token {token}", param="prompt")
        prompts = [prompt or [tokenizer.bos] for prompt in prompts]
        opened = [len(opening) if isinstance(each, str) else 0 for each in body.prompts]
        begins = opened if body.echo else [len(prompt) for prompt in prompts]
        return await self._answer(request, body, prompts, begins, body.logprobs)

    async def _body(self, request: Request) -> bytes:
        self._check_key(request)
        # A page of another origin may not send JSON without a preflight request, which is not answered.
        if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the body must be JSON, with the header Content-Type: application/json")
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > self._max_body:
                raise Refused(413, f"the body is longer than {self._max_body:,} bytes")
        return bytes(content)

    async def _answer(
        self,
        http: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        begins: Sequence[int],
        alternatives: int | None,
    ) -> Response:
        """Answer prompts, each from a token on: of the prompt if it is echoed, else the first one after it.

        With `alternatives`, each token has its log-probability and those of that number of likely ones.
        """
        if body.model not in (None, self._model.name):
            what = f"there is no model `{body.model}` here, but `{self._model.name}`"
            raise Refused(404, what, code="model_not_found", param="model")
        longest, most = max(map(len, prompts), default=0), self._model.context - 1
        if longest > most:
            what = f"the prompt has {longest:,} tokens; this model takes at most {most:,}"
            raise Refused(400, what, code="context_length_exceeded")
        if len(prompts) * body.n > self._max_choices:
            raise Refused(400, f"at most {self._max_choices} choices in all", param="n")
        params, decode = body.params(self._max_tokens), self._model.tokenizer.decode
        requests = [EngineRequest(prompt, params, index) for prompt in prompts for index in range(body.n)]
        begins = [begin for begin in begins for _ in range(body.n)]
        reply = Reply(self._model.name, isinstance(body, ChatRequest), lambda token: decode([token], keep_special=True))
        news = self.loop.submit(requests)

        async def parts() -> AsyncGenerator[tuple[int, str, Generation | None, Any]]:
            """Yield (choice, new text, its end, its log-probabilities) until all choices have ended."""
            left = len(requests)
            try:
                for place, request in enumerate(requests):
                    if echoed := decode(request.prompt[begins[place] :]):
                        yield place, echoed, None, None
                while left:
                    try:
                        new = await asyncio.wait_for(news.get(), _POLL)
                    except TimeoutError:
                        if await http.is_disconnected():
                            raise ClientDisconnect from None
                        continue
                    if new is None:
                        raise _FAILED
                    request, text, end = new
                    place, logprobs = requests.index(request), None
                    left -= end is not None
                    if end is not None and alternatives is not None:
                        tokens, begin = [*request.prompt, *end.tokens], begins[place]
                        async with self.loop.device:
                            scored = await asyncio.to_thread(token_logprobs, self._model, tokens, alternatives)
                        logprobs = reply.logprobs(tokens[begin:1], scored[max(begin - 1, 0) :])
                    yield place, text, end, logprobs
            finally:
                for request in requests:
                    request.cancelled = True

        def usage() -> dict[str, int]:
            read, written = sum(map(len, prompts)), sum(len(request.tokens) for request in requests)
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
        texts, ends = [""] * len(requests), dict[int, tuple[Generation, Any]]()
        async for place, text, end, logprobs in parts():
            texts[place] += text
            if end is not None:
                ends[place] = end, logprobs
        choices = [reply.choice(place, text, *ends[place]) for place, text in enumerate(texts)]
        return JSONResponse(reply.body(choices, usage=usage()))


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def _error(request: Request, error: Exception) -> Response:
    """The reply in OpenAI's form; a UserError is a mistake that the chat template or the sampling finds."""
    refused = _FAILED
    if isinstance(error, Refused):
        refused = error
    elif isinstance(error, UserError):
        refused = Refused(400, f"{error.what}. {error.fix}".rstrip())
    elif isinstance(error, HTTPException):
        refused = Refused(error.status_code, str(error.detail))
    headers = {429: {"Retry-After": str(_RETRY_AFTER)}, 401: {"WWW-Authenticate": "Bearer"}}.get(refused.status)
    return JSONResponse(refused.body, status_code=refused.status, headers=headers)


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
    """Serve until SIGINT or SIGTERM; answers under way then have `grace` seconds to end.

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
        server.loop.engine.warm_up()
        app, seconds = server.app(), math.ceil(grace)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=seconds, lifespan="off"
        )
        address, port = listening.getsockname()
        ready(f"http://{'127.0.0.1' if address == '0.0.0.0' else address}:{port}", key)
        # uvicorn ends at the first signal, does not wait for answers after a second, and then sends itself the signal.
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

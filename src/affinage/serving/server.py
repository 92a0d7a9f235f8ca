"""OpenAI's interface to one model, over HTTP, and a page to talk with it: Starlette under uvicorn."""

import asyncio
import hmac
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import uvicorn
from pydantic import AliasChoices, BaseModel, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from affinage.data.chat import encode_prompt
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.generation.engine import TOP_LOGPROBS, Engine, Event, LoadedModel
from affinage.generation.sampling import EngineRequest, SamplingParams
from affinage.stopping import handled_by

Ready = Callable[[str, str | None], None]  # of a server's URL and key

_PAGE = Path(__file__).parent / "page"
# Another name may have been pointed to this machine, so that a foreign page could read the answers.
_LOOPBACK = ["localhost", "127.0.0.1"]
_MAX_BODY = 2**20  # bytes
_FAILED = "the server could not answer; its log has the reason"
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "2"}}  # of refusals, by their status
_IGNORED = {"user", "metadata", "store", "service_tier", "tool_choice", "parallel_tool_calls", "prompt_cache_key"}
_ONES = dict.fromkeys("best_of repetition_penalty skip_special_tokens add_generation_prompt".split(), (1,))
_DEFAULTS: tuple[Any, ...] = (None, 0, "", [], {}, {"type": "text"}, ["text"])  # by which a client requests nothing


class Refused(HTTPException):
    """An error that a client receives; `code` is OpenAI's name for it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.code = code


async def _error(request: Request, error: Exception) -> Response:
    """The reply to a request that failed, in OpenAI's form. A UserError is of the chat template or the sampling."""
    status, message = 500, _FAILED
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, ValidationError):
        first = error.errors()[0]
        status, message = 400, f"{first['loc'][0] if first['loc'] else 'the body'}: {first['msg']}"
    elif isinstance(error, UserError):
        status, message = 400, f"{error.what}. {error.fix}".rstrip()
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": getattr(error, "code", None)}}
    return JSONResponse(body, status, getattr(error, "headers", None))


class CommonRequest(BaseModel, extra="forbid", allow_inf_nan=False):
    """The body of both endpoints. top_k, min_p and ignore_eos are vLLM's; `SamplingParams` has the ranges."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # -1, as 0, stands for all
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    ignore_eos: bool = False
    seed: int | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: dict[str, bool] = {}
    response_format: dict[Literal["type"], Literal["text"]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, body: Any) -> Any:
        """Leave out nulls, and fields that are unknown here but request nothing, such as `frequency_penalty: 0`."""
        if isinstance(body, dict):
            known, body = cls.model_fields, {k: v for k, v in body.items() if v is not None and k not in _IGNORED}
            body = {key: value for key, value in body.items() if key in known or value not in _ONES.get(key, _DEFAULTS)}
        return body

    def params(self, most: int, logprobs: int | None) -> SamplingParams:
        """Return the parameters of the engine, for at most `most` tokens. Raises UserError for one out of its range."""
        limit = most if self.max_tokens is None else min(self.max_tokens, most)
        filters = self.temperature, max(0, self.top_k), self.top_p, self.min_p
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(limit, *filters, seed, self.ignore_eos, stop, logprobs)


class _TextPart(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]

    def as_text(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOP_LOGPROBS)


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = ""
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)


_Body = ChatRequest | CompletionRequest


def _prompts(body: _Body, model: LoadedModel) -> list[tuple[list[int], int]]:
    """The token ids of each prompt, and the place in them, or at their end, from which on they are shown."""
    tokenizer, prompts = model.tokenizer, list[tuple[list[int], int]]()
    if isinstance(body, ChatRequest):
        ids = encode_prompt([message.as_text() for message in body.messages], tokenizer, model.system_prompt)
        return [(ids, len(ids))]
    is_single = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
    for prompt in cast("list[str | list[int]]", [body.prompt] if is_single else body.prompt):
        opening = list(tokenizer.opening) if isinstance(prompt, str) else []
        ids = ([*opening, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt) or [tokenizer.bos]
        if unknown := [token for token in ids if not 0 <= token < model.graph.vocabulary]:
            raise Refused(400, f"there is no token {unknown[0]}")
        prompts.append((ids, len(opening) if body.echo else len(ids)))
    return prompts


def _logprobs(is_chat: bool, scored: Sequence[Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """`token_logprobs` in the form of an endpoint."""

    def spell(token: int) -> str:
        return tokenizer.decode([token], keep_special=True)

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": spell(token), "logprob": value, "bytes": list(spell(token).encode())}

    if is_chat:
        return {"content": [entry(*own) | {"top_logprobs": [entry(*each) for each in top]} for own, *top in scored]}
    tokens = [spell(own[0]) for own, *_ in scored]
    return {
        "tokens": tokens,
        "token_logprobs": [own[1] for own, *_ in scored],
        # Of tokens that are spelled alike the likeliest stays.
        "top_logprobs": [{spell(token): value for token, value in reversed(top)} or None for _, *top in scored],
        "text_offset": [*accumulate(map(len, tokens), initial=0)][:-1],
    }


class Server:
    """One model and engine behind OpenAI's interface. With a `key`, /v1 is for clients that send it."""

    def __init__(
        self, model: LoadedModel, key: str | None, *, max_num_seqs: int, max_queue: int, max_tokens: int
    ) -> None:
        self._model, self._max_tokens, self._key = model, max_tokens, key
        self.engine = Engine(model, max_num_seqs=max_num_seqs, interactive=True)
        self.news: dict[EngineRequest, list[Event | Refused]] = {}  # of open requests
        self._capacity = self.engine.slots + max_queue
        self._step: asyncio.Task[None] | None = None  # the one that the engine makes now, or the last

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/chat/completions", partial(self._answer, ChatRequest), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, CompletionRequest), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/", lambda _: FileResponse(_PAGE / "index.html")),
            Mount("/static", StaticFiles(directory=_PAGE)),
        ]
        guards = [Middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK)] if self._key is None else []
        handlers = dict.fromkeys((HTTPException, ValidationError, UserError, Exception), _error)
        return Starlette(routes=routes, exception_handlers=handlers, middleware=guards)

    def _check_key(self, http: Request) -> None:
        sent = http.headers.get("Authorization", "").partition(" ")[2].encode()  # after "Bearer", in any case
        if self._key is not None and not hmac.compare_digest(sent, self._key.encode()):
            raise Refused(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    async def _models(self, http: Request) -> Response:
        self._check_key(http)
        facts = {"id": self._model.name, "object": "model", "created": int(time.time()), "owned_by": "affinage"}
        return JSONResponse({"object": "list", "data": [facts]})

    async def _answer(self, kind: type[_Body], http: Request) -> Response:
        self._check_key(http)
        # A page of another origin may not send JSON without a preflight request, which is not answered.
        if http.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the body must be JSON, with the header Content-Type: application/json")
        content = bytearray()
        async for part in http.stream():  # to the end: a client that is still sending would not receive the refusal
            content += part[: _MAX_BODY + 1 - len(content)]
        if len(content) > _MAX_BODY:
            raise Refused(413, f"the body is longer than {_MAX_BODY:,} bytes")
        body = kind.model_validate_json(content)
        if body.model not in (None, self._model.name):
            raise Refused(404, f"there is no model `{body.model}`, but `{self._model.name}`", code="model_not_found")
        prompts = await asyncio.to_thread(_prompts, body, self._model)
        if (longest := max((len(ids) for ids, _ in prompts), default=0)) >= self._model.context:
            what = f"the prompt has {longest:,} tokens; this model takes at most {self._model.context - 1:,}"
            raise Refused(400, what, code="context_length_exceeded")
        top = (body.top_logprobs if body.logprobs else None) if isinstance(body, ChatRequest) else body.logprobs
        params = body.params(self._max_tokens, top)
        if len(prompts) * body.n > self._capacity:
            raise Refused(400, f"at most {self._capacity} choices in all")
        # Each choice, and the place in its tokens from which on they are shown.
        begins = {EngineRequest(ids, params, index): begin for ids, begin in prompts for index in range(body.n)}
        if len(self.news) + len(begins) > self._capacity:
            raise Refused(429, "the queue is full; try again in 2 s")
        parts, is_chat, requests = self._parts(http, begins), isinstance(body, ChatRequest), list(begins)
        await anext(parts)  # takes places in the queue, now: a streamed response begins after others were admitted
        name = "chat.completion" + ".chunk" * body.stream if is_chat else "text_completion"
        facts = {"id": secrets.token_hex(12), "object": name, "created": int(time.time()), "model": self._model.name}

        def choice(request: EngineRequest, text: str, ended: bool) -> dict[str, Any]:
            """A choice or, of a streamed one, its new text."""
            message = {"delta" if body.stream else "message": {"role": "assistant", "content": text}}
            scored = request.logprobs[begins[request] :] if ended and params.logprobs is not None else None
            return {
                "index": requests.index(request),
                **(message if is_chat else {"text": text}),
                "logprobs": None if scored is None else _logprobs(is_chat, scored, self._model.tokenizer),
                "finish_reason": request.finish_reason.replace("eos", "stop") if ended else None,
            }

        def usage() -> dict[str, int]:
            read = sum(len(request.prompt) for request in requests if request.index == 0)
            written = sum(len(request.tokens) for request in requests)
            return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

        def event(**more: Any) -> str:
            return f"data: {json.dumps(facts | more, ensure_ascii=False)}\n\n"

        async def events() -> AsyncIterator[str]:
            try:
                async with aclosing(parts):
                    async for part in parts:
                        yield event(choices=[choice(*part)])
                if body.stream_options.get("include_usage"):
                    yield event(choices=[], usage=usage())
                yield "data: [DONE]\n\n"
            except Refused as refused:
                yield f"data: {bytes((await _error(http, refused)).body).decode()}\n\n"

        if body.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        texts = dict.fromkeys(requests, "")
        async for request, text, _ in parts:
            texts[request] += text
        return JSONResponse(facts | {"choices": [choice(*each, True) for each in texts.items()], "usage": usage()})

    async def _parts(self, http: Request, begins: Mapping[EngineRequest, int]) -> AsyncGenerator[Event]:
        """Yield one event to drop, what each prompt shows of itself, and what the engine generates, to all ends."""
        news: list[Event | Refused] = []
        self.news |= dict.fromkeys(begins, news)
        try:
            yield EngineRequest([], SamplingParams()), "", False
            for request, begin in begins.items():
                self.engine.submit(request)
                yield request, self._model.tokenizer.decode(request.prompt[begin:]), False
            left = len(begins)
            while left and not await http.is_disconnected():
                # All clients wait for the same step, and look every second whether they are still connected.
                if self._step is None or self._step.done():
                    self._step = asyncio.create_task(self._make_step())
                await asyncio.wait([self._step], timeout=1)
                while news:
                    if isinstance(event := news.pop(0), Refused):
                        raise event
                    left -= event[2]
                    yield event
        finally:
            for request in begins:
                request.cancelled = True
                del self.news[request]

    async def _make_step(self) -> None:
        try:
            for event in await asyncio.to_thread(self.engine.step):
                if event[0] in self.news:  # else its client has gone
                    self.news[event[0]].append(event)
        except Exception:
            logging.getLogger(__name__).exception("the engine failed")
            for news in self.news.values():
                news.append(Refused(500, _FAILED))
            self.engine.reset()  # its cache was donated to a program that returned none


def run(
    model: LoadedModel, ready: Ready, *, host: str, port: int, key: str | None, grace: float, **limits: int
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; answers under way then have `grace` seconds to end.

    `ready` is called with the URL and the key, once everything is compiled. An address that other machines reach has a
    key, which is made up if there is none. `limits` are those of `Server`. Raises UserError if it cannot listen.
    """
    key = key or (None if host in _LOOPBACK else secrets.token_urlsafe(24))
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise UserError(what, fix="Choose another with --port, or 0 for any that is free.") from error
    with listening:
        server = Server(model, key, **limits)
        server.engine.warm_up()
        settings: Any = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": math.ceil(grace)}
        serving = uvicorn.Server(uvicorn.Config(server.app(), lifespan="off", **settings))
        address, port = listening.getsockname()
        ready(f"http://{'127.0.0.1' if address == '0.0.0.0' else address}:{port}", key)
        # uvicorn ends at the first signal, and sends itself the signal when it has ended: it must not kill the process.
        with handled_by(serving.handle_exit):
            serving.run(sockets=[listening])

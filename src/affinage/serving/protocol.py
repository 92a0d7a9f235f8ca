"""OpenAI's interface: what clients may request, and the form of what they are answered."""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from affinage.errors import did_you_mean
from affinage.generation.engine import TOP_LOGPROBS, Generation, TokenLogprobs
from affinage.generation.sampling import SamplingParams

DONE = b"data: [DONE]\n\n"
_MOST_STOPS = 16
# What clients send without wanting anything of it that changes the answer.
_INERT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice"}
_INERT |= {"parallel_tool_calls"}
# What is not supported, with the values that request nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "min_tokens": (None, 0),
}


class Refused(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As clients read it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _null_is(default: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


_LISTED = BeforeValidator(lambda value: [] if value is None else [value] if isinstance(value, str) else value)
_ALL = BeforeValidator(lambda value: 0 if value in (None, -1) else value)  # -1 is vLLM's word for all
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: Annotated[bool, _null_is(False)] = False


class CommonRequest(BaseModel):
    """What both endpoints take. top_k, min_p, repetition_penalty, stop_token_ids and ignore_eos are vLLM's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=10), _null_is(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), _null_is(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31), _ALL] = 0
    min_p: Annotated[float, Field(ge=0, le=1), _null_is(0.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10), _null_is(1.0)] = 1.0
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    stop: Annotated[list[Stop], _LISTED, Field(max_length=_MOST_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], _LISTED, Field(max_length=_MOST_STOPS)] = []
    ignore_eos: Annotated[bool, _null_is(False)] = False
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    n: Annotated[int, Field(ge=1), _null_is(1)] = 1
    stream: Annotated[bool, _null_is(False)] = False
    stream_options: StreamOptions | None = None

    @property
    def longest(self) -> int | None:
        """The most tokens that the client wants."""
        return self.max_tokens

    @property
    def most_likely(self) -> int | None:
        """How many alternatives of each token are listed with their log-probabilities; None: no log-probabilities."""
        return None

    def params(self, most_tokens: int, stops: tuple[int, ...]) -> SamplingParams:
        """What is to be generated; `most_tokens` is what the server allows, `stops` are the tokenizer's."""
        return SamplingParams(
            min(most_tokens if self.longest is None else self.longest, most_tokens),
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            secrets.randbits(32) if self.seed is None else self.seed % 2**32,
            stop_token_ids=(*(() if self.ignore_eos else stops), *self.stop_token_ids),
            stop=tuple(self.stop),
            logprobs=self.most_likely,
        )


class Part(BaseModel):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def as_text(self) -> dict[str, str]:
        """With the role that models are trained with."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: Annotated[bool, _null_is(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS), _null_is(0)] = 0

    @property
    def longest(self) -> int | None:
        """Of the two names that OpenAI has for it the newer one counts."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def most_likely(self) -> int | None:
        """As `logprobs` and `top_logprobs` say."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = ""
    echo: Annotated[bool, _null_is(False)] = False
    logprobs: Annotated[int | None, Field(ge=0, le=TOP_LOGPROBS)] = None

    @property
    def most_likely(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each text to be continued, or its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt
        return cast("Sequence[str | list[int]]", several)


_Kind = TypeVar("_Kind", bound=CommonRequest)


def parse(content: bytes, kind: type[_Kind]) -> _Kind:
    """The body of a request. Raises Refused for a body that is none, with the field that is wrong."""
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    for name, nothing in _UNSUPPORTED.items():
        if body.get(name) not in nothing:
            raise Refused(400, f"`{name}` is not supported", code="unsupported_parameter", param=name)
    body = {name: value for name, value in body.items() if name not in _INERT | _UNSUPPORTED.keys()}
    for name in body.keys() - kind.model_fields.keys():
        hint = did_you_mean(name, kind.model_fields)
        raise Refused(400, f"`{name}` is not supported. {hint}".rstrip(), code="unsupported_parameter", param=name)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field_name = str(first["loc"][0]) if first["loc"] else "the body"  # the members of a union are not named
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in _NAMES) or field_name
        raise Refused(400, f"{place}: {first['msg']}", param=place) from error


_NAMES = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *Message.model_fields, *Part.model_fields}
_NAMES |= set(StreamOptions.model_fields)


@dataclass(frozen=True)
class Reply:
    """One answer, which may have several choices. `chat`: to /v1/chat/completions."""

    model: str
    chat: bool
    prompt_tokens: int
    spell: Callable[[int], str]  # the text of a token
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, generations: Sequence[Generation], echoed: Sequence["Echo"] = ()) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, one in enumerate(generations):
            echo = echoed[index] if echoed else Echo()
            content: dict[str, Any] = {"text": echo.text + one.text}
            if self.chat:
                content = {"message": {"role": "assistant", "content": one.text}}
            logprobs = self._logprobs(one.logprobs, echo)
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": _reason(one)})
        return self._facts("chat.completion") | {"choices": choices, "usage": self.usage(generations)}

    def usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        """How many tokens were read and written."""
        written = sum(len(generation.tokens) for generation in generations)
        read = self.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def begin(self, index: int, echo: "Echo | None" = None) -> bytes:
        """The first event of a choice: the role in a chat, an echo in a text."""
        if self.chat:
            return self._event(index, {"role": "assistant", "content": ""}, None)
        return self.piece(index, echo.text) if echo else b""

    def piece(self, index: int, text: str) -> bytes:
        """An event with new text of a choice."""
        return self._event(index, {"content": text}, None) if text else b""

    def end(self, index: int, generation: Generation) -> bytes:
        """The event that says why a choice has ended, with the log-probabilities of all of its tokens."""
        return self._event(index, {}, _reason(generation), self._logprobs(generation.logprobs, Echo()))

    def count(self, generations: Sequence[Generation]) -> bytes:
        """The event with the number of tokens."""
        return event(self._facts("chat.completion.chunk") | {"choices": [], "usage": self.usage(generations)})

    def _event(self, index: int, delta: Mapping[str, str], reason: str | None, logprobs: Any = None) -> bytes:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return event(self._facts("chat.completion.chunk") | {"choices": [choice]})

    def _facts(self, kind: str) -> dict[str, Any]:
        kind, prefix = (kind, "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None, echo: "Echo") -> dict[str, Any] | None:
        if logprobs is None:
            return None
        if self.chat:
            return {
                "content": [
                    self._entry(one.token, one.logprob)
                    | {"top_logprobs": [self._entry(token, value) for token, value in one.top]}
                    for one in logprobs
                ]
            }
        first = echo.tokens[: len(echo.tokens) - len(echo.logprobs)]
        listed: list[TokenLogprobs | None] = [*([None] * len(first)), *echo.logprobs, *logprobs]
        tokens = [self.spell(token) for token in (*first, *(one.token for one in listed if one is not None))]
        offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        # Of tokens that are spelled alike the likeliest stays.
        top = [None if one is None else {self.spell(t): value for t, value in reversed(one.top)} for one in listed]
        values = [None if one is None else one.logprob for one in listed]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


@dataclass(frozen=True)
class Echo:
    """The prompt before an answer, where a client wants it, with its log-probabilities where it wants those."""

    text: str = ""
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # of all tokens but a first one that nothing comes before


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _reason(generation: Generation) -> str:
    return "length" if generation.finish_reason == "length" else "stop"

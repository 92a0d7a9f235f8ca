"""OpenAI's interface: the requests that clients may send, and the form of the replies."""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from affinage.errors import did_you_mean
from affinage.generation.engine import TOP_LOGPROBS, Generation, TokenLogprobs
from affinage.generation.sampling import SamplingParams

DONE = b"data: [DONE]\n\n"
# Fields that clients send and that do not change the answer.
_INERT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice"}
_INERT |= {"parallel_tool_calls"}


class Refused(Exception):
    """An error in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _requests_nothing(value: Any) -> Any:
    if value not in (0, "", [], {}, {"type": "text"}, ["text"]):
        raise ValueError("this field is not supported")
    return value


Unsupported = Annotated[Any, AfterValidator(_requests_nothing)]
Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """Options of a streamed reply."""

    include_usage: bool = False


class CommonRequest(BaseModel):
    """What both endpoints take. top_k, min_p, repetition_penalty, stop_token_ids and ignore_eos are vLLM's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # -1, as 0, stands for all
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    max_tokens: int | None = Field(None, ge=0)
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Listed] = Field([], max_length=16)
    stop_token_ids: list[TokenId] = Field([], max_length=16)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    best_of: Literal[1] = 1
    frequency_penalty: Unsupported = 0
    presence_penalty: Unsupported = 0
    logit_bias: Unsupported = 0
    tools: Unsupported = 0
    functions: Unsupported = 0
    response_format: Unsupported = 0
    suffix: Unsupported = ""
    modalities: Unsupported = 0
    min_tokens: Unsupported = 0

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, body: Any) -> Any:
        """A null is a field that was left out."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None and name not in _INERT}

    def sampling(self, longest: int | None, logprobs: int | None, *, most: int, stops: Sequence[int]) -> SamplingParams:
        """The parameters of the engine; `most` tokens are allowed, `stops` are the tokenizer's."""
        return SamplingParams(
            most if longest is None else min(longest, most),
            self.temperature,
            max(0, self.top_k),
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            secrets.randbits(32) if self.seed is None else self.seed % 2**32,
            stop_token_ids=(*(() if self.ignore_eos else stops), *self.stop_token_ids),
            stop=tuple(self.stop),
            logprobs=logprobs,
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
        """Return it with a role that models are trained with."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOP_LOGPROBS)

    def params(self, most: int, stops: Sequence[int]) -> SamplingParams:
        """The parameters of the engine; see `sampling`."""
        logprobs = self.top_logprobs if self.logprobs else None
        return self.sampling(self.max_completion_tokens or self.max_tokens, logprobs, most=most, stops=stops)


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = ""
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)

    def params(self, most: int, stops: Sequence[int]) -> SamplingParams:
        """The parameters of the engine; see `sampling`."""
        return self.sampling(self.max_tokens, self.logprobs, most=most, stops=stops)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each text to be continued, or its tokens."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast("Sequence[str | list[int]]", [self.prompt] if one else self.prompt)


_Kind = TypeVar("_Kind", ChatRequest, CompletionRequest)


def parse(content: bytes, kind: type[_Kind]) -> _Kind:
    """Return the body of a request. Raises Refused with the field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        loc = first["loc"]
        if not loc:
            raise Refused(400, f"the body is not a JSON object: {first['msg']}") from error
        # What follows in `loc` are members of unions.
        place = ".".join(map(str, loc[:2] if len(loc) > 1 and isinstance(loc[1], int) else loc[:1]))
        message = f"{place}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            message = f"`{place}` is not supported. {did_you_mean(place, kind.model_fields)}".rstrip()
        raise Refused(400, message, param=place) from error


class Echo(NamedTuple):
    """The prompt before an answer, with the log-probabilities of all tokens but one that begins a text."""

    text: str = ""
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class Reply:
    """The form of one reply, which may have several choices. `chat`: of /v1/chat/completions."""

    model: str
    chat: bool
    prompt_tokens: int
    spell: Callable[[int], str]  # the text of a token
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, generations: Sequence[Generation], echoes: Sequence[Echo]) -> dict[str, Any]:
        """Return the reply in one piece."""
        choices = []
        for index, (one, echo) in enumerate(zip(generations, echoes, strict=True)):
            text = {"text": echo.text + one.text}
            content = {"message": {"role": "assistant", "content": one.text}} if self.chat else text
            choices.append(self._choice(index, content, one, echo))
        return self._object("chat.completion", choices) | {"usage": self._usage(generations)}

    def chunk(self, index: int, text: str, end: Generation | None = None, *, begins: bool = False) -> bytes:
        """Return the event with new text of a choice; its role as a chat begins, its finish reason as it ends."""
        begins = begins and self.chat
        if not (text or end or begins):
            return b""
        delta = {"role": "assistant", "content": text} if begins else {"content": text}
        choice = self._choice(index, {"delta": delta} if self.chat else {"text": text}, end, Echo())
        return event(self._object("chat.completion.chunk", [choice]))

    def _choice(self, index: int, content: Mapping[str, Any], end: Generation | None, echo: Echo) -> dict[str, Any]:
        reason = None if end is None else "length" if end.finish_reason == "length" else "stop"
        logprobs = None if end is None else self._logprobs(end.logprobs, echo)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def usage(self, generations: Sequence[Generation]) -> bytes:
        """Return the event with the numbers of tokens."""
        return event(self._object("chat.completion.chunk", []) | {"usage": self._usage(generations)})

    def _usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        written, read = sum(len(one.tokens) for one in generations), self.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def _object(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        kind, prefix = (kind, "chatcmpl") if self.chat else ("text_completion", "cmpl")
        facts = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return facts | {"choices": choices}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None, echo: Echo) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        if self.chat:
            entries = [(one, [self._entry(*alternative) for alternative in one.top]) for one in logprobs]
            return {"content": [self._entry(one.token, one.logprob) | {"top_logprobs": top} for one, top in entries]}
        first = echo.tokens[: len(echo.tokens) - len(echo.logprobs)]  # nothing comes before it
        known = [*echo.logprobs, *logprobs]
        tokens = [self.spell(token) for token in (*first, *(one.token for one in known))]
        nothing = [None] * len(first)
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(one.logprob for one in known)],
            # Of tokens that are spelled alike the likeliest stays.
            "top_logprobs": [*nothing, *({self.spell(t): v for t, v in reversed(one.top)} for one in known)],
            "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))],
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"

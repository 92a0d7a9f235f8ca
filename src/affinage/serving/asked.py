"""What clients of OpenAI's interface ask for, read and refused."""

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from affinage.errors import UserError
from affinage.generation.decode import Request
from affinage.generation.sampling import Sampling

_LONGEST_STOP = 1000  # characters
_MOST_STOPS = 16
# What is not done here, with the values that ask for nothing. Whatever else a client sends is not looked at.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
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


def _one_or_several(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _none_is_default(default: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    include_usage: Annotated[bool, _none_is_default(False)] = False


class Asked(BaseModel):
    """What both endpoints take. `top_k`, `min_p` and `repetition_penalty` are not OpenAI's but other servers' too."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=10), _none_is_default(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), _none_is_default(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31), _none_is_default(0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1), _none_is_default(0.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10), _none_is_default(1.0)] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[list[Stop], BeforeValidator(_one_or_several), Field(max_length=_MOST_STOPS)] = []
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    n: Annotated[int, Field(ge=1), _none_is_default(1)] = 1
    stream: Annotated[bool, _none_is_default(False)] = False
    stream_options: StreamOptions | None = None

    def request(self, most_tokens: int) -> Request:
        """What is to be generated; `most_tokens` is what the server allows."""
        asked = self.max_completion_tokens or self.max_tokens or most_tokens
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, seed)
        return Request(min(asked, most_tokens), sampling, stop_strings=tuple(self.stop))

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


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


class AskedChat(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


_Kind = TypeVar("_Kind", bound=Asked)
TokenIds = list[Annotated[int, Field(ge=0)]]


class AskedText(Asked):
    """The body of /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = ""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each text to be continued, or its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt
        return cast("Sequence[str | list[int]]", several)


async def read(request: web.Request, kind: type[_Kind]) -> _Kind:
    """The body of a request. Raises Refused for what is none."""
    if request.content_type != "application/json":  # a page of another origin may not send this without asking first
        raise Refused(415, "the body must be JSON, with the header Content-Type: application/json")
    try:
        body = json.loads(await request.read())
        json.dumps(body, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    except web.RequestPayloadError as error:  # not compressed as its headers say, for example
        raise Refused(400, f"the body cannot be read: {error}") from error
    if isinstance(body, dict):
        for name, nothing in _UNSUPPORTED.items():
            if body.get(name) not in nothing:
                raise Refused(400, f"`{name}` is not supported", code="unsupported_parameter", param=name)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(400, f"{place}: {first['msg']}", param=place) from error


def refusal(error: UserError) -> Refused:
    """What a client is told of a mistake of its own."""
    return Refused(400, f"{error.what}. {error.fix}".strip() if error.fix else error.what)

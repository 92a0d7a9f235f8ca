"""OpenAI's interface: the requests that clients may send, and the form of the replies."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from affinage.generation.engine import TOP_LOGPROBS, Generation, TokenLogprobs
from affinage.generation.sampling import SamplingParams

# Fields that clients send and that do not change the answer.
_INERT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice"}
_INERT |= {"parallel_tool_calls"}
_DEFAULTS: tuple[Any, ...] = (None, 0, "", [], {}, {"type": "text"}, ["text"])  # by which a client requests nothing


class Refused(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """Options of a streamed reply."""

    include_usage: bool = False


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
    stream_options: StreamOptions = StreamOptions()

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
        return {name: value for name, value in body.items() if name not in inert | _INERT and value is not None}

    def params(self, most: int) -> SamplingParams:
        """Return the parameters of the engine, for at most `most` tokens. Raises UserError for one out of its range."""
        limit = most if self.max_tokens is None else min(self.max_tokens, most)
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        same = self.model_dump(include={"temperature", "top_p", "min_p", "ignore_eos"})
        return SamplingParams(limit, top_k=max(0, self.top_k), seed=seed, stop=tuple(self.stop), **same)


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


@dataclass(frozen=True)
class Reply:
    """The form of one reply, which may have several choices. `chat`: of /v1/chat/completions."""

    model: str
    chat: bool
    spell: Callable[[int], str]  # the text of a token
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Mapping[str, Any]], *, chunk: bool = False, **more: Any) -> dict[str, Any]:
        """Return a whole reply, or a chunk of a streamed one."""
        kind, prefix = ("chat.completion" + ".chunk" * chunk, "chatcmpl") if self.chat else ("text_completion", "cmpl")
        facts = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**facts, "choices": choices, **more}

    def choice(
        self, index: int, text: str, end: Generation | None = None, logprobs: Any = None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """Return a choice, or new text of one as part of a chunk."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"delta" if chunk else "message": {"role": "assistant", "content": text}}
        reason = None if end is None else "length" if end.finish_reason == "length" else "stop"
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, first: Sequence[int], scored: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return log-probabilities; of the tokens `first`, before which nothing stands, there are none."""

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

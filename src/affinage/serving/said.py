"""Answers in OpenAI's form: whole, or as events on the way."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from affinage.generation.decode import Generation

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """One answer, of which there may be several choices. `chat`: to /v1/chat/completions."""

    model: str
    chat: bool
    prompt_tokens: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """All at once."""
        choices = [self._choice(index, generation) for index, generation in enumerate(generations)]
        return self._facts("chat.completion") | {"choices": choices, "usage": self.usage(generations)}

    def usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        """How many tokens were read and written."""
        written = sum(len(generation.tokens) for generation in generations)
        read = self.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def begun(self, index: int) -> bytes:
        """The first event of a choice; only chats have one."""
        return self._event(index, {"role": "assistant", "content": ""}, None) if self.chat else b""

    def piece(self, index: int, text: str) -> bytes:
        """An event with new text of a choice."""
        return self._event(index, {"content": text}, None) if text else b""

    def ended(self, index: int, generation: Generation) -> bytes:
        """The event that says why a choice has ended."""
        return self._event(index, {}, _reason(generation))

    def counted(self, generations: Sequence[Generation]) -> bytes:
        """The event with the number of tokens."""
        return event(self._facts("chat.completion.chunk") | {"choices": [], "usage": self.usage(generations)})

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        said: dict[str, Any] = {"text": generation.text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": generation.text}}
        return {"index": index, **said, "logprobs": None, "finish_reason": _reason(generation)}

    def _event(self, index: int, delta: Mapping[str, str], reason: str | None) -> bytes:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return event(self._facts("chat.completion.chunk") | {"choices": [choice]})

    def _facts(self, kind: str) -> dict[str, Any]:
        kind, prefix = (kind, "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _reason(generation: Generation) -> str:
    return "length" if generation.ended_by == "length" else "stop"

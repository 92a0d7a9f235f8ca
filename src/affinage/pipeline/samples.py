"""What a model says to the prompts and questions of a recipe, for people to read."""

from collections.abc import Sequence
from typing import Any

from affinage.data.chat import encode_prompt
from affinage.errors import UserError
from affinage.generation.engine import generate
from affinage.generation.model import LoadedModel
from affinage.generation.sampling import SamplingParams

_TOKENS = 64  # shown of each


def continuations(model: LoadedModel, prompts: Sequence[str]) -> dict[str, Any]:
    """{"prompts": [{"prompt", "text"}]}: the most likely continuations."""
    rows = [[*model.tokenizer.opening, *model.tokenizer.encode(prompt)] for prompt in prompts]
    return {"prompts": [{"prompt": p, "text": t} for p, t in zip(prompts, _generated(model, rows, prompts))]}


def answers(model: LoadedModel, questions: Sequence[str]) -> dict[str, Any]:
    """{"questions": [{"question", "text"}]}: the most likely answers, each in a conversation of its own."""
    rows = [
        encode_prompt([{"role": "user", "content": question}], model.tokenizer, model.system_prompt)
        for question in questions
    ]
    return {"questions": [{"question": q, "text": t} for q, t in zip(questions, _generated(model, rows, questions))]}


def _generated(model: LoadedModel, rows: list[list[int]], texts: Sequence[str]) -> list[str]:
    for row, text in zip(rows, texts):
        if len(row) >= model.context:
            raise UserError(
                f"{text[:40]!r} has {len(row)} tokens; this model takes at most {model.context - 1}", where="report"
            )
    return [result.text for result in generate(model, rows, SamplingParams(max_new_tokens=_TOKENS))]
